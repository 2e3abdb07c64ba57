"""The rules for matrices: each by its definition, on real layers, and what they do not notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.grams.kronecker import Pair
from pullback.maps.roles import Role
from pullback.optim.kfac import AdamW as AdamWRule
from pullback.optim.kfac import Adaptive, Eigenbasis, Estimation, Natural, Spectral, TwoSided
from pullback.optim.kfac.factors.block import BlockKind
from pullback.optim.kfac.rules.base import (
    BlockShape,
    FactorAverages,
    RefreshReport,
    Rule,
    StepContext,
)
from pullback.steps import QuadraticModel
from tests.kfac_options import kfac_of
from tests.pairs import each_once

from ..common import assert_close, vector
from .common import DOUBLE, Fused, Then

RULES = ["eigenbasis", "spectral", "two-sided"]


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(DOUBLE)
    torch.manual_seed(0)


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    """Linear layers with tanh between them."""
    pairs = pairwise(widths)
    layers = [m for i, o in pairs for m in (nn.Linear(i, o, bias=bias), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def mse(z: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (z - y).square().sum(-1).mean()


# --- by definition ------------------------------------------------------------------------------


class Watched:
    """Inputs and output cotangents of linear layers, by hooks of its own."""

    def __init__(self, layers: list[Any]) -> None:
        self.inputs: dict[Any, Tensor] = {}
        self.cotangents: dict[Any, Tensor] = {}
        for layer in layers:
            layer.register_forward_hook(self._forward)

    def _forward(self, layer: Any, args: Any, out: Tensor) -> None:
        self.inputs[layer] = args[0].detach().clone()
        out.register_hook(lambda d: self.cotangents.update({layer: d.clone()}))


class AdamW:
    """Of one parameter."""

    def __init__(self, p: Any, betas: tuple[float, float], decay: float) -> None:
        self.p = p
        self.betas = betas
        self.decay = decay
        self.steps = 0
        self.first = torch.zeros_like(p)
        self.second = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.steps += 1
        one, two = self.betas
        self.first = one * self.first + (1 - one) * self.p.grad
        self.second = two * self.second + (1 - two) * self.p.grad**2
        mean = self.first / (1 - one**self.steps)
        square = self.second / (1 - two**self.steps)
        self.p.copy_((1 - lr * self.decay) * self.p - lr * mean / (square.sqrt() + 1e-8))


def turn_basis(side: Tensor, basis: Tensor) -> tuple[Tensor, float]:
    """The basis after one turn by a Cayley transform, and about its angle."""
    s = basis.T @ (side / side.diagonal().max()) @ basis
    k = torch.zeros_like(s)
    noise = 8 * torch.finfo(s.dtype).eps
    for i in range(len(s)):
        for j in range(len(s)):
            gap = s[j, j] - s[i, i]
            k[i, j] = s[i, j] * gap / (gap**2 + 4 * s[i, j] ** 2 + noise**2)
    k = (k - k.T) / 2
    one = torch.eye(len(s))
    x = basis @ torch.linalg.inv(one - k / 2) @ (one + k / 2)
    return x, float(torch.linalg.matrix_norm(k, 2))


class EigenAdam:
    """One weight in the eigenbases of the moments of its layer's inputs and cotangents."""

    def __init__(self, layer: Any, watched: Watched, ema: float, decay: float) -> None:
        self.layer = layer
        self.watched = watched
        self.ema = ema
        self.decay = decay
        self.steps = 0
        self.sides: list[Any] = [0.0, 0.0]
        self.bases: list[Tensor] = []
        self.first = torch.zeros_like(layer.weight)
        self.second = torch.zeros_like(layer.weight)
        self.angle = 0.0

    @torch.no_grad()
    def step(self, lr: float, betas: tuple[float, float], eps: float) -> None:
        self.steps += 1
        weight: Any = self.layer.weight
        for i, tensors in enumerate((self.watched.cotangents, self.watched.inputs)):
            x = tensors[self.layer]
            self.sides[i] = self.ema * self.sides[i] + (1 - self.ema) * x.T @ x / len(x)
        means = [side / (1 - self.ema**self.steps) for side in self.sides]
        if not self.bases:
            self.bases = [torch.linalg.eigh(side)[1] for side in means]
        else:
            new = [turn_basis(side, basis) for side, basis in zip(means, self.bases, strict=True)]
            left, right = (e.T @ n for e, (n, _) in zip(self.bases, new, strict=True))
            self.first = left.T @ self.first @ right
            self.bases = [n for n, _ in new]
            self.angle = max(self.angle, *(angle for _, angle in new))
        u, w = self.bases
        g = u.T @ weight.grad @ w
        one, two = betas
        self.first = one * self.first + (1 - one) * g
        self.second = two * self.second + (1 - two) * g**2
        mean = self.first / (1 - one**self.steps)
        square = self.second / (1 - two**self.steps)
        weight.copy_((1 - lr * self.decay) * weight - lr * u @ (mean / (square.sqrt() + eps)) @ w.T)


def test_ten_steps_of_adam_in_eigenbases() -> None:
    model = mlp(4, 6, 5, 3)
    lr = 0.02
    ema = 0.8
    decay = 0.1
    betas = (0.8, 0.9)
    eps = 1e-6
    twin = copy.deepcopy(model)
    others = (0.7, 0.95)
    rule = Eigenbasis(betas, eps, estimation=Estimation(ema=ema), others=AdamWRule(others))
    opt = pb.KFAC(model, lr, rule=rule, weight_decay=decay, statistics_every=1, invert_every=1)
    layers = [m for m in twin if isinstance(m, nn.Linear)]
    watched = Watched(layers)
    weights = [EigenAdam(m, watched, ema, decay) for m in layers]
    biases = [AdamW(m.bias, others, decay) for m in layers]
    x = torch.randn(40, 4)
    target = torch.randn(40, 3)
    for _ in range(10):
        x = x + 0.2 * torch.randn(40, 4)
        for net in (model, twin):
            net.zero_grad()
            mse(net(x), target).backward()
        opt.step()
        for one in weights:
            one.step(lr, betas, eps)
        for bias in biases:
            bias.step(lr)
        assert_close(vector(model), vector(twin), 1e-8)
    angles = [w.angle for w in weights]
    assert min(angles) > 0.01
    assert max(angles) < 0.7  # no turn was cut short
    assert {r.name: r.rule for r in opt.coverage()} == {
        n: "eigenbasis" if n.endswith("weight") else "adam" for n, _ in model.named_parameters()
    }


def polar(x: Tensor) -> Tensor:
    """UVᵀ, where singular values below 10⁻³‖X‖ are less than 1."""
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    return u @ torch.diag(s / s.clamp(min=1e-3 * float(s.norm()))) @ vt


