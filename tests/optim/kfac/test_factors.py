"""The sides of every block, for every kind of layer, against hooks, autograd and loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.testing import assert_close
from tests.optim.kfac import oracle as o


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


class Places(nn.Module):
    """Convolutions whose output places are positions: (N, C, *space) -> (N, T, C)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).flatten(2).mT


class Pooled(Places):
    """The same with the places averaged: (N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


def images(*space: int) -> Tensor:
    return torch.randn(2, 4, *space)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "Linear": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        lambda: torch.randn(3, 3),
    ),
    "Linear on sequences, one without bias": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)),
        lambda: torch.randn(3, 4, 3),
    ),
    "Linear on grids": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        lambda: torch.randn(2, 2, 3, 3),
    ),
    "Conv1d": (
        lambda: Places(
            nn.Conv1d(4, 4, 3, groups=2, stride=2, padding=1, padding_mode="circular"),
            nn.Tanh(),
            nn.Conv1d(4, 2, 2, dilation=2),
        ),
        lambda: images(9),
    ),
    "Conv2d": (
        lambda: Places(
            nn.Conv2d(4, 4, (2, 3), groups=2, padding="same", padding_mode="reflect"),
            nn.Tanh(),
            nn.Conv2d(4, 2, 2, dilation=(1, 2), bias=False),
        ),
        lambda: images(4, 5),
    ),
    "Conv2d, zero padding, depthwise": (
        lambda: Pooled(
            nn.Conv2d(4, 4, 3, padding=1, groups=4),
            nn.Tanh(),
            nn.Conv2d(4, 3, 2, stride=(2, 1), padding=(0, 1)),
        ),
        lambda: images(4, 4),
    ),
    "Conv3d": (
        lambda: Places(
            nn.Conv3d(
                4, 2, (2, 1, 2), stride=(1, 2, 1), padding=(1, 0, 1), padding_mode="replicate"
            ),
            nn.Tanh(),
        ),
        lambda: images(2, 3, 2),
    ),
    "ConvTranspose1d": (
        lambda: Places(
            nn.ConvTranspose1d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
            nn.Tanh(),
            nn.ConvTranspose1d(4, 2, 2, dilation=2, bias=False),
        ),
        lambda: images(3),
    ),
    "ConvTranspose2d": (
        lambda: Pooled(
            nn.ConvTranspose2d(4, 4, (2, 3), stride=(2, 1), padding=(0, 1), groups=2),
            nn.Tanh(),
            nn.Conv2d(4, 2, 1),
        ),
        lambda: images(2, 3),
    ),
    "Embedding": (
        lambda: nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Linear(3, 3)),
        lambda: torch.randint(0, 5, (3, 4)),
    ),
    "Embedding, padding": (
        lambda: nn.Sequential(nn.Embedding(5, 3, padding_idx=1), nn.Tanh(), nn.Linear(3, 3)),
        lambda: torch.tensor([[0, 1, 2], [1, 4, 1]]),
    ),
}
WAYS = [
    ("gaussian", True, False, "mean"),
    ("gaussian", False, True, "sum"),
    ("categorical", True, True, "mean"),
    ("categorical", False, False, "sum"),
    ("euclidean", True, False, "sum"),
]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("kind", "joint", "reduce", "reduction"), WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer: str, kind: str, joint: bool, reduce: bool, reduction: str) -> None:
    make, batch = LAYERS[layer]
    model, x = make(), batch()
    sharing = "reduce" if reduce else "expand"
    opt = o.stepped(model, x, kind=kind, joint=joint, sharing=sharing, reduction=reduction)
    want = o.kfac(model, x, kind=kind, joint=joint, reduce=reduce, reduction=reduction)
    assert_close(opt.gram().dense(), want, 1e-12, layer)
    assert all(row.block.startswith("kronecker") for row in opt.coverage())


# --- units: exact blocks of gain and shift --------------------------------------------------


def evaluated(module: nn.Module, like: Tensor) -> nn.Module:
    """Statistics of some data, then fixed."""
    module(like + 0.3)
    return module.eval()


NORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "LayerNorm": (
        lambda: nn.Sequential(nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 2)),
        lambda: torch.randn(3, 3),
    ),
    "LayerNorm of two axes": (lambda: Places(nn.LayerNorm([4, 3]), nn.Tanh()), lambda: images(3)),
    "LayerNorm without bias": (
        lambda: nn.Sequential(nn.LayerNorm(3, bias=False), nn.Tanh(), nn.Linear(3, 2)),
        lambda: torch.randn(2, 4, 3),
    ),
    "RMSNorm": (
        lambda: nn.Sequential(nn.RMSNorm(3), nn.Tanh(), nn.Linear(3, 2)),
        lambda: torch.randn(2, 4, 3),
    ),
    "GroupNorm": (lambda: Places(nn.GroupNorm(2, 4), nn.Tanh()), lambda: images(2, 2)),
    "BatchNorm1d in training": (
        lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)),
        lambda: torch.randn(5, 3),
    ),
    "BatchNorm2d in training, no statistics": (
        lambda: Places(nn.BatchNorm2d(4, track_running_stats=False), nn.Tanh()),
        lambda: images(2, 2),
    ),
    "BatchNorm1d evaluated": (
        lambda: nn.Sequential(
            evaluated(nn.BatchNorm1d(3), torch.randn(5, 3)), nn.Tanh(), nn.Linear(3, 2)
        ),
        lambda: torch.randn(3, 3),
    ),
    "InstanceNorm2d": (
        lambda: Places(nn.InstanceNorm2d(4, affine=True), nn.Tanh()),
        lambda: images(2, 3),
    ),
    "PReLU": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)),
        lambda: torch.randn(4, 3),
    ),
    "PReLU per channel": (lambda: Places(nn.PReLU(4), nn.Tanh()), lambda: images(2, 2)),
}


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize("norm", NORMS)
def test_units_are_exact_blocks(norm: str, kind: str, joint: bool) -> None:
    make, batch = NORMS[norm]
    model, x = make(), batch()
    opt = o.stepped(model, x, kind=kind, joint=joint)
    want = o.kfac(model, x, kind=kind, joint=joint)
    want += o.unit_mask(model, joint) * o.exact(model, x, kind=kind)
    assert_close(opt.gram().dense(), want, 1e-11, norm)
    assert {r.block.partition(" ")[0].rstrip(",") for r in opt.coverage()} <= {"units", "kronecker"}


def test_an_instance_without_an_axis_of_samples() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.InstanceNorm1d(3, affine=True), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.norm(x[0])).mT)[None]

    model, x = Alone(), torch.randn(1, 3, 4)
    opt = o.stepped(model, x, kind="gaussian")
    names = {r.name: r.block for r in opt.coverage()}
    assert names["norm.weight"] == "units, gain and shift"
    mask = o.unit_mask(model)
    got, want = opt.gram().dense(), o.exact(model, x, kind="gaussian")
    assert_close(mask * got, mask * want, 1e-11, "units")


def test_layers_before_a_batch_norm_are_unbiased() -> None:
    """In training mode the samples are coupled; random signs make the sum over samples right."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(3, 2))
    x = torch.randn(4, 2)
    opt = o.optimizer(model, "gaussian", statistics_every=1, ema=0.999)
    for _ in range(250):
        o.loss(model(x), "gaussian").backward()
        opt.step()
        opt.zero_grad()
    first = next(k for k in opt.curvature.averages if "0.weight" in k.names)
    z, uses = o.watched(model, x)
    total = torch.zeros(3, 3)
    for column in o.columns(z, "gaussian"):
        (d,) = torch.autograd.grad(z, [uses[0].out], column, retain_graph=True)
        total += d.T @ d / len(x)
    got = opt.curvature.averages[first].corrected()["Linear.last.outputs"][0]
    assert_close(got, total, 0.1, "Σ δδᵀ over all samples")


