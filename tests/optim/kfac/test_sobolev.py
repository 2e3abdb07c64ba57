"""K-FAC under a metric that relates the samples: sides, exact blocks and draws, by definition."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.metrics import Fisher, Metric, Sobolev, Weighted
from pullback.testing import assert_close
from tests.optim.kfac import oracle as o

SCALE = 1.5


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


def kernel(x: Tensor, scale: float = SCALE) -> Tensor:
    """e^(−d)(1 + d), pair by pair."""
    n = len(x)
    d = torch.stack([(x[i] - x[j]).norm() / scale for i in range(n) for j in range(n)])
    return (torch.exp(-d) * (1 + d)).view(n, n)


def probes(z: Tensor, batch_dim: int = 0) -> list[Tensor]:
    """e_o at every sample at once."""
    first = z.movedim(batch_dim, 0)
    eye = torch.eye(first[0].numel()).view(-1, *first.shape[1:])
    return [e.expand_as(first).movedim(0, batch_dim) for e in eye]


def amplitudes(z: Tensor) -> list[Tensor]:
    """The columns of diag(√p) − p√pᵀ, each at every sample at once."""
    p = z.detach().softmax(1)
    s = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]
    return list(s.permute(2, 0, 1))


def sobolev(
    model: nn.Module,
    x: Tensor,
    inverse: Tensor,
    columns: Callable[[Tensor], list[Tensor]] = probes,
    *,
    joint: bool = True,
    reduce: bool = False,
    batch_dim: int = 0,
) -> Tensor:
    """⊕ S ⊗ A with A = āᵀK⁻¹ā/1ᵀK⁻¹1 and S = Σ_o DsᵀK⁻¹Ds/B, over the layers' parameters."""
    params, start, index = list(model.parameters()), 0, {}
    for p in params:
        index[id(p)] = torch.arange(start, start + p.numel())
        start += p.numel()
    out = torch.zeros(start, start)
    z, uses = o.watched(model, x)
    n = z.shape[batch_dim]
    outs = [u.out for u in uses]
    found = [torch.autograd.grad(z, outs, c, retain_graph=True) for c in columns(z)]
    for i, use in enumerate(uses):
        m = use.module
        a = o.inputs(m, use.x, batch_dim)
        if reduce:
            a = a.mean(1, keepdim=True)
        whole = joint and m.bias is not None and not isinstance(m, o.TRANSPOSED)
        if whole:
            a = torch.cat([a, torch.ones_like(a[..., :1])], 3)
        left = torch.einsum("ntgi,nm,mtgj->gij", a, inverse, a) / (a.shape[1] * inverse.sum())
        right: Any = 0.0
        shifts: Any = 0.0
        for pulled in found:
            d = o.cotangents(m, use.x, pulled[i], batch_dim)
            d = d.sum(1, keepdim=True) if reduce else d
            right = right + torch.einsum("ntgo,nm,mtgp->gop", d, inverse, d) / n
            flat = o.by_sample(pulled[i], batch_dim)
            if isinstance(m, (*o.CONVS, *o.TRANSPOSED)):
                flat = pulled[i].flatten(2).mT
            flat = flat.sum(1, keepdim=True) if reduce else flat
            shifts = shifts + torch.einsum("nto,nm,mtp->op", flat, inverse, flat) / n
        for g in range(len(left)):
            sides = (left[g], right[g]) if isinstance(m, o.TRANSPOSED) else (right[g], left[g])
            where = index[id(m.weight)].view(len(left), len(sides[0]), -1)[g]
            if whole:
                where = torch.cat([where, index[id(m.bias)].view(len(left), -1, 1)[g]], 1)
            where = where.flatten()
            out[where[:, None], where] = torch.kron(*(s.contiguous() for s in sides))
        if m.bias is not None and not whole:
            groups = 1 if isinstance(m, o.TRANSPOSED) else len(left)
            for where in index[id(m.bias)].view(groups, -1):
                some = where - index[id(m.bias)][0]
                out[where[:, None], where] = shifts[some[:, None], some]
    return out


