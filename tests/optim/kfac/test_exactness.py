"""Where K-FAC is exact, what a step is, and which changes of scale must leave it alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.grams.kronecker import Rotated
from pullback.optim.kfac.blocks import damping as d
from pullback.testing import assert_close
from tests.optim.common import flat, vector
from tests.optim.kfac import oracle as o


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


class Averaged(nn.Module):
    """Places averaged at the end: (N, T, I) -> (N, O)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(1)


def layers(model: nn.Module, joint: bool) -> list[list[str]]:
    """Blocks by layer, or by parameter."""
    names = [n for n, _ in model.named_parameters()]
    if not joint:
        return [[n] for n in names]
    return [[n for n in names if n.rpartition(".")[0] == m] for m, _ in model.named_modules()]


# --- where it is exact ----------------------------------------------------------------------


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", ["gaussian", "euclidean"])
def test_deep_linear_networks(kind: str, sharing: str, reduction: str, joint: bool) -> None:
    deep = [nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)]
    model = nn.Sequential(*deep) if sharing == "expand" else Averaged(*deep)
    x = torch.randn(5, 3, 3)
    opt = o.stepped(model, x, kind=kind, sharing=sharing, reduction=reduction, joint=joint)
    want = o.blocks(model, layers(model, joint)) * o.exact(model, x, kind=kind, reduction=reduction)
    assert_close(opt.gram().dense(), want, 1e-12, "the block-diagonal Gauss-Newton matrix")


@pytest.mark.parametrize("joint", [True, False])
def test_one_datum(joint: bool) -> None:
    """One sample at one place: Σ_r δδᵀ ⊗ āāᵀ is the Fisher block itself."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    x = torch.randn(1, 3)
    opt = o.stepped(model, x, kind="categorical", joint=joint)
    want = o.blocks(model, layers(model, joint)) * o.exact(model, x, kind="categorical")
    assert_close(opt.gram().dense(), want, 1e-12, "the block-diagonal Fisher")


def test_one_datum_of_one_draw() -> None:
    """The empirical Fisher of one sample is the outer product of its gradient."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    x = torch.randn(1, 3)
    opt = o.stepped(model, x, kind="categorical", fisher="empirical")
    o.loss(model(x), "categorical").backward()
    g = flat(p.grad for p in model.parameters())
    want = o.blocks(model, layers(model, True)) * (g[:, None] * g)
    assert_close(opt.gram().dense(), want, 1e-12, "ggᵀ by blocks")


CONVS: dict[str, Callable[[], nn.Conv2d]] = {
    "groups": lambda: nn.Conv2d(4, 4, 2, groups=2),
    "stride": lambda: nn.Conv2d(4, 3, (3, 2), stride=(2, 1), padding=1),
    "dilation": lambda: nn.Conv2d(4, 3, 2, dilation=(2, 1)),
    "all": lambda: nn.Conv2d(4, 4, (2, 3), stride=2, dilation=(1, 2), padding=2, groups=2),
}


