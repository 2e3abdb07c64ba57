"""K-FAC under a metric that relates the samples: sides, exact blocks and draws, by definition."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.metrics import Fisher, Metric, Sobolev, Weighted
from pullback.optim.kfac import Adaptive
from tests.kfac_options import kfac_of

from ..common import assert_close, closure_of, jacobian, refused
from . import oracle as o

SCALE = 1.5
PLAIN = Sobolev(SCALE, jitter=0.0)
Columns = Callable[[Tensor], list[Tensor]]


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


def kernel(x: Tensor) -> Tensor:
    """e^(−d)(1 + d), pair by pair."""
    n = len(x)
    d = torch.stack([(a - b).norm() / SCALE for a, b in product(x, x)])
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


def weighted(z: Tensor) -> list[Tensor]:
    return [WEIGHTS.sqrt()[:, None] * e for e in probes(z)]


@dataclass(frozen=True)
class Related:
    """How samples are related: K⁻¹, the metric's columns, and how positions are shared."""

    inverse: Tensor
    columns: Columns = probes
    joint: bool = True
    reduce: bool = False
    batch_dim: int = 0

    def input_factor(self, use: o.Use, is_joint: bool) -> Tensor:
        """āᵀK⁻¹ā/1ᵀK⁻¹1 of every group."""
        a = o.inputs(use.module, use.x, self.batch_dim)
        if self.reduce:
            a = a.mean(1, keepdim=True)
        if is_joint:
            a = torch.cat([a, torch.ones_like(a[..., :1])], 3)
        total = a.shape[1] * self.inverse.sum()
        return torch.einsum("ntgi,nm,mtgj->gij", a, self.inverse, a) / total

    def output_factor(self, use: o.Use, deltas: list[Tensor]) -> Tensor:
        """Σ_o DsᵀK⁻¹Ds/B of every group."""
        factor: Any = 0
        for delta in deltas:
            d = o.cotangents(use.module, use.x, delta, self.batch_dim)
            if self.reduce:
                d = d.sum(1, keepdim=True)
            factor = factor + torch.einsum("ntgo,nm,mtgp->gop", d, self.inverse, d)
        return factor / len(self.inverse)


def sobolev(
    model: nn.Module, x: Tensor, inverse: Tensor, columns: Columns = probes, **options: Any
) -> Tensor:
    """⊕ S ⊗ A with A = āᵀK⁻¹ā/1ᵀK⁻¹1 and S = Σ_o DsᵀK⁻¹Ds/B, over the layers' parameters."""
    related = Related(inverse, columns, **options)
    indices = o.index(model)
    names = {id(p): n for n, p in model.named_parameters()}
    size = sum(map(len, indices.values()))
    out = torch.zeros(size, size)
    z, uses = o.record_uses(model, x)
    outputs = [use.out for use in uses]
    pulled_back = [torch.autograd.grad(z, outputs, c, retain_graph=True) for c in columns(z)]
    for i, use in enumerate(uses):
        is_transposed = isinstance(use.module, o.TRANSPOSED)
        bias = names.get(id(use.bias))
        is_joint = related.joint and bias is not None and not is_transposed
        input_factors = related.input_factor(use, is_joint)
        output_factors = related.output_factor(use, [deltas[i] for deltas in pulled_back])
        sides = list(zip(output_factors, input_factors, strict=True))
        if is_transposed:
            sides = [(c, r) for r, c in sides]
        weight = names[id(use.module.weight)]
        o.place_weight(out, indices, (weight, bias if is_joint else None), sides)
        if bias is not None and not is_joint:
            o.place_bias(out, indices[bias], output_factors)
    return out


def exact(model: nn.Module, x: Tensor, inverse: Tensor) -> Tensor:
    """Jᵀ(K⁻¹ ⊗ I)J/B by autograd alone."""
    z = model(x)
    j = jacobian(z, list(model.parameters()))
    return j.T @ torch.kron(inverse.contiguous(), torch.eye(z[0].numel())) @ j / len(x)


def step_once(model: nn.Module, x: Tensor, metric: Metric, **options: Any) -> pb.KFAC:
    opt = kfac_of(model, **{"lr": 0.0, "fisher": "exact", "metric": metric, **options})
    (model(x) ** 2).sum(-1).mean().backward()
    opt.step()
    opt.close()
    return opt