def root(side: Tensor, damping: float) -> Tensor:
    """(1 + C/c)^(-½) with c = λ tr(C)/n."""
    values, basis = torch.linalg.eigh(side)
    return basis @ torch.diag((1 + values / (damping * values.mean())).rsqrt()) @ basis.T


class Whitened:
    """One weight by the polar factor of its whitened momentum."""

    def __init__(
        self, layer: Any, watched: Watched, rule: Spectral, ema: float, decay: float
    ) -> None:
        self.layer = layer
        self.watched = watched
        self.rule = rule
        self.ema = ema
        self.decay = decay
        self.side: Any = 0.0
        self.output_side: Any = 0.0
        self.momentum: Any = 0.0
        self.square: Any = 0.0
        self.steps = 0

    @torch.no_grad()
    def step(self, lr: float, damping: float) -> None:
        weight = self.layer.weight
        rule = self.rule
        x = self.watched.inputs[self.layer]
        self.side = self.ema * self.side + (1 - self.ema) * x.T @ x / len(x)
        past = rule.momentum
        self.momentum = past * self.momentum + (1 - past) * weight.grad
        ahead = (1 - past) * weight.grad + past * self.momentum
        whitened = ahead
        if rule.whitening:
            whitened = ahead @ root(self.side, damping)
        if isinstance(rule, TwoSided):
            d = self.watched.cotangents[self.layer]
            self.output_side = self.ema * self.output_side + (1 - self.ema) * d.T @ d / len(d)
            whitened = root(self.output_side, damping) @ whitened
        u = polar(whitened)
        self.square = rule.adapt * self.square + (1 - rule.adapt) * weight.grad.square().mean()
        fullness = (u.square().sum() / min(u.shape)).sqrt()
        u = u / u.square().mean(1, keepdim=True).sqrt()
        self.steps += 1
        size = 0.2
        if rule.agreement:
            growth = 3  # for at most 42 inputs
            square = self.square
            if rule.gentle_start:
                square = square / (1 - rule.adapt**self.steps)
                growth *= fullness
            size = 0.75 * growth * (ahead.square().mean() / square).sqrt()
        u = size * u
        weight.copy_((1 - lr * self.decay) * weight - lr * u)


@pytest.mark.parametrize(
    ("kind", "damping", "parts"),
    [
        (Spectral, 0.05, {}),
        (Spectral, 1e-4, {}),
        (Spectral, 0.05, {"whitening": False}),
        (Spectral, 0.05, {"agreement": False}),
        (Spectral, 0.05, {"whitening": False, "agreement": False}),
        (Spectral, 0.05, {"gentle_start": True}),
        (Spectral, 0.05, {"gentle_start": True, "agreement": False}),
        (TwoSided, 0.05, {}),
        (TwoSided, 0.05, {"gentle_start": True}),
        (TwoSided, 1e-4, {"agreement": False}),
    ],
)
def test_ten_steps_of_the_whitened_polar_factor(
    kind: type[Spectral], damping: float, parts: dict[str, bool]
) -> None:
    model = mlp(4, 6, 5, 3)
    lr = 0.05
    ema = 0.8
    decay = 0.1
    betas = (0.7, 0.95)
    twin = copy.deepcopy(model)
    options = {"estimation": Estimation(ema=ema), "others": AdamWRule(betas, rate=0.5)}
    rule = kind(momentum=0.8, adapt=0.9, damping=damping, **parts, **options)
    opt = pb.KFAC(model, lr, rule=rule, weight_decay=decay, statistics_every=1, invert_every=1)
    layers = [m for m in twin if isinstance(m, nn.Linear)]
    watched = Watched(layers)
    weights = [Whitened(m, watched, rule, ema, decay) for m in layers[:-1]]
    others = [AdamW(p, betas, decay) for p in [*(m.bias for m in layers), layers[-1].weight]]
    x = torch.randn(40, 4)
    target = torch.randn(40, 3)
    for _ in range(10):
        x = x + 0.2 * torch.randn(40, 4)
        for net in (model, twin):
            net.zero_grad()
            mse(net(x), target).backward()
        opt.step()
        for one in weights:
            one.step(lr, damping)
        for other in others:
            other.step(0.5 * lr)
        assert_close(vector(model), vector(twin), 1e-8)
    ruled = {r.name for r in opt.coverage() if r.rule == rule.name}
    assert ruled == {"0.weight", "2.weight"}


def test_without_whitening_statistics_are_rare_and_long_sides_follow_the_rule() -> None:
    model = mlp(4, 6, 5, 3)
    rule = Spectral(whitening=False, estimation=Estimation(max_factor=4))
    opt = pb.KFAC(model, rule=rule)
    assert (opt.statistics_every, opt.invert_every) == (100, 100)
    whitened = pb.KFAC(copy.deepcopy(model), rule=Spectral())
    assert (whitened.statistics_every, whitened.invert_every) == (10, 20)
    mse(model(torch.randn(9, 4)), torch.randn(9, 3)).backward()
    opt.step()
    ruled = {r.name for r in opt.coverage() if r.rule == "spectral"}
    assert ruled == {"0.weight", "2.weight"}


@pytest.mark.parametrize(
    ("layer", "growth"),
    [
        (nn.Linear(8, 4), 3),
        (nn.Linear(96, 4), 2),
        (nn.Linear(216, 4), 4 / 3),
        (nn.Linear(384, 4), 1),
        (nn.Linear(600, 4), 1),
        (nn.Conv2d(2, 4, 2), 1),
    ],
    ids=str,
)
def test_matrices_of_few_inputs_take_longer_steps(layer: nn.Module, growth: float) -> None:
    weight: Any = layer.double().weight
    inputs = torch.randn(9, *weight.shape[1:])
    model = nn.Sequential(layer, nn.Flatten(), nn.Tanh(), nn.Linear(4, 2))
    opt = pb.KFAC(model, 1.0, rule=Spectral(momentum=0.0))
    before = weight.detach().clone()
    model(inputs).square().sum().backward()
    opt.step()
    agreement = 0.05**-0.5  # of the first gradient with a mean of squares that begins at zero
    size = (weight - before).square().mean().sqrt()
    assert_close(size, torch.tensor(0.75 * growth * agreement), 1e-6)