class Unfolded(nn.Module):
    """A convolution as linear layers, one per group, on `F.unfold`ed patches."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.how = conv
        self.groups = nn.ModuleList()
        assert conv.bias is not None
        pieces = zip(conv.weight.chunk(conv.groups), conv.bias.chunk(conv.groups), strict=True)
        for weight, bias in pieces:
            linear = nn.Linear(weight[0].numel(), len(weight))
            linear.load_state_dict({"weight": weight.flatten(1), "bias": bias})
            self.groups.append(linear)
        del self.how.weight, self.how.bias

    def forward(self, x: Tensor) -> Tensor:
        c = self.how
        size, dilation, padding, stride = c.kernel_size, c.dilation, c.padding, c.stride
        patches = F.unfold(x, size, dilation, padding, stride).mT  # pyright: ignore[reportArgumentType]
        pieces = patches.chunk(len(self.groups), -1)
        return torch.cat([m(a) for m, a in zip(self.groups, pieces, strict=True)], -1)


class Places(nn.Module):
    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).mT


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("case", CONVS)
def test_a_convolution_is_a_linear_layer_on_patches(case: str, sharing: str) -> None:
    conv, x = CONVS[case](), torch.randn(3, 4, 5, 5)
    one = nn.Sequential(Places(conv), nn.Tanh(), nn.Linear(conv.out_channels, 2))
    two = nn.Sequential(Unfolded(copy.deepcopy(conv)), nn.Tanh(), copy.deepcopy(one[2]))
    assert_close(two(x), one(x), 1e-12, "the same function")
    steps = []
    for model in (one, two):
        opt = o.stepped(model, x, kind="categorical", sharing=sharing, lr=0.1, damping=1e-2)
        steps.append(opt)
    assert_close(two(x), one(x), 1e-10, "the same step")
    groups = opt_blocks(steps[0])[0]
    for g, block in enumerate(opt_blocks(steps[1])[: conv.groups]):
        assert_close(groups.left[g], block.left[0], 1e-12, "output side")
        assert_close(groups.right[g], block.right[0], 1e-12, "input side")


def opt_blocks(opt: pb.KFAC) -> list[Any]:
    return [opt.curvature.block(k) for k in opt.curvature.averages]


# --- eigenvalue correction ------------------------------------------------------------------

MIXED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
        lambda: torch.randn(6, 3),
    ),
    "sequences": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)),
        lambda: torch.randn(3, 4, 3),
    ),
    "convolution": (
        lambda: nn.Sequential(Places(CONVS["all"]()), nn.Tanh(), nn.Linear(4, 3)),
        lambda: torch.randn(3, 4, 4, 4),
    ),
    "words and norms": (
        lambda: nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, 3)),
        lambda: torch.randint(0, 5, (3, 4)),
    ),
}


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize("case", MIXED)
def test_corrected_eigenvalues_come_no_farther(case: str, kind: str) -> None:
    """In any eigenbasis the diagonal of the exact Gram is the nearest choice of eigenvalues."""
    make, batch = MIXED[case]
    model, x = make(), batch()
    plain = o.stepped(model, x, kind=kind)
    opt = o.optimizer(model, kind, ekfac=True, statistics_every=1, invert_every=1000)
    for _ in range(3):  # inverted at the first and second statistics, corrected by the third
        o.loss(model(x), kind).backward()
        opt.step()
        opt.zero_grad()
    assert opt.curvature.corrections
    exact = o.exact(model, x, kind=kind)
    for key in opt.curvature.averages:
        mask = o.blocks(model, [list(key.names)])
        rows = torch.cat(
            [torch.full((p.numel(),), n in key.names) for n, p in model.named_parameters()]
        )
        mask = mask * rows * rows[:, None]
        far = (mask * (plain.gram().dense() - exact)).norm()
        near = (mask * (opt.gram().dense() - exact)).norm()
        assert near <= far * (1 + 1e-10) + 1e-13 * exact.norm()  # some are exact already
        if key not in opt.curvature.corrections:
            continue
        held = opt.curvature.inverses[key]
        block = opt.curvature.corrected(key)
        assert block.shape == opt.curvature.block(key).shape
        assert isinstance(block, Rotated)
        assert held.scale is not None
        assert_close(held.scale, 1 / (block.values + 1e-3), 1e-10, "what the step divides by")
    want = torch.linalg.eigvalsh(opt.gram().dense()).sum()
    # a change of basis keeps the trace, so the corrected blocks have that of the exact ones
    corrected = {n for k in opt.curvature.corrections for n in k.names}
    if corrected == {n for n, _ in model.named_parameters()}:
        assert_close(want, exact.trace(), 1e-10, "trace")


# --- steps ----------------------------------------------------------------------------------


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))


def gram(model: nn.Module, x: Tensor, kind: str) -> Tensor:
    """K-FAC's Gram of `network`, norms included."""
    units = o.unit_mask(model) * o.exact(model, x, kind=kind)
    return o.kfac(model, x, kind=kind) + units


def gradient(model: nn.Module, x: Tensor, kind: str) -> Tensor:
    pieces = torch.autograd.grad(o.loss(model(x), kind), list(model.parameters()))
    return flat(pieces)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize("value", [1e-4, 0.3])