class Pooled(nn.Sequential):
    """Layers on images whose places are averaged."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(2).tanh().mean(2)


def mlp() -> Any:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (mlp, (5, 3)),
    "Linear on sequences": (mlp, (4, 3, 3)),
    "Conv1d": (lambda: Pooled(nn.Conv1d(4, 4, 3, 2, 1, groups=2)), (3, 4, 7)),
    "Conv2d": (lambda: Pooled(nn.Conv2d(2, 4, 3, 1, 1, padding_mode="reflect")), (4, 2, 4, 4)),
    "transposed": (lambda: Pooled(nn.ConvTranspose1d(4, 4, 3, 2, 0, 0, 2, False)), (3, 4, 3)),
}


@pytest.mark.filterwarnings("ignore:The Sobolev kernel")
@pytest.mark.parametrize(("joint", "sharing"), [(True, "expand"), (False, "reduce")])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer: str, joint: bool, sharing: str) -> None:
    make, shape = LAYERS[layer]
    model = make()
    x = torch.randn(shape)
    options: dict[str, Any] = {"joint": joint, "sharing": sharing}
    opt = step_once(model, x, PLAIN, **options)
    inverse = torch.linalg.inv(kernel(x))
    want = sobolev(model, x, inverse, joint=joint, reduce=sharing == "reduce")
    assert_close(opt.gram().dense(), want, 1e-10)
    assert all(row.block.startswith("kronecker") for row in opt.coverage())
    # without relations between the samples it is K-FAC
    opt = step_once(model, x, Sobolev(kernel=lambda x, y: torch.eye(len(x)), jitter=0.0), **options)
    plain = step_once(model, x, pb.metrics.Euclidean(), **options)
    assert_close(opt.gram().dense(), plain.gram().dense(), 1e-12)


WEIGHTS = torch.linspace(0.1, 2.0, 5, dtype=torch.float64)
EYE = torch.eye(5, dtype=torch.float64)
CATEGORICAL = Fisher(pb.likelihoods.Categorical())
METRICS: dict[str, tuple[Metric, Callable[[Tensor], Tensor], Columns]] = {
    "jitter": (Sobolev(SCALE, jitter=0.1), lambda x: kernel(x) + 0.1 * EYE, probes),
    "own kernel": (Sobolev(kernel=lambda x, y: 9 * kernel(x)), lambda x: 9 * kernel(x), probes),
    "Fisher": (Sobolev(SCALE, jitter=0.0, inner=CATEGORICAL), kernel, amplitudes),
    "weights": (Weighted(PLAIN, WEIGHTS), kernel, weighted),
}


@pytest.mark.parametrize("name", METRICS)
def test_kernels_weights_and_metrics_within(name: str) -> None:
    """With a Fisher metric within, the function is x ↦ 2√p(x)."""
    metric, matrix, columns = METRICS[name]
    model = mlp()
    x = torch.randn(5, 3)
    want = sobolev(model, x, torch.linalg.inv(matrix(x)), columns)
    assert_close(step_once(model, x, metric).gram().dense(), want, 1e-5 if "own" in name else 1e-10)


def test_samples_on_another_axis() -> None:
    model = mlp()
    x = torch.randn(4, 3, 3)
    inverse = torch.linalg.inv(kernel(x.movedim(1, 0)))
    want = sobolev(model, x, inverse, lambda z: probes(z, 1), batch_dim=1)
    assert_close(step_once(model, x, PLAIN, batch_dim=1).gram().dense(), want, 1e-10)


@pytest.mark.parametrize("norm", [nn.LayerNorm(3), nn.PReLU(3), nn.BatchNorm1d(3).eval()], ids=str)
def test_gains_and_shifts_have_exact_blocks(norm: nn.Module) -> None:
    model = nn.Sequential(norm, nn.Tanh()).double()
    x = torch.randn(5, 3)
    opt = step_once(model, x, PLAIN)
    count = len(list(norm.parameters()))
    want = torch.eye(3).repeat(count, count) * exact(model, x, torch.linalg.inv(kernel(x)))
    assert_close(opt.gram().dense(), want, 1e-10)


def test_one_probe_for_the_whole_batch_is_unbiased() -> None:
    """One output: a probe is exact. Several: on average; independent ones would not be."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(5, 3)
    inverse = torch.linalg.inv(kernel(x))
    metric = PLAIN
    opt = step_once(model, x, metric, fisher="mc")
    assert_close(opt.gram().dense(), sobolev(model, x, inverse), 1e-10)
    model = mlp()
    want = sobolev(model, x, inverse)
    assert_close(step_once(model, x, metric, fisher="mc", draws=300).gram().dense(), want, 0.2)
    independent = sobolev(model, x, torch.diag(inverse.diagonal()))
    assert (independent - want).norm() > 0.5 * want.norm()