def test_gentle_steps_are_shorter_where_momentum_has_few_directions() -> None:
    """One sample has a gradient of one direction out of four, nine samples have all four."""
    sizes = {}
    for samples in (1, 9):
        model = mlp(6, 4, 2)
        inputs = torch.randn(samples, 6)
        weight: Any = model[0].weight
        before = weight.detach().clone()
        opt = pb.KFAC(model, 1.0, rule=Spectral(momentum=0.0, gentle_start=True))
        (model(inputs) * torch.randn(samples, 2)).sum().backward()
        opt.step()
        sizes[samples] = (weight - before).square().mean().sqrt()
    # for six inputs three times as long; one gradient agrees with itself
    assert_close(sizes[9], torch.tensor(0.75 * 3.0), 1e-6)
    assert_close(sizes[1], sizes[9] / 2, 1e-6)


@pytest.mark.parametrize("kind", [Spectral, TwoSided])
def test_gentle_steps_of_noise_do_not_begin_longer(kind: type[Spectral]) -> None:
    """Their entries are 0.2 once momentum is full; without a gentle start the first are longer."""
    largest = {}
    for gentle_start in (False, True):
        sizes = list_sizes_of_noise(kind(momentum=0.9, gentle_start=gentle_start))
        size_of_full_momentum = sum(sizes[40:]) / len(sizes[40:])
        assert 0.18 < size_of_full_momentum < 0.22
        largest[gentle_start] = max(sizes) / size_of_full_momentum
    assert largest[True] < 1.2
    assert largest[False] > 2


def list_sizes_of_noise(rule: Spectral) -> list[float]:
    """Return the sizes of the steps of a weight whose gradients are noise."""
    model = nn.Sequential(nn.Linear(400, 40), nn.Tanh(), nn.Linear(40, 3))
    weight: Any = model[0].weight
    opt = pb.KFAC(model, 1.0, rule=rule, statistics_every=60, invert_every=60)
    x = torch.randn(64, 400)
    sizes = []
    for _ in range(60):
        before = weight.detach().clone()
        model(x).sum().backward()
        weight.grad = torch.randn(40, 400)
        opt.step()
        opt.zero_grad()
        sizes.append((weight - before).square().mean().sqrt().item())
        weight.data.copy_(before)
    return sizes


@pytest.mark.parametrize(
    ("layer", "starts_gently"),
    [
        (nn.Linear(1024, 1030), True),
        (nn.Linear(1024, 1000), False),
        (nn.Linear(1000, 1024), False),
    ],
    ids=str,
)
def test_matrices_wide_on_both_sides_start_gently(layer: nn.Linear, starts_gently: bool) -> None:
    """The first step of one gradient: 0.75 √(1/1,024) of full length, or as if it agreed fully."""
    model = nn.Sequential(layer.float(), nn.Tanh(), nn.Linear(layer.out_features, 1).float())
    rule = Spectral(momentum=0.0, damping=0.2)
    opt = pb.KFAC(model, 1.0, rule=rule)
    before = layer.weight.detach().clone()
    model(torch.randn(1, layer.in_features, dtype=torch.float32)).sum().backward()
    opt.step()
    size = (layer.weight - before).square().mean().sqrt().item()
    if starts_gently:
        assert size == pytest.approx(0.75 / 32, rel=0.02)
    else:
        assert size == pytest.approx(0.75 * 0.05**-0.5, rel=0.02)


@pytest.mark.parametrize("kind", [Spectral, TwoSided])
@pytest.mark.parametrize(
    ("split", "starts_gently"), [((), True), ((1024, 1024), True), ((1024, 1000, 24), False)]
)
def test_fused_matrices_start_as_they_would_alone(
    kind: type[Spectral], split: tuple[int, ...], starts_gently: bool
) -> None:
    shape = BlockShape(
        BlockKind.KRONECKER, (1, 2048, 1100), dense_rows=False, dense_columns=False,
        dtype=torch.float32, device=torch.device("cpu"), split=split,
    )  # fmt: skip
    for asked, expected in ((None, starts_gently), (True, True), (False, False)):
        assert (kind(gentle_start=asked).init(shape).count is not None) is expected


@pytest.mark.parametrize("kind", [Spectral, TwoSided])
@pytest.mark.parametrize(("warmup", "refreshes"), [(0, 1), (3, 6)])
def test_a_warmup_refreshes_at_its_first_steps(
    kind: type[Spectral], warmup: int, refreshes: int
) -> None:
    """After three steps the gap is one step until the sixth, and two from there on."""
    model = mlp(4, 6, 3)
    rule = kind(warmup=warmup)
    opt = pb.KFAC(model, rule=rule)
    roots = []
    for _ in range(6):
        opt.zero_grad()
        mse(model(torch.randn(9, 4)), torch.randn(9, 3)).backward()
        opt.step()
        roots.append(root_of(opt))
    changes = sum(not torch.equal(*pair) for pair in pairwise(roots))
    assert changes + 1 == refreshes


def root_of(opt: pb.KFAC) -> Tensor:
    """Return the inverse root of the first weight's input factor."""
    (state,) = [s["state"] for s in opt.state_dict()["state"].values() if "root" in s["state"]]
    return state["root"].clone()


@pytest.mark.parametrize(
    "rule", [Eigenbasis(), Spectral(others=AdamWRule()), TwoSided()], ids=RULES
)
def test_weight_decay_is_decoupled(rule: Any) -> None:
    """Without a gradient of the loss there is nothing but the decay."""
    model = mlp(3, 4, 2)
    x = torch.randn(9, 3)
    before = vector(model)
    opt = pb.KFAC(model, 0.1, rule=rule, weight_decay=0.5)
    for _ in range(2):
        opt.zero_grad()
        (0.0 * model(x).sum()).backward()
        opt.step()
    assert_close(vector(model), 0.95**2 * before, 1e-12)