# --- compound layers ------------------------------------------------------------------------


def reindexed(gram: Tensor, model: nn.Module, names: list[str]) -> Tensor:
    """The Gram in the order of these parameters of the model."""
    start, index = 0, {}
    for n, p in model.named_parameters():
        index[n] = torch.arange(start, start + p.numel())
        start += p.numel()
    where = torch.cat([index[n] for n in names])
    return gram[where[:, None], where]


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn, self.head = kind(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Unrolled(nn.Module):
    """The same by linear layers, one call per time."""

    def __init__(self, like: Recurrent) -> None:
        super().__init__()
        self.kind = type(like.rnn)
        gates = len(like.rnn.weight_ih_l0)
        self.ih, self.hh, self.head = nn.Linear(3, gates), nn.Linear(4, gates), like.head
        with torch.no_grad():
            for mine, name in ((self.ih, "ih"), (self.hh, "hh")):
                mine.weight.copy_(getattr(like.rnn, f"weight_{name}_l0"))
                mine.bias.copy_(getattr(like.rnn, f"bias_{name}_l0"))

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 4)
        out = []
        for t in range(x.shape[1]):
            u, v = self.ih(x[:, t]), self.hh(h)
            if self.kind is nn.RNN:
                h = torch.tanh(u + v)
            elif self.kind is nn.LSTM:
                i, f, g, q = (u + v).chunk(4, -1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(q) * torch.tanh(c)
            else:
                (ur, uz, un), (vr, vz, vn) = u.chunk(3, -1), v.chunk(3, -1)
                z = torch.sigmoid(uz + vz)
                h = (1 - z) * torch.tanh(un + torch.sigmoid(ur + vr) * vn) + z * h
            out.append(self.head(h))
        return torch.stack(out, 1)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent(kind: type[nn.RNNBase], joint: bool) -> None:
    model, x = Recurrent(kind), torch.randn(2, 3, 3)
    opt = o.stepped(model, x, kind="categorical", joint=joint)
    explicit = Unrolled(model)
    assert_close(explicit(x), model(x), 1e-12, "the same function")
    want = reindexed(
        o.kfac(explicit, x, kind="categorical", joint=joint),
        explicit,
        ["ih.weight", "hh.weight", "ih.bias", "hh.bias", "head.weight", "head.bias"],
    )
    assert_close(opt.gram().dense(), want, 1e-11, kind.__name__)


class Attending(nn.Module):
    """Two heads, fused by torch."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        for p in self.attend.parameters():
            nn.init.normal_(p, std=0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        return self.head(self.attend(x, y, y, need_weights=False)[0])


class ByHand(nn.Module):
    """The same by four linear layers; one extra key and value where there are biases for them."""

    def __init__(self, like: Attending, sizes: tuple[int, int, int] = (4, 4, 4)) -> None:
        super().__init__()
        a = like.attend
        self.q, self.k, self.v = (nn.Linear(n, 4, bias=a.in_proj_bias is not None) for n in sizes)
        self.o, self.head = a.out_proj, like.head
        if a.in_proj_weight is not None:
            weights = list(a.in_proj_weight.chunk(3))
        else:
            weights = [a.q_proj_weight, a.k_proj_weight, a.v_proj_weight]
        with torch.no_grad():
            for i, m in enumerate((self.q, self.k, self.v)):
                m.weight.copy_(weights[i])
                if a.in_proj_bias is not None:
                    m.bias.copy_(a.in_proj_bias.chunk(3)[i])
        extra: Any = a.bias_k, a.bias_v
        self.extra = None if a.bias_k is None else [b.detach() for b in extra]

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        q, k, v = self.q(x), self.k(y), self.v(y)
        if self.extra is not None:
            k, v = (
                torch.cat([a, b.expand(len(a), 1, -1)], 1)
                for a, b in zip((k, v), self.extra, strict=True)
            )
        q, k, v = (a.unflatten(-1, (2, 2)).transpose(1, 2) for a in (q, k, v))
        mixed = torch.softmax(q @ k.mT / 2**0.5, -1) @ v
        # the fused layer calls no module for the projection after: call it here
        return self.head(self.o(mixed.transpose(1, 2).flatten(2)))


PACKED = ["q.weight", "k.weight", "v.weight", "q.bias", "k.bias", "v.bias"]
AFTER = ["o.weight", "o.bias", "head.weight", "head.bias"]


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("source", ["self", "longer", "shorter"])
def test_attention(source: str, joint: bool) -> None:
    model, x = Attending(), torch.randn(2, 3, 4)
    args = (x,) if source == "self" else (x, torch.randn(2, 5 if source == "longer" else 2, 4))
    opt = o.stepped(model, *args, kind="gaussian", joint=joint)
    hand = ByHand(model)
    assert_close(hand(*args), model(*args), 1e-12, "the same function")
    want = o.kfac(hand, *args, kind="gaussian", joint=joint)
    want = reindexed(want, hand, PACKED + AFTER)
    assert_close(opt.gram().dense(), want, 1e-11, "MultiheadAttention")
    by_hand = o.stepped(hand, *args, kind="gaussian", joint=joint)
    assert_close(
        reindexed(by_hand.gram().dense(), hand, PACKED + AFTER), want, 1e-11, "written by hand"
    )
    kinds = {r.block.partition(" ")[0] for r in (*opt.coverage(), *by_hand.coverage())}
    assert kinds == {"kronecker"}, "the key's bias has no gradient, and still belongs to its layer"


def test_attention_with_sizes_of_its_own() -> None:
    model = Attending(kdim=3, vdim=3)
    args = torch.randn(2, 3, 4), torch.randn(2, 5, 3)
    opt = o.stepped(model, *args, kind="gaussian")
    hand = ByHand(model, (4, 3, 3))
    want = o.kfac(hand, *args, kind="gaussian", joint=False)  # one bias for three weights
    whole = o.kfac(hand, *args, kind="gaussian", joint=True)
    want, whole = (reindexed(g, hand, PACKED + AFTER) for g in (want, whole))
    after = sum(p.numel() for n, p in hand.named_parameters() if n in AFTER)
    want[-after:, -after:] = whole[-after:, -after:]
    assert_close(opt.gram().dense(), want, 1e-11, "separate projections")


def test_attention_with_a_learned_key() -> None:
    model, x = Attending(add_bias_kv=True), torch.randn(3, 3, 4)
    opt = o.stepped(model, x, kind="gaussian")
    names = [n for n, _ in model.named_parameters()]
    learned = ["attend.bias_k", "attend.bias_v"]
    hand = ByHand(model)
    assert_close(hand(x), model(x), 1e-12, "the same function")
    rest = reindexed(opt.gram().dense(), model, [n for n in names if n not in learned])
    want = reindexed(o.kfac(hand, x, kind="gaussian"), hand, PACKED + AFTER)
    assert_close(rest, want, 1e-11, "the projections")
    extra = [reindexed(opt.gram().dense(), model, [n]) for n in learned]
    truth = o.exact(model, x, kind="gaussian")
    for name, got in zip(learned, extra, strict=True):  # one place per sample: exact
        assert_close(got, reindexed(truth, model, [name]), 1e-11, name)


def test_micro_batches_of_other_lengths_pool_by_places() -> None:
    """Queries and keys count apart: the mean is over all places of each."""
    model = Attending()
    parts = [(torch.randn(2, 3, 4), torch.randn(2, n, 4)) for n in (2, 5)]
    opt = o.optimizer(model, "gaussian")
    for args in parts:
        o.loss(model(*args), "gaussian").backward()
    opt.step()
    packed = next(k for k in opt.curvature.averages if "attend.in_proj_weight" in k.names)
    got = opt.curvature.averages[packed].corrected()["tap.last.inputs"]
    for i, side in enumerate((0, 1, 1)):
        a = torch.cat([p[side].flatten(0, 1) for p in parts])
        a = torch.cat([a, torch.ones(len(a), 1)], 1)
        assert_close(got[i], a.T @ a / len(a), 1e-12, f"group {i}")


# --- parameters of no layer -----------------------------------------------------------------


class Gains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x * self.gain))


@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_a_plain_parameter_averages_squares_of_sampled_gradients(fisher: str) -> None:
    model, x = Gains(), torch.randn(4, 3)
    opt = o.optimizer(model, "categorical", statistics_every=1, ema=0.999, fisher=fisher, draws=4)
    for _ in range(300):
        o.loss(model(x), "categorical").backward()
        opt.step()
        opt.zero_grad()
    want = o.exact(model, x, kind="categorical").diagonal()[:3]
    got = opt.gram().dense()
    assert_close(got.diagonal()[:3], want, 0.12, "unbiased")
    assert got[:3].count_nonzero() == 3
    assert opt.coverage()[0].block == "diagonal"


# --- several uses, several roles ------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(torch.tanh(self.a(x)))))


class Tied(nn.Module):
    """Two layers, one weight, biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Words(nn.Module):
    """An embedding that is also the output layer."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=bias)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(x)))


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize("make", [Twice, Tied, Words, lambda: Words(True)])
def test_several_uses(make: Callable[[], nn.Module], kind: str) -> None:
    model = make()
    x = torch.randint(0, 5, (2, 3)) if isinstance(model, Words) else torch.randn(4, 3)
    opt = o.stepped(model, x, kind=kind)
    assert_close(opt.gram().dense(), o.kfac(model, x, kind=kind), 1e-12, "uses of one role pool")


def test_two_roles_keep_the_partial_traces_of_their_sum() -> None:
    model, x = Words(), torch.randint(0, 5, (2, 3))
    got = o.stepped(model, x, kind="categorical").gram().dense().view(5, 3, 5, 3)
    found = o.factors(model, x, kind="categorical")
    total = torch.zeros(15, 15)
    for role in found.weights["table.weight"].values():
        r, c = role.outputs[0] / found.count, role.input_side(False)[0]
        total += torch.kron(c, r) if role.first else torch.kron(r, c)
    want = total.view(5, 3, 5, 3)
    assert_close(torch.einsum("aibi->ab", got), torch.einsum("aibi->ab", want), 1e-12, "over D")
    assert_close(torch.einsum("aiaj->ij", got), torch.einsum("aiaj->ij", want), 1e-12, "over V")


def test_the_exact_gram_of_a_tied_weight_is_the_explicit_sum() -> None:
    """Jᵀ M J of the tied network is EᵀGE of the untied one, E copying the weight to both."""
    model, x = Tied(), torch.randn(4, 3)
    untied = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    with torch.no_grad():
        for mine, its in ((untied[0], model.a), (untied[2], model.b)):
            mine.weight.copy_(its.weight)  # pyright: ignore[reportCallIssue, reportArgumentType, reportAttributeAccessIssue]
            mine.bias.copy_(its.bias)  # pyright: ignore[reportCallIssue, reportArgumentType, reportAttributeAccessIssue]
    spread = torch.zeros(24, 15)  # untied: W1 b1 W2 b2; tied: W b1 b2
    eye = torch.eye(9)
    spread[:9, :9] = spread[12:21, :9] = eye
    spread[9:12, 9:12] = spread[21:, 12:] = torch.eye(3)
    want = spread.T @ o.exact(untied, x, kind="gaussian") @ spread
    assert_close(o.exact(model, x, kind="gaussian"), want, 1e-12, "oracle")

    class Keep(pb.steps.Step):
        def take(self, local: pb.steps.Local) -> pb.steps.Move:
            self.found, self.gradient = local.direction(0.1), local.gradient
            return pb.steps.Move(self.found.x, 0.0, self.found, accepted=False)

    step = Keep()
    metric = pb.metrics.Fisher(pb.likelihoods.Gaussian())
    natural = pb.NaturalGradient(model, metric, solver=pb.solvers.Cholesky(), step=step)

    def closure() -> Tensor:
        natural.zero_grad()
        loss = o.loss(model(x), "gaussian")
        loss.backward()
        return loss

    natural.step(closure)
    assert_close(
        step.found.x, torch.linalg.solve(want + 0.1 * torch.eye(15), step.gradient), 1e-9, "G⁻¹g"
    )


def test_a_call_that_the_output_does_not_feel_does_not_count() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.aux = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.aux(self.a(10 * x + 1))
            return self.b(torch.tanh(self.a(x)))

    model, x = Idle(), torch.randn(4, 3)
    opt = o.optimizer(model, "gaussian")
    (o.loss(model(x), "gaussian") + model.kept.mean()).backward()
    opt.step()
    key = next(k for k in opt.curvature.averages if "a.weight" in k.names)
    got = opt.curvature.averages[key].corrected()["Linear.last.inputs"][0]
    assert_close(got[:3, :3], x.T @ x / 4, 1e-12, "inputs of the call that matters")
    blocks = {r.name: r.block for r in opt.coverage()}
    assert blocks["aux.weight"] == "gradient"


# --- layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("kind", ["gaussian", "categorical", "euclidean"])
def test_sequence_first(kind: str, reduce: bool) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(4, 3, 3)
    sharing = "reduce" if reduce else "expand"
    opt = o.stepped(model, x, kind=kind, sharing=sharing, batch_dim=1)
    want = o.kfac(model, x, kind=kind, reduce=reduce, batch_dim=1)
    assert_close(opt.gram().dense(), want, 1e-12, "time before samples")


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_ignored_positions_count_nowhere(fisher: str) -> None:
    model, x = LAYERS["Embedding"][0](), torch.randint(0, 5, (3, 4))
    y = torch.randint(0, 3, (3, 4))
    keep = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]]) > 0
    y[~keep] = -100
    opt = o.optimizer(model, "categorical", fisher=fisher)
    z = model(x)
    loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
    given = None
    if fisher == "empirical":
        slope = torch.autograd.grad(loss, z, retain_graph=True)[0] * keep.sum()
        hot = torch.eye(12).view(12, 3, 4, 1)
        given = list(torch.stack([(hot[4 * n : 4 * n + 4] * slope).sum(0) for n in range(3)]))
    loss.backward()
    opt.step()
    want = o.kfac(model, x, kind="categorical", keep=keep, given=given)
    assert_close(opt.gram().dense(), want, 1e-12, "only counted positions")


def test_long_sides_are_diagonals() -> None:
    model, x = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(5, 3)
    opt = o.stepped(model, x, kind="gaussian", max_factor=4)
    found = o.factors(model, x, kind="gaussian")
    one = found.weights["0.weight"]["affine"]
    left = torch.diag((one.outputs[0] / found.count).diagonal())
    right = one.input_side(True)[0]
    two = found.weights["2.weight"]["affine"]
    wide = torch.diag(two.input_side(True)[0].diagonal())
    grams = [torch.kron(left, right), torch.kron(two.outputs[0] / found.count, wide)]
    got = [opt.curvature.block(k).dense() for k in opt.curvature.averages]
    for a, b in zip(got, grams, strict=True):
        assert_close(a, b, 1e-12, "a diagonal side")
    assert "output diagonal" in opt.coverage()[0].block


# --- sampled and empirical Fisher -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", "categorical", "euclidean"])
def test_draws_converge_to_the_exact_fisher(kind: str) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(6, 3)
    opt = o.stepped(model, x, kind=kind, fisher="mc", draws=1500)
    assert_close(opt.gram().dense(), o.kfac(model, x, kind=kind), 0.06, "average of draws")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["gaussian", "categorical", "euclidean"])
def test_empirical_factors_are_those_of_the_loss(kind: str, reduction: str) -> None:
    """Positions of one sample meet in one covector."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(4, 2, 3)
    opt = o.stepped(model, x, kind=kind, fisher="empirical", reduction=reduction)
    z = model(x)
    slope = torch.autograd.grad(o.loss(z, kind, "sum"), z)[0]
    given = [slope * (torch.arange(4) == n).view(4, 1, 1) for n in range(4)]
    want = o.kfac(model, x, kind=kind, given=given, reduction=reduction)
    assert_close(opt.gram().dense(), want, 1e-12, "E[∇ℓ∇ℓᵀ] over the data")