def test_calls_are_related_within_and_pooled() -> None:
    model = mlp()
    x = torch.randn(7, 3)
    opt = kfac_of(model, lr=0.0, fisher="exact", metric=PLAIN)
    for call_inputs in (x[:4], x[4:]):
        (model(call_inputs) ** 2).sum().backward()
    opt.step()
    block = torch.block_diag(kernel(x[:4]), kernel(x[4:]))
    assert_close(opt.gram().dense(), sobolev(model, x, torch.linalg.inv(block)), 1e-10)


class Mixture(nn.Module):
    """A recurrent layer, a layer on folded samples, an embedding and a parameter by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, 2, batch_first=True)
        self.folded = nn.Linear(2, 2)
        self.table = nn.Embedding(3, 2)
        self.gain = nn.Parameter(torch.tensor([1.5, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.folded(self.rnn(x)[0].flatten(0, 1)).unflatten(0, x.shape[:2])
        embedded = self.table((x[:, :, 0] > 0).long())
        return ((h + embedded) * self.gain).tanh().mean(1)


def test_where_samples_cannot_be_related_squares_are_unbiased() -> None:
    model = Mixture()
    x = torch.randn(3, 2, 2)
    opt = step_once(model, x, PLAIN, fisher="mc", draws=250)
    rows = {r.name: r for r in opt.coverage()}
    assert {r.block for n, r in rows.items() if n != "gain"} == {"diagonal"}
    assert "inside RNN" in rows["rnn.weight_ih_l0"].reason
    assert "(6, 2)" in rows["folded.weight"].reason
    assert "index" in rows["table.weight"].reason
    want = exact(model, x, torch.linalg.inv(kernel(x))).diagonal()
    assert_close(opt.gram().diagonal(), want, 0.3)


TRAINED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float64": (torch.float64, {"lr": 0.01}),
    "bfloat16": (torch.bfloat16, {"lr": 0.02, "fisher": "exact"}),
    "adaptive": (torch.float64, {"lr": 0.1, "damping": Adaptive(1e-2), "momentum": 0.0}),
}


@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str) -> None:
    dtype, options = TRAINED[name]
    if name == "float64":
        norms = [nn.BatchNorm1d(8)]
    else:
        norms = []
    model = nn.Sequential(nn.Linear(3, 8), *norms, nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    x = torch.randn(32, 3).to(dtype)
    common = {"damping": 1e-2, "statistics_every": 2}
    opt = kfac_of(model, metric=Sobolev(2.0), **common | options)
    closure = closure_of(opt, model, x, x[:, :2].sin())
    losses = [float(opt.step(closure).detach()) for _ in range(20)]
    assert losses[-1] < 0.6 * losses[0]


def test_inputs_that_have_no_distances_are_refused() -> None:
    table = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    with refused("", "", "float tensor"):
        step_once(table, torch.randint(0, 5, (4, 2)), Sobolev())
    with refused("", "12 samples", ""):
        step_once(nn.Sequential(nn.Flatten(0, 1), mlp()), torch.randn(4, 3, 3), Sobolev())
    assert torch.isfinite(step_once(mlp(), torch.randn(1, 3), Sobolev()).gram().dense()).all()


def test_a_scale_that_relates_nothing_warns_once() -> None:
    model = mlp()
    x = torch.randn(4, 3)
    opt = kfac_of(model, lr=0.0, metric=Sobolev(1e-3), statistics_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            opt.step(closure_of(opt, model, x, x[:, :2]))
    assert sum("median_distance" in str(w.message) for w in caught) == 1