def first_step(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> dict[str, Tensor]:
    """The first move of a fresh optimizer per unit of its rate."""
    opt = kfac_of(model, 0.01, **options)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    mse(model(x), y).backward()
    opt.step()
    opt.close()
    return {n: (before[n] - p.detach()) / 0.01 for n, p in model.named_parameters()}


class Projections(nn.Module):
    """Matrices with one input, in one weight whose output is split, or in a weight each."""

    def __init__(self, sizes: tuple[int, ...], fused: bool, gated: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(sum(sizes), 4)
        rows = [sum(sizes)] if fused else sizes
        self.layers = nn.ModuleList(nn.Linear(4, n, bias=False) for n in rows)
        for layer, rows_of_layer in zip(self.layers, weight.split(rows), strict=True):
            layer.weight = nn.Parameter(rows_of_layer.clone())
        self.sizes = sizes
        self.gated = gated
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [layer(x) for layer in self.layers]
        if len(outputs) == 1:
            outputs = outputs[0].split(self.sizes, -1)
        if self.gated:
            return self.out(F.silu(outputs[0]) * outputs[1]).mean(1)
        q, k, v = (h.unflatten(-1, (-1, 3)).transpose(1, 2) for h in outputs)
        h = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(h.transpose(1, 2).flatten(2)).mean(1)


@pytest.mark.parametrize("rule", ["spectral", "two-sided"])
@pytest.mark.parametrize(
    ("sizes", "gated"), [((6, 6, 6), False), ((6, 3, 3), False), ((6, 6), True)], ids=str
)
def test_fused_matrices_have_the_directions_of_separate_ones(
    sizes: tuple[int, ...], gated: bool, rule: str
) -> None:
    """Queries, keys and values, as many heads or fewer of the latter; gate and up."""
    x = torch.randn(9, 5, 4)
    y = torch.randn(9, 2)
    fused, single = (
        first_step(Projections(sizes, is_fused, gated), x, y, rule=rule)
        for is_fused in (True, False)
    )
    for i, direction in enumerate(fused["layers.0.weight"].split(sizes)):
        assert_close(direction, single[f"layers.{i}.weight"], 1e-10)


# --- on real layers -----------------------------------------------------------------------------


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        return self.head(self.norm(h + torch.tanh(self.inner(h)))).mean(1)


@pytest.mark.parametrize("rule", RULES)
def test_transposed_convolutions_follow_as_convolutions_of_the_transpose_do(rule: str) -> None:
    """With windows of one pixel both are the same map, also in groups."""
    layers: list[Any] = [nn.Conv2d(6, 8, 1, groups=2), nn.ConvTranspose2d(6, 8, 1, groups=2)]
    grouped = layers[0].weight.detach().view(2, 4, 3)
    layers[1].weight.data = grouped.mT.reshape(6, 4, 1, 1).contiguous()
    layers[1].bias.data = layers[0].bias.detach().clone()
    first = nn.Conv2d(3, 6, 1)
    head = nn.Conv2d(8, 2, 1)
    x = torch.empty(0)
    outputs = []
    for layer in layers:
        model = nn.Sequential(copy.deepcopy(first), nn.Tanh(), layer, nn.Tanh(), head)
        model = copy.deepcopy(model)
        opt = pb.KFAC(model, 0.02, rule=rule, statistics_every=1, invert_every=1)
        for number in range(4):
            x = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(number))
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
        assert opt.coverage()[2].rule == rule
        outputs.append(model(x).detach())
    assert_close(outputs[0], outputs[1], 1e-8)


class Tiles(nn.Module):
    """A transposed convolution whose windows of k² pixels do not overlap, as a linear layer."""

    def __init__(self, convolution: nn.ConvTranspose2d) -> None:
        super().__init__()
        inputs, self.outputs, self.width, _ = convolution.weight.shape
        self.linear = nn.Linear(inputs, self.outputs * self.width**2, bias=False)
        self.linear.weight.data = convolution.weight.detach().flatten(1).mT.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        tiles = self.linear(x.movedim(1, -1)).unflatten(-1, (self.outputs, self.width, self.width))
        n, rows, columns = tiles.shape[:3]
        pixels = tiles.permute(0, 3, 1, 4, 2, 5)
        return pixels.reshape(n, self.outputs, rows * self.width, columns * self.width)


@pytest.mark.parametrize(
    "make",
    [Eigenbasis, partial(Spectral, agreement=False), partial(TwoSided, agreement=False)],
    ids=["eigenbasis", "spectral", "two-sided"],
)
@pytest.mark.parametrize("channels", [(5, 3), (3, 5)], ids=str)
def test_transposed_convolutions_follow_as_linear_layers_do(
    make: Callable[[], Rule], channels: tuple[int, int]
) -> None:
    """Rows are channels and pixels of the output, columns are channels of the input."""
    convolution = nn.ConvTranspose2d(*channels, 2, stride=2, bias=False)
    first = nn.Conv2d(3, channels[0], 1)
    head = nn.Conv2d(channels[1], 2, 1)
    x = torch.empty(0)
    outputs = []
    for layer in (convolution, Tiles(convolution)):
        model = nn.Sequential(first, nn.Tanh(), layer, nn.Tanh(), head)
        model = copy.deepcopy(model)
        opt = pb.KFAC(model, 0.02, rule=make(), statistics_every=1, invert_every=1)
        for number in range(4):
            x = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(number))
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
        assert opt.coverage()[2].rule == opt.rule.name
        outputs.append(model(x).detach())
    assert_close(outputs[0], outputs[1], 1e-8)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


def last(width: int) -> list[nn.Module]:
    return [Then(lambda h: h.flatten(1)), nn.Linear(width, 3)]


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 2), *last(27)),
        torch.randn(8, 2, 4, 4),
    ),
    "grouped convolution": lambda: (
        nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.BatchNorm1d(6), nn.ReLU(), *last(18)),
        torch.randn(8, 4, 5),
    ),
    "transposed convolution": lambda: (
        nn.Sequential(nn.ConvTranspose1d(4, 3, 2), nn.Tanh(), *last(12)), torch.randn(8, 4, 3)
    ),
    "attention": lambda: (
        nn.Sequential(Fused(nn.MultiheadAttention(4, 2, batch_first=True)), *last(12)),
        torch.randn(8, 3, 4),
    ),
    "LSTM": lambda: (
        nn.Sequential(Fused(nn.LSTM(4, 5, batch_first=True)), *last(15)), torch.randn(8, 3, 4)
    ),
    "transformer": lambda: (nn.Sequential(encoder(), *last(12)), torch.randn(8, 3, 4)),
    "words": lambda: (Tied(tied=False), torch.randint(0, 7, (8, 3))),
    "tied words": lambda: (Tied(tied=True), torch.randint(0, 7, (8, 3))),
    "norms and slopes": lambda: (
        nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6), nn.PReLU(6), nn.Linear(6, 3)),
        torch.randn(8, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "rule"), each_once(MODELS, RULES))
def test_real_layers_train(name: str, rule: str) -> None:
    model, x = MODELS[name]()
    opt = pb.KFAC(model, 0.01, rule=rule, statistics_every=2, invert_every=4)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = []
    y = torch.arange(8) % 3
    for _ in range(8):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        assert opt.info.accepted
        assert not opt.info.notes
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert losses[-1] < losses[3]
    rules = {r.name: r.rule for r in opt.coverage()}
    assert rules.keys() == start.keys()
    assert {*rules.values()} == {"adam", rule}
    accepts = opt.rule.accepts
    roles = {row.name: row.role for row in pb.parameter_roles(model, x)}
    assert rules == {n: rule if accepts(role) else "adam" for n, role in roles.items()}
    for n, p in model.named_parameters():
        if name != "attention" or n != "0.fused.in_proj_bias":  # that of keys changes nothing
            assert bool((p != start[n]).all() if p.ndim < 2 else (p != start[n]).any()), n