def stepped(model: nn.Module, x: Tensor, metric: Metric, **options: Any) -> pb.KFAC:
    opt = pb.KFAC(model, **{"lr": 0.0, "fisher": "exact", "metric": metric, **options})
    (model(x) ** 2).sum(-1).mean().backward()
    opt.step()
    opt.close()
    model.zero_grad()
    return opt


class Pooled(nn.Module):
    """Layers on images whose places are averaged."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).flatten(2).mean(2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (mlp, (5, 3)),
    "Linear on sequences": (mlp, (4, 3, 3)),
    "Linear without bias": (lambda: nn.Linear(3, 2, bias=False), (4, 3)),
    "Conv1d": (
        lambda: Pooled(nn.Conv1d(4, 4, 3, groups=2, stride=2, padding=1), nn.Tanh()),
        (3, 4, 7),
    ),
    "Conv2d": (
        lambda: Pooled(
            nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
            nn.Tanh(),
            nn.Conv2d(4, 3, 2, bias=False),
        ),
        (4, 2, 4, 4),
    ),
    "ConvTranspose1d": (
        lambda: Pooled(nn.ConvTranspose1d(4, 4, 3, stride=2, groups=2), nn.Tanh()),
        (3, 4, 3),
    ),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer: str, joint: bool, sharing: str) -> None:
    make, shape = LAYERS[layer]
    model, x = make(), torch.randn(shape)
    opt = stepped(model, x, Sobolev(SCALE, jitter=0.0), joint=joint, sharing=sharing)
    inverse = torch.linalg.inv(kernel(x))
    want = sobolev(model, x, inverse, joint=joint, reduce=sharing == "reduce")
    assert_close(opt.gram().dense(), want, 1e-10, layer)
    assert all(row.block.startswith("kronecker") for row in opt.coverage())


def test_samples_on_another_axis() -> None:
    model, x = mlp(), torch.randn(4, 3, 3)
    opt = stepped(model, x, Sobolev(SCALE, jitter=0.0), batch_dim=1)
    inverse = torch.linalg.inv(kernel(x.movedim(1, 0)))
    want = sobolev(model, x, inverse, lambda z: probes(z, 1), batch_dim=1)
    assert_close(opt.gram().dense(), want, 1e-10, "batch_dim=1")


def test_the_jitter_is_part_of_the_kernel() -> None:
    model, x = mlp(), torch.randn(5, 3)
    opt = stepped(model, x, Sobolev(SCALE, jitter=0.1))
    want = sobolev(model, x, torch.linalg.inv(kernel(x) + 0.1 * torch.eye(5)))
    assert_close(opt.gram().dense(), want, 1e-10, "K + 0.1")


def test_fisher_weighted() -> None:
    """The outputs of single samples in the Fisher metric: the function is x ↦ 2√p(x)."""
    model, x = mlp(), torch.randn(5, 3)
    metric = Sobolev(SCALE, jitter=0.0, inner=Fisher(pb.likelihoods.Categorical()))
    want = sobolev(model, x, torch.linalg.inv(kernel(x)), amplitudes)
    assert_close(stepped(model, x, metric).gram().dense(), want, 1e-10, "inner Fisher")


def test_weighted() -> None:
    model, x, w = mlp(), torch.randn(5, 3), torch.rand(5)
    metric = Weighted(Sobolev(SCALE, jitter=0.0), w)
    inverse = torch.linalg.inv(kernel(x))
    want = sobolev(model, x, inverse, lambda z: [w.sqrt()[:, None] * e for e in probes(z)])
    assert_close(stepped(model, x, metric).gram().dense(), want, 1e-10, "weights")


def alone(x: Tensor, y: Tensor) -> Tensor:
    return torch.eye(len(x), dtype=x.dtype)


@pytest.mark.filterwarnings("ignore:The Sobolev kernel")
@pytest.mark.parametrize("layer", LAYERS)
def test_without_relations_it_is_kfac(layer: str) -> None:
    make, shape = LAYERS[layer]
    model, x = make(), torch.randn(shape)
    opt = stepped(model, x, Sobolev(kernel=alone, jitter=0.0))
    plain = stepped(model, x, pb.metrics.Euclidean())
    assert_close(opt.gram().dense(), plain.gram().dense(), 1e-12, "K = I")


@pytest.mark.filterwarnings("ignore:The Sobolev kernel")
def test_without_relations_it_is_the_fisher_metric() -> None:
    model, x = mlp(), torch.randn(5, 3)
    fisher = Fisher(pb.likelihoods.Categorical())
    opt = stepped(model, x, Sobolev(kernel=alone, jitter=0.0, inner=fisher))
    assert_close(
        opt.gram().dense(), stepped(model, x, fisher).gram().dense(), 1e-12, "K = I, inner Fisher"
    )


def test_ten_times_the_kernel_is_a_tenth_of_the_gram() -> None:
    model, x = mlp(), torch.randn(5, 3)
    one = stepped(model, x, Sobolev(kernel=lambda x, y: kernel(x)))
    ten = stepped(model, x, Sobolev(kernel=lambda x, y: 10 * kernel(x)))
    assert_close(10 * ten.gram().dense(), one.gram().dense(), 1e-12, "degree −1 in K")


def exact(model: nn.Module, x: Tensor, inverse: Tensor) -> Tensor:
    """Jᵀ(K⁻¹ ⊗ I)J/B by autograd alone."""
    z, params = model(x), list(model.parameters())
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(v, params, retain_graph=True)])
        for v in z.flatten()
    ]
    j = torch.stack(rows)
    return j.T @ torch.kron(inverse.contiguous(), torch.eye(z[0].numel())) @ j / len(x)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.Sequential(nn.LayerNorm(3), nn.Tanh()),
    "PReLU": lambda: nn.Sequential(nn.PReLU(3), nn.Tanh()),
    "BatchNorm evaluated": lambda: nn.Sequential(nn.BatchNorm1d(3).eval(), nn.Tanh()),
}


@pytest.mark.parametrize("norm", NORMS)
def test_gains_and_shifts_have_exact_blocks(norm: str) -> None:
    model, x = NORMS[norm](), torch.randn(5, 3)
    opt = stepped(model, x, Sobolev(SCALE, jitter=0.0))
    want = o.unit_mask(model) * exact(model, x, torch.linalg.inv(kernel(x)))
    units = torch.eye(3).repeat(2, 2) if norm != "PReLU" else torch.eye(3)
    assert_close(opt.gram().dense(), units * want, 1e-10, norm)


def test_biases_have_exact_blocks_and_one_layer_of_constant_inputs_too() -> None:
    model, x = mlp(), torch.randn(5, 3)
    want = exact(model, x, torch.linalg.inv(kernel(x)))
    got = stepped(model, x, Sobolev(SCALE, jitter=0.0)).gram().dense()
    assert_close(got[12:16, 12:16], want[12:16, 12:16], 1e-10, "first bias")
    assert_close(got[24:, 24:], want[24:, 24:], 1e-10, "second bias")
    got = stepped(nn.Linear(3, 2), x, Sobolev(SCALE, jitter=0.0)).gram().dense()
    want = exact(nn.Linear(3, 2), x, torch.linalg.inv(kernel(x)))
    assert_close(got, want, 1e-10, "the same cotangents at every sample")


def test_the_exact_block_and_what_the_sides_approximate() -> None:
    """Σ_ij K⁻¹_ij (Σ_o Ds_oi Ds_ojᵀ) ⊗ (ā_iā_jᵀ)/B by autograd; pairing ā_i with Ds_j alone is not.

    Without a normalization A ⊗ S has degree −2 in K: ten times K is 0.01 and not 0.1 of it.
    """
    model, x = mlp(), torch.randn(5, 3)
    inverse = torch.linalg.inv(kernel(x)).contiguous()
    z, uses = o.watched(model, x)
    a = torch.cat([uses[0].x, torch.ones(5, 1)], 1)
    d = torch.stack(
        [torch.autograd.grad(z, uses[0].out, e, retain_graph=True)[0] for e in probes(z)]
    )
    block = torch.einsum("ij,ip,jq,oik,ojl->kplq", inverse, a, a, d, d).reshape(16, 16) / 5
    order = torch.cat([torch.arange(12).view(4, 3), torch.arange(12, 16)[:, None]], 1).flatten()
    want = exact(model, x, inverse)[order[:, None], order]
    assert_close(block, want, 1e-12, "the first layer's block")
    printed = torch.einsum("ij,ip,iq,ojk,ojl->kplq", inverse, a, a, d, d).reshape(16, 16) / 5
    assert torch.linalg.eigvalsh(block)[0] > -1e-10
    assert torch.linalg.eigvalsh((printed + printed.T) / 2)[0] < -1e-2

    def sides(k: Tensor) -> Tensor:
        k = torch.linalg.inv(k)
        return torch.kron(
            torch.einsum("oik,ij,ojl->kl", d, k, d), torch.einsum("ip,ij,jq->pq", a, k, a)
        )

    ten = sides(10 * kernel(x)).norm() / sides(kernel(x)).norm()
    assert float(ten) == pytest.approx(0.01)


def test_one_probe_for_the_whole_batch_is_unbiased() -> None:
    """One output: a probe is exact. Several: on average; independent ones would not be."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3)
    inverse = torch.linalg.inv(kernel(x))
    opt = stepped(model, x, Sobolev(SCALE, jitter=0.0), fisher="mc")
    assert_close(opt.gram().dense(), sobolev(model, x, inverse), 1e-10, "one output")
    model = mlp()
    want = sobolev(model, x, inverse)
    opt = stepped(model, x, Sobolev(SCALE, jitter=0.0), fisher="mc", draws=1500)
    gap = (opt.gram().dense() - want).norm() / want.norm()
    independent = sobolev(model, x, torch.diag(inverse.diagonal()))
    assert gap < 0.1 < 0.5 < (independent - want).norm() / want.norm()


