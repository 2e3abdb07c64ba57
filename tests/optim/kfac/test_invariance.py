"""K-FAC in two affine coordinates: covariant factors, equal functions, singular blocks named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.experiments.kfac_invariance.nets import EXHIBITS, NETS, Pair, Side
from pullback.experiments.kfac_invariance.recurrent import Recurrent, recurrent_twin
from pullback.experiments.kfac_invariance.run import condition
from pullback.geometry.charts.affine import Change, drawn, layers
from pullback.geometry.charts.twin import random_coordinates, twin
from pullback.optim.kfac import Exact, Invariant, Tikhonov

BY_NAME = {net.name: net for net in (*NETS, *EXHIBITS)}
SAME, SOUND = 1e-9, 1e6
INSIDE = ["tanh MLP", "sigmoid MLP", "sigmoid → tanh", "conv, valid", "conv, padded, γ = 0",
          "conv, padded by γ", "RNN", "dead inputs", "softmax", "Gauss–Newton, inside",
          "metric carried over"]  # fmt: skip
OUTSIDE = ["RNN, inputs shifted", "softmax, logits", "Gauss–Newton, output"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kfac(side: Side, **options: Any) -> pb.KFAC:
    chosen = {"damping": 0.0, "momentum": 0.0, "ema": 0.0, "kl_clip": 1e-3, **options}
    return pb.KFAC(
        side.model, 0.5, metric=side.metric, fisher="exact", statistics_every=1, invert_every=1,
        **chosen,
    )  # fmt: skip


def trained(pair: Pair, build: Callable[[Side], Any], steps: int = 10) -> tuple[float, list[Any]]:
    """Relative mismatch after the steps, and the optimizers."""
    sides, optimizers = (pair.one, pair.two), [build(pair.one), build(pair.two)]

    def values() -> list[Tensor]:
        with torch.no_grad():
            return [side.seen(side.model(pair.held)) for side in sides]

    start = values()[0]
    for _ in range(steps):
        x, y = pair.batch()
        for side, optimizer in zip(sides, optimizers, strict=True):
            optimizer.zero_grad()
            side.loss(side.model(x), y).backward()
            optimizer.step()
    one, two = values()
    return float((one - two).norm() / (one - start).norm()), optimizers


def homogeneous(change: Change, taps: int = 1) -> Tensor:
    """[[Ω ⊗ 1, γ ⊗ 1], [0, 1]]: patches run over channels first, then over the kernel."""
    n = len(change.shift) * taps
    out = torch.zeros(n + 1, n + 1, dtype=torch.float64)
    out[:n, :n] = torch.kron(change.matrix, torch.eye(taps, dtype=torch.float64))
    out[:n, n] = change.shift.repeat_interleave(taps)
    out[n, n] = 1
    return out


def gradient(layer: nn.Linear | nn.Conv2d) -> Tensor:
    """V = (∂W, ∂b), (O, I + 1)."""
    assert layer.weight.grad is not None
    assert layer.bias is not None
    assert layer.bias.grad is not None
    return torch.cat([layer.weight.grad.flatten(1), layer.bias.grad[:, None]], 1)


def convnet() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 3, stride=2), nn.Tanh(), nn.Flatten(),
        nn.Linear(8, 2),
    ).double()  # fmt: skip


def test_factors_and_gradients_are_covariant() -> None:
    """A† = Ω̄AΩ̄ᵀ, G† = ΦᵀGΦ and V† = Φᵀ V Ω̄ᵀ, for linear and convolutional layers."""
    model, generator = convnet(), torch.Generator().manual_seed(0)
    to = random_coordinates(model, generator)
    other = twin(model, to)
    x = torch.randn(20, 2, 6, 6, dtype=torch.float64)
    found = []
    for m in (model, other):
        opt = pb.KFAC(m, 0.0, fisher="exact", statistics_every=1, damping=0.0)
        (0.5 * m(x).square().sum() / len(x)).backward()
        opt.step()
        blocks = [opt.curvature.block(k) for k in opt.curvature.averages]
        pulls = [gradient(layer) for layer in layers(m)]
        found.append(list(zip(blocks, pulls, strict=True)))
    taps = [m.weight[0, 0].numel() for m in layers(model)]
    for (one, v), (two, w), before, after, t in zip(
        *found, to.inputs, to.outputs, taps, strict=True
    ):
        bar, phi = homogeneous(before, t), after.matrix
        torch.testing.assert_close(two.right[0], bar @ one.right[0] @ bar.T, rtol=1e-10, atol=1e-12)  # pyright: ignore[reportAttributeAccessIssue]
        torch.testing.assert_close(two.left[0], phi.T @ one.left[0] @ phi, rtol=1e-10, atol=1e-12)  # pyright: ignore[reportAttributeAccessIssue]
        torch.testing.assert_close(w, phi.T @ v @ bar.T, rtol=1e-10, atol=1e-12)


def test_a_step_is_the_dense_natural_gradient_of_the_metric() -> None:
    """ΔW̄ = R⁻¹ V C⁻¹ from autograd alone, in both coordinates."""
    pair = BY_NAME["tanh MLP"].make(4)
    x, y = pair.batch()
    for side in (pair.one, pair.two):
        seen, z = [], x
        assert isinstance(side.model, nn.Sequential)
        for module in side.model:
            a, z = z, module(z)
            if isinstance(module, nn.Linear):
                seen.append((a, z))
        deltas = [
            torch.autograd.grad(z[:, k].sum(), [s[1] for s in seen], retain_graph=True)
            for k in range(z.shape[1])
        ]
        gradients = torch.autograd.grad(side.loss(z, y), list(side.model.parameters()))
        want = []
        for i, (a, _) in enumerate(seen):
            bar = torch.cat([a.detach(), torch.ones_like(a[:, :1])], 1)
            c = bar.T @ bar / len(x)
            r = sum(d[i].T @ d[i] for d in deltas) / len(x)
            v = torch.cat([gradients[2 * i], gradients[2 * i + 1][:, None]], 1)
            step = torch.linalg.solve(r, v) @ torch.linalg.inv(c)
            want += [step[:, :-1], step[:, -1]]
        before = [p.detach().clone() for p in side.model.parameters()]
        opt = kfac(side, kl_clip=None)
        side.loss(side.model(x), y).backward()
        opt.step()
        for p, old, delta in zip(side.model.parameters(), before, want, strict=True):
            torch.testing.assert_close(old - p.detach(), 0.5 * delta, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("damping", [0.0, Invariant(1e-2)], ids=["undamped", "invariant"])
def test_twins_stay_together(name: str, damping: Any) -> None:
    pair = BY_NAME[name].make(0)

    def build(side: Side) -> pb.KFAC:
        return kfac(side, damping=damping, momentum=0.9, ema=0.95)

    mismatch, optimizers = trained(pair, build)
    assert max(condition(o) for o in optimizers) <= SOUND
    assert mismatch <= SAME


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"ema": 0.95},
                                     {"joint": True, "sharing": "reduce"},
                                     {"damping": Invariant(0.3), "ema": 0.5},
                                     {"fisher_draws": True}])  # fmt: skip
@pytest.mark.parametrize("name", ["tanh MLP", "conv, valid", "RNN"])
def test_options_keep_twins_together(name: str, options: dict[str, Any]) -> None:
    pair = BY_NAME[name].make(1)
    options = dict(options)
    if options.pop("fisher_draws", False):  # the same draws for both

        def build(side: Side) -> pb.KFAC:
            return pb.KFAC(
                side.model, 0.5, metric=side.metric, fisher="mc", draws=3, seed=5, damping=0.0,
                kl_clip=1e-3, statistics_every=1, invert_every=1, momentum=0.0,
            )  # fmt: skip
    else:

        def build(side: Side) -> pb.KFAC:
            return kfac(side, **options)

    mismatch, _ = trained(pair, build, 5)
    assert mismatch <= SAME


def referred(pair: Pair) -> dict[int, Any]:
    """`KFAC.average()` of each network on the same batch."""
    x, y = pair.batch()
    averages = {}
    for side in (pair.one, pair.two):
        with kfac(side) as first:
            for group in first.param_groups:
                group["lr"] = 0.0
            side.loss(side.model(x), y).backward()
            first.step()
            averages[id(side)] = first.average()
            first.zero_grad()
    return averages


def test_a_fixed_reference_keeps_twins_together() -> None:
    pair = BY_NAME["tanh MLP"].make(2)
    averages = referred(pair)
    mismatch, _ = trained(pair, lambda s: kfac(s, damping=Invariant(0.1, averages[id(s)])))
    assert mismatch <= SAME


def test_a_reference_lets_batches_be_smaller_than_layers() -> None:
    """Three samples span nothing; second moments of many samples fill the rest invariantly."""
    pair = BY_NAME["tanh MLP"].make(0)
    few = replace(pair, batch=lambda: tuple(t[:3] for t in pair.batch()))  # pyright: ignore[reportArgumentType]
    many = referred(pair)
    assert trained(few, lambda s: kfac(s, damping=Invariant(0.1, many[id(s)])))[0] <= SAME
    assert trained(few, kfac, 1)[0] > 1e-3  # a pseudo-inverse agrees on the three samples only


@pytest.mark.parametrize("name", OUTSIDE)
def test_beyond_the_theorems_twins_part(name: str) -> None:
    pair = BY_NAME[name].make(0)
    with torch.no_grad():
        one, two = (side.seen(side.model(pair.held)) for side in (pair.one, pair.two))
    torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)
    assert trained(pair, kfac, 1)[0] > 1e-3


@pytest.mark.parametrize("name", ["zero padding with a shift", "RNN, a₀ kept"])
def test_twins_that_differ_before_the_first_step(name: str) -> None:
    pair = BY_NAME[name].make(0)
    with torch.no_grad():
        one, two = (side.model(pair.held) for side in (pair.one, pair.two))
    assert float((one - two).norm() / one.norm()) > 0.05


@pytest.mark.parametrize(
    "build",
    [
        lambda side: kfac(side, damping=Tikhonov(1e-3)),
        lambda side: kfac(side, damping=Exact(1e-3)),
        lambda side: kfac(side, joint=False),
        lambda side: torch.optim.SGD(side.model.parameters(), lr=1e-2),
        lambda side: torch.optim.Adam(side.model.parameters(), lr=1e-2),
    ],
    ids=["tikhonov", "exact", "separate bias", "sgd", "adam"],
)
def test_other_methods_depend_on_coordinates(build: Callable[[Side], Any]) -> None:
    assert trained(BY_NAME["tanh MLP"].make(0), build, 1)[0] > 1e-3


def test_orthogonal_changes_of_the_output_keep_the_euclidean_metric() -> None:
    pair = BY_NAME["Gauss–Newton, inside"].make(0)
    turn = torch.linalg.qr(drawn(3, torch.Generator().manual_seed(1)).matrix)[0]

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = pair.two.model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) @ turn.T

    two = Side(
        Turned(), pair.two.metric, lambda z, y: pair.two.loss(z @ turn, y), lambda z: z @ turn
    )
    assert trained(Pair(pair.one, two, pair.batch, pair.held), kfac)[0] <= SAME


def test_recurrent_twins_are_one_function() -> None:
    torch.manual_seed(0)
    model = Recurrent(3, 4, 2)
    x = torch.randn(5, 7, 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    for options in ({}, {"shift_inputs": True}):
        torch.testing.assert_close(recurrent_twin(model, generator, **options)(x), model(x))
    assert not torch.allclose(recurrent_twin(model, generator, keep_start=True)(x), model(x))


def queried(model: nn.Module, x: Tensor, likelihood: Any = None, **options: Any) -> pb.KFAC:
    """After one statistics step that moves nothing."""
    opt = pb.KFAC(
        model, 0.0, likelihood=likelihood, fisher="exact", damping=0.0, statistics_every=1,
        **options,
    )  # fmt: skip
    model(x).square().sum().backward()
    opt.step()
    return opt


def test_a_sound_network_has_no_singular_block() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(50, 3, dtype=torch.float64)
    opt = queried(model, x)
    assert opt.degenerate() == []
    assert torch.linalg.matrix_rank(opt.gram().dense()) == 26


def test_softmax_logits_are_always_degenerate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double()
    opt = queried(model, torch.randn(50, 3, dtype=torch.float64), pb.likelihoods.Categorical())
    (found,) = opt.degenerate()
    assert (found.names[0], found.side, found.rank, found.size) == ("2.weight", "output", 4, 5)
    assert "softmax" in found.reason


@pytest.mark.parametrize("turned", [False, True])
def test_inputs_that_never_occur_are_named(turned: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.randn(50, 4, dtype=torch.float64)
    x[:, 1:3] = 0
    if turned:
        x = x @ drawn(4, torch.Generator().manual_seed(1)).matrix
    opt = queried(model, x)
    (found,) = opt.degenerate()
    assert (found.side, found.rank, found.size) == ("input", 3, 5)
    words = "2 directions did not occur" if turned else "2 inputs are always zero"
    assert words in found.reason
    assert "inverted on its range" in opt.info.notes["0.weight, 0.bias"]


def test_dead_units_and_small_batches_are_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].bias[1] = -100.0  # pyright: ignore[reportIndexIssue]
    found = {(d.names[0], d.side): d for d in queried(model, _wide(60)).degenerate()}
    assert "1 outputs receive no gradient" in found["0.weight", "output"].reason
    assert "1 inputs are always zero" in found["2.weight", "input"].reason
    few = {(d.names[0], d.side): d for d in queried(model, _wide(2)).degenerate()}
    assert few["0.weight", "input"].rank == 2


def _wide(count: int) -> Tensor:
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_round_off_does_not_hide_a_singular_side(dtype: torch.dtype) -> None:
    """Covariances of softmax residuals are singular; their Cholesky pivots often say otherwise."""
    from pullback.grams.kronecker import inverses

    generator = torch.Generator().manual_seed(0)
    for n in (3, 4, 7, 12):
        for _ in range(40):
            z = 3 * torch.randn(200, n, dtype=dtype, generator=generator)
            p = z.softmax(-1)
            y = torch.multinomial(p, 1, generator=generator)[:, 0]
            d = (p - torch.eye(n, dtype=dtype)[y]) @ torch.randn(
                n, n, dtype=dtype, generator=generator
            )
            found = inverses([(d.T @ d / 200)[None]], singular=True)
            (rank,) = found.ranks
            assert rank is not None
            assert int(rank) <= n - 1


def test_a_side_of_zeros_has_failed_or_is_left_out() -> None:
    from pullback.grams.kronecker import inverses

    zero, fine = torch.zeros(1, 3, 3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)[None]
    strict = inverses([zero, fine])
    assert strict.failed == [True, False]
    torch.testing.assert_close(strict.sides[1], fine)
    found = inverses([zero, fine], singular=True)
    assert found.failed == [False, False]
    assert not found.sides[0].any()