class Uses(nn.Module):
    """A layer that is called twice, by a function alone, or in both ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.inner = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.how != "function":
            h = torch.tanh(self.inner(h))
        if self.how == "twice":
            return self.last(torch.tanh(self.inner(h)))
        return self.last(torch.tanh(F.linear(h, self.inner.weight, self.inner.bias)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", ["twice", "function", "both"])
def test_layers_that_are_used_in_other_ways(how: str, rule: str) -> None:
    """What functions do with a matrix is seen as what modules do."""
    model = Uses(how)
    x = torch.randn(12, 4)
    y = torch.arange(12) % 3
    opt = pb.KFAC(model, 0.01, rule=rule, statistics_every=2)
    losses = []
    start = vector(model)
    for _ in range(8):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert bool((vector(model) != start).all())
    rules = {r.name: r.rule for r in opt.coverage()}["inner.weight"]
    assert rules == rule


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_layer_is_left_to_adam_by_spectral_and_no_other(tied: bool) -> None:
    """Also where its weight is that of the words, which comes first."""

    def find_rules(rule: Any) -> dict[str, str]:
        opt = pb.KFAC(model := Tied(tied), rule=rule)
        model(torch.randint(0, 7, (8, 3))).square().mean().backward()
        opt.step()
        return {row.name: row.rule for row in opt.coverage()}

    rules = find_rules("spectral")
    assert rules["inner.weight"] == "spectral"
    assert {n for n, rule in rules.items() if rule == "spectral"} == {"inner.weight"}
    rules = find_rules(Spectral(head=True))
    assert rules["inner.weight"] == "spectral"
    assert tied or rules["head.weight"] == "spectral"


@pytest.mark.parametrize("rule", RULES)
def test_long_sides_are_left_to_adam(rule: str) -> None:
    """Those that the rule needs as matrices: to spectral ones outputs do not matter."""
    model = mlp(3, 9, 3, 3, 2)
    x = torch.randn(9, 3)
    y = torch.randn(9, 2)
    opt = kfac_of(model, rule=rule, max_factor=5)
    start = vector(model)
    mse(model(x), y).backward()
    opt.step()
    ruled = {r.name for r in opt.coverage() if r.rule == rule}
    expected = {"0.weight", "4.weight"}  # two-sided has a diagonal for nine outputs
    if rule == "eigenbasis":
        expected = {"4.weight", "6.weight"}
    assert ruled == expected
    assert bool((vector(model) != start).all())


@pytest.mark.parametrize("rule", RULES)
def test_reports(rule: str) -> None:
    """Of what is measured; and a closed optimizer goes on with it."""
    model = mlp(3, 4, 3, 2)
    x = torch.randn(9, 3)
    y = torch.randn(9, 2)
    opt = pb.KFAC(model, rule=rule)
    mse(model(x), y).backward()
    opt.step()
    matrices = [m.weight for m in model.children() if isinstance(m, nn.Linear)]
    size = sum(w.numel() for w in (matrices if rule == "eigenbasis" else matrices[:-1]))
    assert opt.gram().dense().shape == (size, size)
    assert len(opt.average()) == 3 - (rule != "eigenbasis")
    assert all(d.rank < d.size for d in opt.degenerate())
    assert all(n > 0 for n in opt.memory().values())
    opt.close()
    for _ in range(21):
        before = vector(model)
        opt.zero_grad()
        mse(model(x), y).backward()
        opt.step()
        assert bool((vector(model) != before).all())


@pytest.mark.parametrize(
    ("options", "rule", "clip"),
    [
        ({}, "Eigenbasis", None),
        ({"rule": "eigenbasis"}, "Eigenbasis", None),
        ({"rule": "spectral", "damping": 0.3}, "Spectral", None),
        ({"rule": "two-sided", "damping": 0.3}, "Two-sided", None),
        ({"rule": "natural"}, "Natural", 1e-3),
        ({"likelihood": nn.CrossEntropyLoss()}, "Natural", 1e-3),
        ({"damping": 0.1, "kl_clip": None}, "Natural", None),
        ({"momentum": 0.5, "kl_clip": 0.1}, "Natural", 0.1),
        ({"ekfac": True}, "Natural", 1e-3),
        ({"damping": Adaptive(0.1)}, "Natural", None),
        ({"step": QuadraticModel()}, "Natural", None),
    ],
    ids=str,
)
def test_which_rule_it_is(options: dict[str, Any], rule: str, clip: float | None) -> None:
    """That of the natural gradient where one of its arguments is given; it alone is clipped."""
    opt = kfac_of(mlp(3, 4, 2), **options)
    assert opt.rule.name == rule.lower()
    assert opt.kl_clip == clip


#: what becomes of likelihood= and of damping= beside a rule that is given by its name
SHORTCUTS = {
    "natural": ("taken", "taken"),
    "eigenbasis": ("taken", "refused"),
    "spectral": ("ignored", "taken"),
    "two-sided": ("taken", "taken"),
    "adam": ("refused", "refused"),
}


@pytest.mark.parametrize("name", SHORTCUTS)
def test_likelihood_and_damping_beside_the_name_of_a_rule(name: str) -> None:
    values: dict[str, Any] = {"likelihood": nn.CrossEntropyLoss(reduction="sum"), "damping": 0.3}
    plain = pb.KFAC(mlp(3, 4, 2), rule=name).rule
    for (option, value), fate in zip(values.items(), SHORTCUTS[name], strict=True):
        if fate == "refused":
            with pytest.raises(pb.PullbackError, match=f"{option}= does not go with"):
                pb.KFAC(mlp(3, 4, 2), rule=name, **{option: value})
        else:
            configured = pb.KFAC(mlp(3, 4, 2), rule=name, **{option: value}).rule
            assert (repr(configured) != repr(plain)) == (fate == "taken")


@pytest.mark.parametrize(
    ("first", "likelihood", "rule"),
    [
        (nn.Embedding(5, 4), None, "spectral"),
        (nn.MultiheadAttention(4, 2), None, "spectral"),
        (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), None, "spectral"),
        (nn.RMSNorm(4), None, "spectral"),
        (nn.GroupNorm(2, 4), None, "spectral"),
        (nn.BatchNorm1d(4), None, "spectral"),
        (nn.InstanceNorm2d(4), None, "spectral"),
        (nn.Linear(4, 4), None, "eigenbasis"),
        (nn.Embedding(5, 4), nn.CrossEntropyLoss(), "natural"),
        (nn.BatchNorm1d(4), nn.CrossEntropyLoss(), "natural"),
    ],
    ids=str,
)
def test_transformers_and_normalized_networks_take_the_spectral_rule(
    first: nn.Module, likelihood: Any, rule: str
) -> None:
    """Only a transformer's output layer is left to AdamW."""
    model = nn.ModuleList([first, nn.Linear(4, 6), nn.Linear(6, 3)])
    chosen = kfac_of(model, likelihood=likelihood).rule
    assert chosen.name == rule
    batches = isinstance(first, nn.BatchNorm1d | nn.InstanceNorm2d)
    assert chosen.accepts(Role.HEAD) == (rule != "spectral" or batches)