def test_calls_are_related_within_and_pooled() -> None:
    model, x = mlp(), torch.randn(7, 3)
    metric = Sobolev(SCALE, jitter=0.0)
    opt = pb.KFAC(model, lr=0.0, fisher="exact", metric=metric)
    for some in (x[:4], x[4:]):
        (model(some) ** 2).sum().backward()
    opt.step()
    block = torch.zeros(7, 7)
    block[:4, :4], block[4:, 4:] = kernel(x[:4]), kernel(x[4:])
    want = sobolev(model, x, torch.linalg.inv(block))
    assert_close(opt.gram().dense(), want, 1e-10, "a kernel without blocks between calls")


class Mixture(nn.Module):
    """A recurrent layer, a layer on folded samples, an embedding and a parameter by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, 2, batch_first=True)
        self.folded = nn.Linear(2, 2)
        self.kinds = nn.Embedding(3, 2)
        self.gain = nn.Parameter(torch.tensor([1.5, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.folded(self.rnn(x)[0].flatten(0, 1)).unflatten(0, x.shape[:2])
        kinds = self.kinds((x[:, :, 0] > 0).long())
        return ((h + kinds) * self.gain).tanh().mean(1)


def test_where_samples_cannot_be_related_squares_are_unbiased() -> None:
    model, x = Mixture(), torch.randn(3, 2, 2)
    opt = stepped(model, x, Sobolev(SCALE, jitter=0.0), fisher="mc", draws=800)
    rows = {r.name: r for r in opt.coverage()}
    assert {r.block for r in rows.values()} == {"diagonal"}
    assert "inside RNN" in rows["rnn.weight_ih_l0"].reason
    assert "(6, 2)" in rows["folded.weight"].reason
    assert "index" in rows["kinds.weight"].reason
    want = exact(model, x, torch.linalg.inv(kernel(x))).diagonal()
    gap = (opt.gram().diagonal() - want).norm() / want.norm()
    assert gap < 0.25, gap


def test_batch_normalization_in_training() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(16, 3)
    opt = pb.KFAC(model, lr=0.01, metric=Sobolev(2.0), damping=1e-2, statistics_every=1)
    assert {"0.weight", "1.weight", "3.weight"} <= {r.name for r in opt.coverage()}
    losses = []
    for _ in range(40):
        opt.zero_grad()
        loss = F.mse_loss(model(x), x[:, :2].sin())
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_in_low_precision(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    x = torch.randn(64, 3, dtype=dtype)
    y = x.argmax(1)
    fisher = Fisher(pb.likelihoods.Categorical())
    metric = Sobolev(scale=3, inner=fisher)
    opt = pb.KFAC(model, lr=0.1, metric=metric, damping=1e-2, statistics_every=1, kl_clip=1e-2)
    losses = []
    for _ in range(25):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0], losses


def test_resumes_to_the_same_bits() -> None:
    x = torch.randn(8, 3)

    def run(model: nn.Module, opt: pb.KFAC, steps: int) -> None:
        for _ in range(steps):
            opt.zero_grad()
            (model(x) ** 2).mean().backward()
            opt.step()

    def make(model: nn.Module) -> pb.KFAC:
        return pb.KFAC(model, lr=0.1, metric=Sobolev(2.0), statistics_every=2, invert_every=2)

    model = mlp()
    opt = make(model)
    run(model, opt, 3)
    other = copy.deepcopy(model)
    resumed = make(other)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    run(model, opt, 3)
    run(other, resumed, 3)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


def test_controlled_steps_use_the_same_metric() -> None:
    model, x = mlp(), torch.randn(6, 3)
    opt = pb.KFAC(
        model, lr=0.1, metric=Sobolev(2.0, jitter=0.0), fisher="exact", momentum=0.0,
        damping=pb.optim.kfac.Adaptive(1e-2), statistics_every=1, invert_every=1,
    )  # fmt: skip

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * ((model(x) - x[:, :2]) ** 2).sum(1).mean()
        loss.backward()
        return loss

    losses = [float(opt.step(closure).detach()) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0], losses


# --- bad input ----------------------------------------------------------------------------------


def test_options_that_do_not_go_with_it() -> None:
    with pytest.raises(pb.PullbackError, match="empirical"):
        pb.KFAC(mlp(), lr=0.1, metric=Sobolev(), fisher="empirical")
    with pytest.raises(pb.PullbackError, match="ekfac"):
        pb.KFAC(mlp(), lr=0.1, metric=Weighted(Sobolev(), 2.0), ekfac=True)


def test_inputs_that_are_no_vectors() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(pb.PullbackError, match="float tensor"):
        stepped(model, torch.randint(0, 5, (4, 2)), Sobolev())


def test_inputs_of_another_batch() -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.flatten(0, 1))

    with pytest.raises(pb.PullbackError, match="12 samples"):
        stepped(Spread(), torch.randn(4, 3, 3), Sobolev())


def test_equal_inputs() -> None:
    x = torch.randn(4, 3)[[0, 1, 1, 2]]
    with pytest.raises(pb.PullbackError, match="jitter"):
        stepped(mlp(), x, Sobolev(jitter=0.0))
    assert torch.isfinite(stepped(mlp(), x, Sobolev()).gram().dense()).all()


def test_a_scale_that_relates_nothing_warns_once() -> None:
    model, x = mlp(), torch.randn(4, 3)
    opt = pb.KFAC(model, lr=0.0, metric=Sobolev(1e-3), statistics_every=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            opt.zero_grad()
            (model(x) ** 2).mean().backward()
            opt.step()
    assert sum("median_distance" in str(w.message) for w in seen) == 1


def test_one_sample() -> None:
    opt = stepped(mlp(), torch.randn(1, 3), Sobolev())
    assert torch.isfinite(opt.gram().dense()).all()