def test_exact_damping(kind: str, value: float) -> None:
    model, x = network(), torch.randn(6, 3)
    before, g = vector(model), gradient(model, x, kind)
    want = torch.linalg.solve(gram(model, x, kind) + value * torch.eye(len(g)), g)
    o.stepped(model, x, kind=kind, lr=0.2, damping=d.Exact(value))
    assert_close(before - vector(model), 0.2 * want, 1e-8, "η(F + λ)⁻¹g")


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize("value", [1e-4, 0.3])
def test_tikhonov_damping(kind: str, value: float) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(6, 3)
    found = o.factors(model, x, kind=kind)
    pieces = torch.autograd.grad(o.loss(model(x), kind), list(model.parameters()))
    want = []
    for i, name in enumerate(("0.weight", "2.weight")):
        role = found.weights[name]["affine"]
        r, c = role.outputs[0] / found.count, role.input_side(True)[0]
        pi = ((c.trace() / len(c)) / (r.trace() / len(r))).sqrt()
        r = r + value**0.5 / pi * torch.eye(len(r))
        c = c + value**0.5 * pi * torch.eye(len(c))
        v = torch.cat([pieces[2 * i], pieces[2 * i + 1][:, None]], 1)
        step = (torch.linalg.inv(torch.kron(r, c)) @ v.flatten()).view_as(v)
        want += [step[:, :-1], step[:, -1]]
    before = vector(model)
    o.stepped(model, x, kind=kind, lr=0.2, damping=value)
    assert_close(before - vector(model), 0.2 * flat(want), 1e-9, "(R + √λ/π)⁻¹ ⊗ (C + π√λ)⁻¹ g")


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_no_damping_is_the_pseudo_inverse(kind: str) -> None:
    """Softmax logits are singular always; so is the input side of more weights than samples."""
    model, x = network(), torch.randn(4 if kind == "gaussian" else 9, 3)
    before, g = vector(model), gradient(model, x, kind)
    want = torch.linalg.pinv(gram(model, x, kind), hermitian=True, rtol=1e-11) @ g
    opt = o.stepped(model, x, kind=kind, lr=0.2, damping=0.0)
    assert_close(before - vector(model), 0.2 * want, 1e-7, "η F⁺g")
    assert any("singular" in note for note in opt.info.notes.values())


@pytest.mark.parametrize("damping", [0.0, 1e-2])
@pytest.mark.parametrize("delta", [1e-3, 1e6])
def test_the_clip_bounds_the_length_of_a_step(delta: float, damping: float) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(9, 3)
    f, before, lr = o.kfac(model, x, kind="gaussian"), vector(model), 0.5
    free = copy.deepcopy(model)
    o.stepped(free, x, kind="gaussian", lr=lr, damping=damping)
    o.stepped(model, x, kind="gaussian", lr=lr, damping=damping, kl_clip=delta)
    moved, whole = before - vector(model), before - vector(free)
    length = float(moved @ f @ moved)
    assert length <= delta * (1 + 1e-9)
    assert_close(moved / moved.norm(), whole / whole.norm(), 1e-10, "the same direction")
    if delta > 1:
        assert_close(moved, whole, 1e-12, "a loose clip does nothing")
    elif damping == 0:
        assert length == pytest.approx(delta, rel=1e-8), "undamped the bound is met"


def test_weight_decay_momentum_and_groups() -> None:
    """w ← (1 − ηω)w − ηm, m ← μm + (F + λ)⁻¹g, with η, μ and ω of each group."""
    model, x = network(), torch.randn(6, 3)
    params = list(model.parameters())
    rates = ((0.1, 0.9, 0.3), (0.02, 0.5, 0.0))
    groups = [
        {"params": some, "lr": lr, "momentum": mu, "weight_decay": decay}
        for some, (lr, mu, decay) in zip((params[:2], params[2:]), rates, strict=True)
    ]
    each = torch.cat(
        [
            torch.tensor(r).expand(sum(p.numel() for p in g["params"]), 3)
            for g, r in zip(groups, rates, strict=True)
        ]
    )
    lr, mu, decay = each.T
    opt = o.optimizer(model, "gaussian", params=groups, damping=d.Exact(0.01))
    f = gram(model, x, "gaussian") + 0.01 * torch.eye(len(each))
    w, m = vector(model), torch.zeros(len(each))
    for _ in range(3):  # statistics at the first step only
        g = gradient(model, x, "gaussian")
        m = mu * m + torch.linalg.solve(f, g)
        w = (1 - lr * decay) * w - lr * m
        opt.zero_grad()
        o.loss(model(x), "gaussian").backward()
        opt.step()
        assert_close(vector(model), w, 1e-10, "w")