class Quadratic(nn.Module):
    """Σ exp(w_oij) x_i x_j: the exponentials of the weight have no known structure."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 4) / 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("oij,bi,bj->bo", self.weight.exp(), x, y)


class Products(nn.Module):
    """A weight that no layer with known structure uses, a norm, and perhaps a layer."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.product = Quadratic()
        self.norm = nn.LayerNorm(6)
        if layer:
            self.layer = nn.Linear(6, 6)
        else:
            self.layer = nn.Tanh()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.norm(self.product(x, x))))


@pytest.mark.parametrize("layer", [True, False])
@pytest.mark.parametrize("rule", ["eigenbasis", "spectral"])
def test_what_no_layer_uses_follows_adam_and_is_said(rule: str, layer: bool) -> None:
    model = Products(layer)
    x = torch.randn(9, 4)
    opt = pb.KFAC(model, rule=rule, statistics_every=1)
    model(x).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="follow AdamW, product.weight among them: no layer"):
        opt.step()
    row = next(row for row in opt.coverage() if row.name == "product.weight")
    assert row.rule == "adam"
    assert row.reason.startswith("no layer with known structure uses it: it enters ")


@pytest.mark.parametrize("rule", RULES)
def test_a_group_may_follow_adam(rule: str) -> None:
    """Exactly torch's."""
    model = mlp(3, 4, 2)
    x = torch.randn(9, 3)
    y = torch.randn(9, 2)
    twin = copy.deepcopy(model)
    groups = [{"params": model.parameters(), "rule": "adam", "weight_decay": 0.1}]
    opts = [
        kfac_of(model, 0.02, rule=rule, params=[{**groups[0], "betas": (0.8, 0.99)}]),
        torch.optim.AdamW(twin.parameters(), 0.02, (0.8, 0.99), weight_decay=0.1),
    ]
    for _ in range(5):
        for net, opt in zip((model, twin), opts, strict=True):
            opt.zero_grad()
            mse(net(x), y).backward()
            opt.step()
    assert_close(vector(model), vector(twin), 1e-12)
    assert isinstance(opts[0], pb.KFAC)
    assert {r.rule for r in opts[0].coverage()} == {"adam"}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "make", [lambda: nn.Embedding(5, 2), lambda: nn.LayerNorm(2), lambda: nn.Linear(2, 2)]
)
def test_models_with_few_matrices_or_none(make: Callable[[], nn.Module], rule: str) -> None:
    model = make()
    if isinstance(model, nn.Embedding):
        x = torch.randint(0, 5, (8,))
    else:
        x = torch.randn(8, 2)
    opt = pb.KFAC(model, 0.01, rule=rule)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        loss = model(x).sin().mean()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)


# --- what they do not notice --------------------------------------------------------------------


def orthonormal(n: int) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n))[0]


def make_narrowed() -> nn.Sequential:
    """A linear layer from coordinates to other ones, without bias, in the middle of a network."""
    inner = [nn.Linear(6, 5, bias=False), nn.Linear(5, 6)]
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), *inner, nn.Tanh(), nn.Linear(6, 2))


@torch.no_grad()
def change_coordinates(model: nn.Sequential, inputs: Tensor, middle: Tensor) -> nn.Sequential:
    """The same function of Px, with coordinates Qh in the middle."""
    twin: Any = copy.deepcopy(model)
    first, inner, after = (twin[i].weight for i in (0, 2, 3))
    first.copy_(first @ inputs.T)
    inner.copy_(middle @ inner)
    after.copy_(after @ middle.T)
    return twin


def apart(
    optimizer: Callable[[nn.Module], Any], inputs: Tensor, middle: Tensor, scale: float = 1.0
) -> float:
    """How far the functions of both are apart after some steps, relative to their way."""
    model = make_narrowed()
    twin = change_coordinates(model, inputs, middle)
    x = torch.randn(30, 3)
    y = torch.randn(30, 2)
    moves = []
    for net, inputs_of_net, by in ((model, x, 1.0), (twin, x @ inputs.T, scale)):
        opt = optimizer(net)
        start = net(inputs_of_net).detach()
        for _ in range(6):
            opt.zero_grad()
            (by * mse(net(inputs_of_net), y)).backward()
            opt.step()
        moves.append(net(inputs_of_net).detach() - start)
    return float((moves[0] - moves[1]).norm() / moves[0].norm())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.02)


def by(rule: Any, **options: Any) -> Callable[[nn.Module], pb.KFAC]:
    chosen = {"statistics_every": 1, "invert_every": 2, **options}
    return lambda model: kfac_of(model, 0.02, rule=rule, **chosen)


def test_rotations_of_inputs_and_outputs_are_not_noticed_in_eigenbases() -> None:
    assert apart(by("eigenbasis"), orthonormal(3), orthonormal(5)) < 1e-6
    assert apart(adam, orthonormal(3), orthonormal(5)) > 1e-2


def test_rotations_of_inputs_are_not_noticed_by_spectral() -> None:
    """On the output side, where rows have lengths of their own, permutations and signs."""
    signs = torch.eye(5)[torch.randperm(5)] * torch.tensor([1.0, -1, 1, 1, -1])
    assert apart(by("spectral"), orthonormal(3), signs) < 1e-6
    assert apart(adam, orthonormal(3), signs) > 1e-2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "rule", [Eigenbasis(eps=0.0), Spectral(head=True), TwoSided(head=True)], ids=str
)
def test_the_scale_of_the_loss_is_not_noticed(rule: Any) -> None:
    groups = by(rule)
    assert apart(groups, torch.eye(3), torch.eye(5), scale=1e4) < 1e-5


def power(side: Tensor, exponent: float) -> Tensor:
    values, basis = torch.linalg.eigh(side)
    return basis @ torch.diag(values**exponent) @ basis.T


