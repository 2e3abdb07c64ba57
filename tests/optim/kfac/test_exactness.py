"""Where K-FAC is exact, what a step is, and which changes of scale must leave it alone."""

from __future__ import annotations

import copy
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.optim.kfac import Exact
from pullback.testing import assert_close
from tests.optim.common import flat, vector
from tests.optim.kfac import oracle as o
from tests.optim.kfac.common import Fused, Then, places
from tests.pairs import each_once


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), *between, nn.Tanh(), nn.Linear(4, 3))


# --- where it is exact ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_name", "sharing", "reduction", "joint"),
    [
        ("gaussian", "expand", "mean", True),
        ("gaussian", "reduce", "sum", False),
        ("euclidean", "expand", "sum", False),
        ("euclidean", "reduce", "mean", True),
    ],
)
def test_deep_linear_networks(loss_name: str, sharing: str, reduction: str, joint: bool) -> None:
    deep = [nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)]
    model = nn.Sequential(*deep, Then(lambda z: z if sharing == "expand" else z.mean(1)))
    x = torch.randn(5, 3, 3)
    opt = o.stepped(model, x, kind=loss_name, sharing=sharing, reduction=reduction, joint=joint)
    want = o.blocks(model, joint) * o.exact(model, x, kind=loss_name, reduction=reduction)
    assert_close(opt.gram().dense(), want, 1e-12, "the block-diagonal Gauss-Newton matrix")