def test_averages_forget_at_the_given_rate() -> None:
    """value = Σ β^(n−k)(1 − β) new_k / (1 − βⁿ)."""
    model = nn.Sequential(nn.Linear(3, 2))
    batches = [torch.randn(4, 3) for _ in range(3)]
    opt = o.optimizer(model, "gaussian", ema=0.7, statistics_every=1)
    for x in batches:
        opt.zero_grad()
        o.loss(model(x), "gaussian").backward()
        opt.step()
    weights = [0.49 * 0.3, 0.7 * 0.3, 0.3]
    total = sum(weights)
    want = sum(
        w / total * o.kfac(model, x, kind="gaussian") for w, x in zip(weights, batches, strict=True)
    )
    assert_close(opt.gram().dense(), torch.as_tensor(want), 1e-12, "bias-corrected average")


# --- scales that must not matter ------------------------------------------------------------


class Words(nn.Module):
    """Every kind of block that has no randomness: words, linear, norm, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.table(x))
        return self.head(h + self.attend(h, h, h, need_weights=False)[0])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "words": (Words, lambda: torch.randint(0, 5, (4, 3))),
    "convolution": (MIXED["convolution"][0], lambda: torch.randn(4, 4, 4, 4)),
}


def target(z: Tensor, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "categorical":
        return torch.randint(0, z.shape[-1], z.shape[:-1], generator=generator)
    return torch.randn(z.shape, generator=generator)


def value(z: Tensor, y: Tensor, kind: str, reduction: str = "mean") -> Tensor:
    if kind == "categorical":
        return F.cross_entropy(z.flatten(0, -2), y.flatten(), reduction=reduction)
    total = 0.5 * (z - y).square().sum()
    return total if reduction == "sum" else total / z[..., 0].numel()


class Fixed:
    """What a gradient scaler tells."""

    def get_scale(self) -> float:
        return 1024.0


CHANGES = ["duplicate", "micro-batches", "uneven micro-batches", "sum", "scaled"]


@pytest.mark.parametrize(
    ("fisher", "change"),
    [
        *[(fisher, change) for fisher in ("exact", "empirical") for change in CHANGES],
        *[("mc", change) for change in ("sum", "scaled")],  # other batches draw other targets
    ],
)
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize("case", MODELS)
def test_scales_do_not_matter(case: str, kind: str, fisher: str, change: str) -> None:
    make, batch = MODELS[case]
    model, x = make(), batch()
    y = target(model(x).detach(), kind)
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"lr": 0.1, "fisher": fisher, "damping": 1e-3}
    if change == "sum":  # the damping is absolute, so there is none
        options["damping"] = 0.0

    opt = o.optimizer(model, kind, **options)
    before = vector(model)
    value(model(x), y, kind).backward()
    opt.step()
    moved = vector(model) - before

    if change == "sum":
        options["reduction"] = "sum"
    if change == "scaled" and fisher == "empirical":
        options["grad_scaler"] = Fixed()
    opt = o.optimizer(twin, kind, **options)
    if change == "duplicate":
        value(twin(torch.cat([x, x])), torch.cat([y, y]), kind).backward()
    elif change.endswith("micro-batches"):
        sizes = [2, 2] if change == "micro-batches" else [1, 3]
        for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
            (value(twin(a), b, kind) * len(a) / len(x)).backward()
    elif change == "sum":
        value(twin(x), y, kind, "sum").backward()
    else:
        (1024 * value(twin(x), y, kind)).backward()
        for p in twin.parameters():
            assert p.grad is not None
            p.grad /= 1024
    opt.step()
    assert_close(vector(twin) - before, moved, 1e-6 if change == "sum" else 1e-9, change)


def test_padding_has_no_part_in_a_table() -> None:
    """One word beside paddings: K-FAC of the table is its exact Gram, as without paddings."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(3, 2, padding_idx=0), nn.Linear(2, 2)).double()
    index = torch.tensor([[1] + [0] * 9])
    opt = pb.KFAC(net, 0.0, fisher="exact", likelihood=pb.likelihoods.Gaussian())
    net(index).square().mean().backward()
    opt.step()
    z, table = net(index), next(iter(net.parameters()))
    rows = [torch.autograd.grad(v, table, retain_graph=True)[0].flatten() for v in z.flatten()]
    jacobian = torch.stack(rows)
    want = jacobian.T @ jacobian / index.numel()
    torch.testing.assert_close(opt.gram().dense()[:6, :6], want, rtol=1e-10, atol=1e-12)