@pytest.mark.parametrize("rule", RULES)
def test_the_scales_of_a_known_scaler_are_not_noticed(rule: str) -> None:
    ends = []
    for is_enabled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=is_enabled)
        opt = pb.KFAC(model, rule=rule, statistics_every=2, grad_scaler=scaler)
        for _ in range(7):
            x = torch.randn(20, 4)
            target = torch.randint(3, (20,))
            opt.zero_grad()
            scaler.scale(F.cross_entropy(model(x), target)).backward()
            scaler.step(opt)
            scaler.update()
        ends.append(vector(model))
    assert_close(*ends)


def test_affine_inputs_turn_a_polar_factor_and_no_more() -> None:
    """x → Ax gives G → GAᵀ and C → ACAᵀ: without damping GC^(-½) → GC^(-½)·Q, orthonormal."""
    change = orthonormal(6) @ torch.diag(torch.linspace(1, 5, 6)) @ orthonormal(6)
    model = mlp(6, 4, 2)
    x = torch.randn(40, 6)
    y = torch.randn(40, 2)
    twin: Any = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.copy_(model[0].weight @ torch.linalg.inv(change))
    c = x.T @ x / len(x)
    turn = power(c, 0.5) @ change.T @ power(change @ c @ change.T, -0.5)
    assert_close(turn @ turn.T, torch.eye(6), 1e-9)
    far = []
    for damping in (1e-5, 1e3):  # which whitens, and which does not
        moves = [
            first_step(copy.deepcopy(net), net_input, y, rule="spectral", damping=damping)[
                "0.weight"
            ]
            for net, net_input in ((model, x), (twin, x @ change.T))
        ]
        far.append(float((moves[0] @ turn - moves[1]).norm() / moves[1].norm()))
    assert far[0] < 0.05  # polar factors are not exact
    assert far[1] > 0.2


def test_inputs_of_a_convolution_are_measured_on_enough_samples() -> None:
    """Of 64 images with 1024 places each, 4 give 4096."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(3 * 1024, 2))
    x = torch.randn(64, 2, 32, 32)
    opt = pb.KFAC(model, rule="spectral")
    model(x).square().sum().backward()
    opt.step()
    patches = F.unfold(x[::16], 3, padding=1).mT.reshape(-1, 18)
    (key,) = [key for key in opt.average() if key.names == ("0.weight",)]
    (input_factor,) = [t for f, t in opt.average()[key].items() if f.side == "right"]
    torch.testing.assert_close(input_factor[0], patches.T @ patches / len(patches))


def test_first_bases_are_divided_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that has none yet takes AdamW's first step, small ones begin first; it resumes."""
    monkeypatch.setattr(Eigenbasis, "first_entries", 3000)
    torch.manual_seed(0)
    layers = nn.Linear(20, 50), nn.Linear(50, 40), nn.Linear(40, 5)
    modules = layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]
    model = nn.Sequential(*modules).double()
    x = torch.randn(64, 20).double()
    y = torch.arange(64) % 5
    opt = pb.KFAC(model, 1e-3, rule="eigenbasis")

    def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()

    before = [layer.weight.detach().clone() for layer in layers]
    step(model, opt)
    moves = [w - layer.weight.detach() for w, layer in zip(before, layers, strict=True)]
    gradients = [torch.as_tensor(layer.weight.grad) for layer in layers]
    first = [1e-3 * g / (g.abs() + 1e-8) for g in gradients]
    assert_close(moves[1], first[1], 1e-12)
    assert (moves[2] - first[2]).abs().max() > 1e-4  # in its eigenbases
    for layer in layers:  # keys do not depend on who waits
        assert opt.state[layer.weight].keys() == {"schedule", "table", "average", "state"}
    twin = copy.deepcopy(model)
    other = pb.KFAC(twin, 1e-3, rule="eigenbasis")
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for _ in range(4):
        step(model, opt)
        step(twin, other)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("rule", ["eigenbasis", "spectral"])
def test_filters_of_single_channels_follow_adam(rule: str) -> None:
    """A depthwise convolution holds vectors, whoever calls it."""

    class Depthwise(nn.Conv1d):
        def forward(self, input: Tensor) -> Tensor:
            return F.conv1d(input, self.weight, groups=4)

    for layer_type in (nn.Conv1d, Depthwise):
        inner = [
            layer_type(4, 4, 3, groups=4, bias=False),
            nn.Tanh(),
            nn.Conv1d(4, 4, 1, bias=False),
        ]
        last = nn.Linear(24, 2, bias=False)
        model = nn.Sequential(*inner, nn.Flatten(), last)
        opt = pb.KFAC(model, rule=rule, lr=0.02)
        filters: Any = model[0].weight
        adam = AdamW(twin := nn.Parameter(filters.detach().clone()), opt.defaults["betas"], 0.0)
        for _ in range(3):
            opt.zero_grad()
            model(torch.randn(5, 4, 8)).square().mean().backward()
            twin.grad = filters.grad.clone()
            opt.step()
            adam.step(0.02 * (0.5 if rule == "spectral" else 1.0))
            assert_close(filters, twin, 1e-10)
        rows = {r.name: r for r in opt.coverage()}
        assert (rows["0.weight"].rule, rows["2.weight"].rule) == ("adam", rule)


def make_averages(sizes: list[int], blocks: int = 2) -> list[FactorAverages]:
    """Random factors of square weights of these sizes, of full rank."""
    averages = []
    for size in sizes:
        left, right = torch.randn(2, blocks, size, 2 * size)
        pair = Pair(left @ left.mT, right @ right.mT)
        averages.append(FactorAverages(pair, torch.ones(())))
    return averages


def make_states(rule: Spectral, averages: list[FactorAverages]) -> list[Any]:
    shapes = [stack.pair.output_factor.shape for stack in averages]
    device = torch.device("cpu")
    return [
        rule.init(BlockShape(BlockKind.KRONECKER, tuple(shape), True, True, DOUBLE, device))
        for shape in shapes
    ]


@pytest.mark.parametrize("kind", [Spectral, TwoSided])
def test_stacks_have_the_roots_together_that_they_have_alone(kind: type[Spectral]) -> None:
    """Factors of one size share their products, those of other sizes do not disturb."""
    rule = kind()
    averages = make_averages([4, 3, 4])
    stacked_states = make_states(rule, averages)
    single_states = make_states(rule, averages)
    for report in rule.refresh_stacks(averages, stacked_states):
        assert not report.failed
    for stack, one, other in zip(averages, stacked_states, single_states, strict=True):
        rule.refresh(stack, other)
        for name, tensor in one.tensors().items():
            torch.testing.assert_close(tensor, other.tensors()[name])
        for block, factor in enumerate(stack.pair.input_factor):
            assert_close(one.root[block], root(factor, rule.relative_damping), 1e-12)