@pytest.mark.parametrize("joint", [True, False])
def test_one_datum(joint: bool) -> None:
    """Σ_r δδᵀ ⊗ āāᵀ is the Fisher block itself, and ggᵀ that of the empirical Fisher."""
    model = mlp(nn.Tanh(), nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(1, 3)
    mask = o.blocks(model, joint)
    actual = o.stepped(model, x, kind="categorical", joint=joint).gram().dense()
    assert_close(actual, mask * o.exact(model, x, kind="categorical"), 1e-12, "Fisher")
    actual = o.stepped(model, x, kind="categorical", joint=joint, fisher="empirical").gram().dense()
    g = gradient(model, x, "categorical")
    assert_close(actual, mask * (g[:, None] * g), 1e-12, "empirical Fisher")


# --- eigenvalue correction ------------------------------------------------------------------


def mixed(case: str) -> tuple[nn.Module, Tensor]:
    """A model and its batch."""
    if case == "mlp":
        return mlp(), torch.randn(6, 3)
    if case == "sequences":
        return mlp(nn.Linear(4, 4, bias=False)), torch.randn(3, 2, 3)
    if case == "grouped convolution":
        conv = nn.Conv2d(4, 4, (2, 3), stride=2, dilation=(1, 2), padding=2, groups=2)
        return places(conv).append(nn.Tanh()).append(nn.Linear(4, 3)), torch.randn(4, 4, 4, 4)
    if case == "words and a norm":
        words = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
        return words, torch.randint(0, 5, (4, 3))
    words, x = mixed("words and a norm")
    words.insert(2, Fused(nn.MultiheadAttention(4, 2, batch_first=True)))
    return words, x


@pytest.mark.parametrize(
    ("case", "loss_name"),
    each_once(
        ["mlp", "sequences", "grouped convolution", "words and a norm"], ["gaussian", "categorical"]
    ),
)
def test_corrected_eigenvalues_come_no_farther_and_are_what_a_step_uses(
    case: str, loss_name: str
) -> None:
    """In any eigenbasis the diagonal of the exact Gram is the nearest choice of eigenvalues."""
    model, x = mixed(case)
    plain = o.stepped(model, x, kind=loss_name).gram().dense()
    exact = o.exact(model, x, kind=loss_name)
    options: Any = {"ekfac": True, "statistics_every": 1, "invert_every": 1000, "momentum": 0.0}
    opt = o.optimizer(model, loss_name, damping=1e-3, **options)
    for lr in (0.0, 0.0, 0.1):  # corrected from the third statistics on
        opt.param_groups[0]["lr"] = lr
        before = vector(model)
        g = gradient(model, x, loss_name)
        o.step(opt, model, x, loss_name)
    actual = opt.gram().dense()
    for name in {n.rpartition(".")[0] for n, _ in model.named_parameters()}:
        parameter_names = [n for n, _ in model.named_parameters() if n.rpartition(".")[0] == name]
        near, far = (
            o.part(gram - exact, model, parameter_names).norm() for gram in (actual, plain)
        )
        assert near <= far * (1 + 1e-10) + 1e-13 * exact.norm()  # some are exact already
    if "words" not in case:  # all blocks are corrected, and a change of basis keeps the trace
        assert_close(actual.trace(), exact.trace(), 1e-10, "trace")
        want = torch.linalg.solve(actual + 1e-3 * torch.eye(len(g)), g)
        assert_close(before - vector(model), 0.1 * want, 1e-8, "η(F + λ)⁻¹g")


# --- steps ----------------------------------------------------------------------------------


def gradient(model: nn.Module, x: Tensor, loss_name: str) -> Tensor:
    return flat(torch.autograd.grad(o.loss(model(x), loss_name), list(model.parameters())))


@pytest.mark.parametrize("loss_name", ["gaussian", "categorical"])
@pytest.mark.parametrize("value", [1e-4, 0.3])
@pytest.mark.parametrize("how", ["exact", "tikhonov"])
def test_damping(how: str, value: float, loss_name: str) -> None:
    if how == "exact":
        model = mlp(nn.LayerNorm(4))
        x = torch.randn(6, 3)
    else:
        model, x = mixed("mlp" if loss_name == "gaussian" else "grouped convolution")
    before = vector(model)
    g = gradient(model, x, loss_name)

    def factored(r: Tensor, c: Tensor) -> o.Sides:
        """(R + √λ/π) ⊗ (C + π√λ), of each group."""
        pi = ((c.trace() / len(c)) / (r.trace() / len(r))).sqrt()
        root = value**0.5
        return r + root / pi * torch.eye(len(r)), c + root * pi * torch.eye(len(c))

    if how == "exact":
        damped = o.definition(model, x, kind=loss_name) + value * torch.eye(len(g))
    else:
        damped = o.kfac(model, x, kind=loss_name, change=factored)
    o.stepped(model, x, kind=loss_name, lr=0.2, damping=Exact(value) if how == "exact" else value)
    want = 0.2 * torch.linalg.solve(damped, g)
    assert_close(before - vector(model), want, 1e-8, "η(F + λ)⁻¹g")


@pytest.mark.parametrize("loss_name", ["gaussian", "categorical"])
def test_no_damping_is_the_pseudo_inverse(loss_name: str) -> None:
    """Softmax logits are singular always; so is the input side of more weights than samples."""
    model = mlp(nn.LayerNorm(4))
    x = torch.randn(4 if loss_name == "gaussian" else 9, 3)
    before = vector(model)
    g = gradient(model, x, loss_name)
    f = o.definition(model, x, kind=loss_name)
    want = torch.linalg.pinv(f, hermitian=True, rtol=1e-11) @ g
    opt = o.stepped(model, x, kind=loss_name, lr=0.2, damping=0.0)
    assert_close(before - vector(model), 0.2 * want, 1e-7, "η F⁺g")
    assert any("singular" in note for note in opt.info.notes.values())


@pytest.mark.parametrize("damping", [0.0, 1e-2])
@pytest.mark.parametrize("delta", [1e-3, 1e6])
def test_the_clip_bounds_the_length_of_a_step(delta: float, damping: float) -> None:
    model = mlp()
    x = torch.randn(9, 3)
    f = o.kfac(model, x, kind="gaussian")
    before = vector(model)
    free = copy.deepcopy(model)
    o.stepped(free, x, kind="gaussian", lr=0.5, damping=damping)
    o.stepped(model, x, kind="gaussian", lr=0.5, damping=damping, kl_clip=delta)
    moved = before - vector(model)
    whole = before - vector(free)
    length = float(moved @ f @ moved)
    assert length <= delta * (1 + 1e-9)
    assert_close(moved / moved.norm(), whole / whole.norm(), 1e-10, "the same direction")
    if delta > 1:
        assert_close(moved, whole, 1e-12, "a loose clip does nothing")
    elif damping == 0:
        assert length == pytest.approx(delta, rel=1e-8), "undamped the bound is met"


def test_weight_decay_momentum_and_groups() -> None:
    """w ← (1 − ηω)w − ηm, m ← μm + (F + λ)⁻¹g, with η, μ and ω of each group."""
    model = mlp(nn.LayerNorm(4))
    x = torch.randn(6, 3)
    params = list(model.parameters())
    rates = ((0.1, 0.9, 0.3), (0.02, 0.5, 0.0))
    groups = [
        {"params": group_params, "lr": lr, "momentum": mu, "weight_decay": decay}
        for group_params, (lr, mu, decay) in zip((params[:2], params[2:]), rates, strict=True)
    ]
    sizes = torch.tensor([sum(p.numel() for p in g["params"]) for g in groups])
    lr, mu, decay = torch.tensor(rates).repeat_interleave(sizes, 0).T
    opt = o.optimizer(model, "gaussian", params=groups, damping=Exact(0.01))
    f = o.definition(model, x, kind="gaussian") + 0.01 * torch.eye(len(lr))
    w = vector(model)
    m = torch.zeros(len(lr))
    for _ in range(3):  # statistics at the first step only
        m = mu * m + torch.linalg.solve(f, gradient(model, x, "gaussian"))
        w = (1 - lr * decay) * w - lr * m
        o.step(opt, model, x, "gaussian")
        assert_close(vector(model), w, 1e-10, "w")


def test_averages_forget_at_the_given_rate() -> None:
    """value = Σ β^(n−k)(1 − β) new_k / (1 − βⁿ)."""
    model = nn.Sequential(nn.Linear(3, 2))
    batches = [torch.randn(4, 3) for _ in range(3)]
    opt = o.optimizer(model, "gaussian", ema=0.7, statistics_every=1)
    for x in batches:
        o.step(opt, model, x, "gaussian")
    grams = torch.stack([o.kfac(model, x, kind="gaussian") for x in batches])
    weights = torch.tensor([0.49, 0.7, 1.0])
    want = torch.einsum("n,nij->ij", weights / weights.sum(), grams)
    assert_close(opt.gram().dense(), want, 1e-12, "bias-corrected average")


# --- scales that must not matter ------------------------------------------------------------


CHANGES = [
    *product(("exact", "empirical"), ("duplicate", "micro-batches", "uneven micro-batches")),
    *product(("exact", "empirical", "mc"), ("sum", "scaled")),
]
LOSSES = [("words and attention", "categorical"), ("grouped convolution", "gaussian")]


def measure_loss(name: str, z: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Return the loss of outputs z, (N, positions, 3), whose samples are the positions."""
    if name == "categorical":
        return F.cross_entropy(z.flatten(0, -2), y.flatten(), reduction=reduction)
    total = 0.5 * (z - y).square().sum()
    if reduction == "sum":
        return total
    return total / z[..., 0].numel()


def backpropagate_changed(change: str, model: nn.Module, x: Tensor, y: Tensor, name: str) -> None:
    """Leave the gradient of a changed loss, or of changed batches, that must not matter."""
    if change == "duplicate":
        measure_loss(name, model(torch.cat([x, x])), torch.cat([y, y])).backward()
    elif change == "sum":
        measure_loss(name, model(x), y, "sum").backward()
    elif change == "scaled":
        (1024 * measure_loss(name, model(x), y)).backward()
        for p in model.parameters():
            p.grad /= 1024
    else:
        sizes = {"micro-batches": [2, 2], "uneven micro-batches": [1, 3]}[change]
        for inputs, targets in zip(x.split(sizes), y.split(sizes), strict=True):
            (measure_loss(name, model(inputs), targets) * len(inputs) / len(x)).backward()


@pytest.mark.parametrize(("fisher_and_change", "loss"), each_once(CHANGES, LOSSES))
def test_scales_do_not_matter(fisher_and_change: tuple[str, str], loss: tuple[str, str]) -> None:
    fisher, change = fisher_and_change
    case, loss_name = loss
    model, x = mixed(case)
    y = torch.randn(4, 8, 3)
    if loss_name == "categorical":
        y = torch.randint(0, 3, (4, 3))
    twin = copy.deepcopy(model)
    before = vector(model)
    options: dict[str, Any] = {"lr": 0.1, "fisher": fisher, "damping": 1e-3}
    tolerance = 1e-9
    if change == "sum":  # the damping is absolute, so a sum has none
        options["damping"] = 0.0
        tolerance = 1e-6
    opt = o.optimizer(model, loss_name, **options)
    measure_loss(loss_name, model(x), y).backward()
    opt.step()
    moved = vector(model) - before

    if change == "sum":
        options["reduction"] = "sum"
    elif change == "scaled" and fisher == "empirical":
        options["grad_scaler"] = SimpleNamespace(get_scale=lambda: 1024.0)
    opt = o.optimizer(twin, loss_name, **options)
    backpropagate_changed(change, twin, x, y, loss_name)
    opt.step()
    assert_close(vector(twin) - before, moved, tolerance, change)