@pytest.mark.parametrize("kind", [Spectral, TwoSided])
def test_a_factor_without_a_root_fails_alone(kind: type[Spectral]) -> None:
    rule = kind()
    averages = make_averages([4, 4])
    averages[1].pair.input_factor[0] = torch.nan
    reports = list(rule.refresh_stacks(averages, make_states(rule, averages)))
    assert [report.failed for report in reports] == [set(), {0}]
    assert reports[1].notes == {0: ["its root did not converge"]}


def test_through_a_batch_norm_the_output_factor_is_of_losses_with_signs() -> None:
    """Signs of samples' losses are drawn; one of all choices gives the factor."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    layer, *later_layers = copy.deepcopy(model)
    x = torch.randn(5, 3)
    target = torch.arange(5) % 2
    opt = pb.KFAC(model, rule="two-sided")
    F.cross_entropy(model(x), target).backward()
    opt.step()
    (block,) = opt.gram().blocks
    assert isinstance(block, Pair)
    outputs = layer(x)
    losses = F.cross_entropy(nn.Sequential(*later_layers)(outputs), target, reduction="none")
    errors = []
    for signs in product((1.0, -1.0), repeat=4):  # the first is +1: all may be turned
        signed = losses @ torch.tensor((1.0, *signs))
        (cotangents,) = torch.autograd.grad(signed, outputs, retain_graph=True)
        factor = cotangents.T @ cotangents / len(x)
        errors.append(float((factor - block.output_factor[0]).abs().max()))
    assert min(errors) < 1e-12
    assert errors[0] > 1e-3  # of the loss's own cotangents


def test_two_sided_draws_targets_where_its_estimation_says_so() -> None:
    assert TwoSided().estimation.fisher == "empirical"
    rule = TwoSided(likelihood=nn.CrossEntropyLoss(), estimation=Estimation(fisher="mc"))
    assert rule.estimation.fisher == "mc"
    model = mlp(4, 6, 5, 3)
    opt = pb.KFAC(model, rule=rule)
    F.cross_entropy(model(torch.randn(9, 4)), torch.arange(9) % 3).backward()
    opt.step()
    assert {row.rule for row in opt.coverage()} == {"two-sided", "adam"}


def test_a_subclass_with_a_refresh_of_its_own_is_refreshed_by_it() -> None:
    class Unwhitened(Spectral):
        def refresh(self, averages: FactorAverages, state: Any) -> RefreshReport:
            state.root = torch.eye(4).expand_as(state.root).clone()
            return RefreshReport()

    rule = Unwhitened()
    averages = make_averages([4])
    (state,) = make_states(rule, averages)
    list(rule.refresh_stacks(averages, [state]))
    assert torch.equal(state.root[1], torch.eye(4))


def test_stacks_have_the_directions_together_that_they_have_alone() -> None:
    """Blocks of several shapes, some of which have taken more steps than others."""
    rule = Eigenbasis()
    sizes = [(2, 4, 3), (1, 3, 3), (1, 1, 4)]
    draws = torch.Generator().manual_seed(0)
    states = []
    gradients = []
    for blocks, rows, columns in sizes:
        shape = BlockShape(
            BlockKind.KRONECKER, (blocks, rows, columns), True, True, DOUBLE, torch.device("cpu")
        )
        state = rule.init(shape)
        assert state.left is not None
        assert state.right is not None
        state.left.copy_(torch.linalg.qr(torch.randn(state.left.shape, generator=draws))[0])
        state.right.copy_(torch.linalg.qr(torch.randn(state.right.shape, generator=draws))[0])
        state.steps.copy_(torch.arange(blocks))
        states.append(state)
        gradients.append(torch.randn(blocks, rows, columns, dtype=DOUBLE, generator=draws))
    context = StepContext(1, {})
    copies = copy.deepcopy(states)
    directions = rule.directions(gradients, states, context)
    for i, direction in enumerate(directions):
        torch.testing.assert_close(direction, rule.direction(gradients[i], copies[i], context))
        torch.testing.assert_close(states[i].first, copies[i].first)


def test_a_rule_takes_what_its_estimation_says() -> None:
    """What `estimation=` says counts, unless the rule's own argument says something else."""
    stated = Estimation(fisher="exact", joint=False)
    for rule in (Natural(estimation=stated), Eigenbasis(estimation=stated)):
        assert rule.estimation.fisher == "exact"
        assert rule.estimation.joint is False
    assert Natural(fisher="empirical", estimation=stated).estimation.fisher == "empirical"
    assert Natural(estimation=Estimation(ema=0.9)).estimation.fisher == "mc"
    assert Natural(estimation=Estimation(ema=0.9)).estimation.joint
    assert Eigenbasis(estimation=Estimation(ema=0.9)).estimation.fisher == "empirical"


@pytest.mark.parametrize(
    ("kind", "ema"), [(Natural, 0.95), (Eigenbasis, 0.95), (Spectral, 0.8), (TwoSided, 0.8)]
)
def test_a_rule_keeps_its_memory_beside_what_the_estimation_says(
    kind: type[Rule], ema: float
) -> None:
    """An estimation that did not name ema gave `Spectral` 0.95 in the place of its 0.8."""
    assert kind().estimation.ema == ema
    rule = kind(estimation=Estimation(max_factor=7))
    assert rule.estimation.ema == ema
    assert rule.find_ema() == ema
    assert rule.estimation.max_factor == 7
    assert kind(estimation=Estimation(ema=0.5)).find_ema() == 0.5


def test_an_estimation_without_ema_changes_no_step() -> None:
    """Steps are those of the rule without an estimation, and other than with another memory."""

    def train(estimation: Estimation | None) -> Tensor:
        torch.manual_seed(0)
        model = mlp(4, 6, 5, 3)
        rule = Spectral(estimation=estimation)
        opt = pb.KFAC(model, rule=rule, statistics_every=1, invert_every=1)
        for _ in range(3):
            opt.zero_grad()
            mse(model(torch.randn(9, 4)), torch.zeros(9, 3)).backward()
            opt.step()
        return vector(model)

    without = train(None)
    assert torch.equal(train(Estimation(max_factor=4096)), without)
    assert not torch.allclose(train(Estimation(ema=0.95)), without, atol=1e-6)


def test_joint_of_the_estimation_separates_weight_and_bias() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    rule = Natural(estimation=Estimation(joint=False))
    opt = pb.KFAC(model, rule=rule)
    model(x).square().sum().backward()
    opt.step()
    assert {key.names for key in opt.blocks.averages} == {("weight",), ("bias",)}
