"""K-FAC in two affine coordinates, invariant damping and its references, singular blocks named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.geometry.charts.twin import draw_change
from pullback.optim.kfac import Adaptive, Exact, Invariant
from pullback_experiments.kfac_invariance.nets import EXHIBITS, NETS, TwinPair, TwinSide
from tests.kfac_options import kfac_of

from ..common import closure_of, flat, refused
from .common import DOUBLE, vector

BY_NAME = {net.name: net for net in (*NETS, *EXHIBITS)}
SAME = 1e-9


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(DOUBLE)


def kfac(side: TwinSide, **options: Any) -> pb.KFAC:
    chosen: dict[str, Any] = {
        "damping": 0.0, "momentum": 0.0, "ema": 0.0, "kl_clip": 1e-3, "fisher": "exact",
        "statistics_every": 1, "invert_every": 1,
    }  # fmt: skip
    return kfac_of(side.model, 0.5, metric=side.metric, **chosen | options)


def mismatch(pair: TwinPair, build: Callable[[TwinSide], Any], steps: int = 2) -> float:
    """How far both functions are apart after the steps, relative to their way."""
    sides = (pair.one, pair.two)
    optimizers = [build(pair.one), build(pair.two)]

    def values() -> list[Tensor]:
        with torch.no_grad():
            return [side.readout(side.model(pair.probe_inputs)) for side in sides]

    start = values()[0]
    for _ in range(steps):
        x, y = pair.batch()
        for side, optimizer in zip(sides, optimizers, strict=True):
            optimizer.zero_grad()
            side.loss(side.model(x), y).backward()
            optimizer.step()
    one, two = values()
    return float((one - two).norm() / (one - start).norm())


RUNNING = {"momentum": 0.9, "ema": 0.95}
DRAWN = {"fisher": "mc", "draws": 3, "seed": 5}  # the same draws for both
INSIDE = ["tanh MLP", "sigmoid MLP", "sigmoid → tanh", "conv, valid", "conv, padded, γ = 0",
          "conv, padded by γ", "RNN", "dead inputs", "softmax", "Gauss–Newton, inside",
          "metric carried over"]  # fmt: skip
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    *((name, RUNNING) for name in INSIDE),
    *((name, RUNNING | {"damping": Invariant(1e-2)}) for name in INSIDE[5:9]),
    *(("tanh MLP", option) for option in ({}, DRAWN, {"damping": Invariant(0.3), "ema": 0.5})),
    ("conv, valid", {"sharing": "reduce"}),
    ("RNN", DRAWN),
]


@pytest.mark.parametrize(("name", "options"), TOGETHER)
def test_twins_stay_together(name: str, options: dict[str, Any]) -> None:
    assert mismatch(BY_NAME[name].make(0), lambda side: kfac(side, **options)) <= SAME


def test_a_reference_lets_batches_be_smaller_than_layers() -> None:
    """Three samples span nothing; second moments of many samples fill the rest invariantly."""
    pair = BY_NAME["tanh MLP"].make(0)
    x, y = pair.batch()
    averages = {}
    for side in (pair.one, pair.two):
        with kfac(side) as first:
            first.param_groups[0]["lr"] = 0.0
            side.loss(side.model(x), y).backward()
            first.step()
            averages[id(side)] = first.average()
    few = replace(pair, batch=lambda: tuple(t[:3] for t in pair.batch()))  # pyright: ignore[reportArgumentType]
    assert mismatch(few, lambda s: kfac(s, damping=Invariant(0.1, averages[id(s)]))) <= SAME
    assert mismatch(few, kfac, 1) > 1e-3  # a pseudo-inverse agrees on the three samples only


APART: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("RNN, inputs shifted", "softmax, logits", "Gauss–Newton, output")),
    *(("tanh MLP", o) for o in ({"damping": 1e-3}, {"damping": Exact(1e-3)}, {"joint": False})),
]


@pytest.mark.parametrize(("name", "options"), APART)
def test_twins_part_beyond_the_theorems(name: str, options: dict[str, Any]) -> None:
    """Also with other dampings, and with biases apart."""
    assert mismatch(BY_NAME[name].make(0), lambda side: kfac(side, **options), 1) > 1e-3


def fit_statistics(model: nn.Module, x: Tensor, likelihood: Any = None, **options: Any) -> pb.KFAC:
    """After one statistics step that moves nothing."""
    chosen = {"fisher": "exact", "damping": 0.0, **options}
    opt = kfac_of(model, 0.0, likelihood=likelihood, **chosen)
    model(x).square().sum().backward()
    opt.step()
    opt.close()
    return opt


X = torch.rand(60, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
DEAD = X * torch.tensor([1.0, 0.0, 0.0, 1.0])
TURN = draw_change(4, torch.Generator().manual_seed(1)).matrix
#: inputs, the shift of a hidden unit, and the singular sides: first name, side, rank, size, reason
SINGULAR: dict[str, tuple[Tensor, float, list[tuple[str, str, int, int, str]]]] = {
    "sound": (X, 0.0, []),
    "dead inputs": (DEAD, 0.0, [("0.weight", "input", 3, 5, "2 inputs are always zero")]),
    "turned": (DEAD @ TURN, 0.0, [("0.weight", "input", 3, 5, "2 directions did not occur")]),
    "dead unit": (X, -100.0, [
        ("0.weight", "output", 2, 3, "1 outputs receive no gradient"),
        ("2.weight", "input", 3, 4, "1 inputs are always zero"),
    ]),
    "few": (X[:2], 0.0, [("0.weight", "input", 2, 5, "did not"), ("2.weight", "input", 2, 4, "")]),
}  # fmt: skip


@pytest.mark.parametrize("name", SINGULAR)
def test_singular_blocks_are_named(name: str) -> None:
    x, shift, want = SINGULAR[name]
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 4))
    with torch.no_grad():
        model[0].weight.abs_()
        model[0].bias.copy_(torch.tensor([0.0, shift, 0.0]))
    opt = fit_statistics(model, x)
    degenerate_sides = opt.degenerate()
    assert [(d.names[0], d.side, d.rank, d.size) for d in degenerate_sides] == [w[:4] for w in want]
    assert all(w[4] in d.reason for d, w in zip(degenerate_sides, want, strict=True))
    assert {d.names[0] for d in degenerate_sides} == {note.split(",")[0] for note in opt.info.notes}
    assert all("inverted on its range" in note for note in opt.info.notes.values())
    opt = fit_statistics(model, x, damping=1e-30)  # which does not help
    assert opt.info.accepted
    assert torch.isfinite(vector(model)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_softmax_logits_are_singular_whatever_round_off_says(dtype: torch.dtype) -> None:
    """A Cholesky factorization of the covariance of residuals often succeeds."""
    for n in (3, 7, 12):
        for seed in range(2):
            torch.manual_seed(seed)
            model = nn.Linear(4, n).to(dtype)
            x = 3 * torch.randn(50, 4, dtype=dtype)
            opt = fit_statistics(model, x, pb.likelihoods.Categorical(), fisher="mc")
            (degenerate,) = opt.degenerate()
            assert (degenerate.names[0], degenerate.side, degenerate.rank) == (
                "weight",
                "output",
                n - 1,
            )
            assert "softmax" in degenerate.reason
            assert f"output side is singular: rank {n - 1}" in opt.info.notes["weight, bias"]


def make_normalized(width: int = 6, gain: float = 1.0) -> Any:
    """Normalized twice; gain and shift over `gain`, which the next weight undoes."""
    torch.manual_seed(0)
    first = [nn.Linear(5, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 4)]
    model: Any = nn.Sequential(*first, nn.BatchNorm1d(4), nn.Linear(4, 3))
    with torch.no_grad():
        model[4].bias.normal_()
        for p in model[4].parameters():
            p.div_(gain)
        model[5].weight.mul_(gain)
    for layer in (model[0], model[3]):  # singular below a normalization
        layer.requires_grad_(False)
    return model


def data(seed: int = 1, samples: int = 24) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 5, generator=g), torch.randn(samples, 3, generator=g)


def train(model: Any, damping: Any, steps: int = 1, batch: Any = (), **options: Any) -> pb.KFAC:
    chosen = {"momentum": 0.0, "statistics_every": 1, "invert_every": 1, "lr": 0.1, **options}
    opt = kfac_of(model, fisher="exact", damping=damping, kl_clip=None, **chosen)
    (x, y), loss = batch or data(), lambda z, y: 0.5 * (z - y).square().sum(1).mean()
    for _ in range(steps):
        opt.step(closure_of(opt, model, x, y, loss))
    return opt


def average(width: int = 6, **options: Any) -> Any:
    """Of a few other samples."""
    return train(make_normalized(width), 0.1, batch=data(2, 8), lr=0.0, **options).average()


@pytest.mark.parametrize(
    ("damping", "scale"),
    [(Invariant(0.1), 3.0), (Invariant(1e-3), 100.0), (Adaptive(Invariant(0.1)), 100.0)],
)
def test_normalized_twins_stay_together(damping: Any, scale: float) -> None:
    x = data()[0]
    start = make_normalized()(data()[0]).detach()
    for candidate, is_invariant in ((damping, True), (0.1, False)):
        outputs = []
        for gain in (1.0, scale):
            model = make_normalized(gain=gain)
            train(model, candidate, steps=3)
            outputs.append(model(x).detach())
        difference = (outputs[1] - outputs[0]).norm() / (outputs[0] - start).norm()
        assert difference <= SAME if is_invariant else difference > 1e-4


@pytest.mark.parametrize("has_reference", [False, True])
def test_gains_and_shifts_are_damped_by_their_own_moments(has_reference: bool) -> None:
    """(B + λB_ref)⁻¹g."""
    reference = train(make_normalized(), 0.1, batch=data(2, 8), lr=0.0)
    model = make_normalized()
    params: Any = list(model[4].parameters())
    before = torch.cat(params).detach()
    opt = train(model, Invariant(0.3, reference.average() if has_reference else None))
    gram, other = (
        o.gram().dense()[12:20, 12:20] for o in (opt, reference if has_reference else opt)
    )
    want = 0.1 * torch.linalg.solve(gram + 0.3 * other, flat([p.grad for p in params]))
    torch.testing.assert_close(before - torch.cat(params).detach(), want, rtol=1e-9, atol=1e-12)


def test_units_that_never_matter_are_left_out_and_named() -> None:
    model = make_normalized()
    with torch.no_grad():
        model[5].weight[:, 1] = 0  # nothing follows from unit 1 of the last normalization
        model[4].weight[1] = 2.0
    opt = train(model, Invariant(0.1))
    assert "rank 6 of 8" in opt.info.notes["4.weight, 4.bias"]
    assert float(model[4].weight[1].detach()) == 2.0


def test_which_reference_serves() -> None:
    """Also inside an adaptive damping; a block that it lacks has its own average, and is named."""
    reference = average()
    moves = []
    for damping in (
        Invariant(0.5, reference), Adaptive(Invariant(0.5, reference)), Invariant(0.5),
        Invariant(0.5, average(joint=False)),
    ):  # fmt: skip
        model = make_normalized()
        before = vector(model)
        opt = train(model, damping)
        moves.append(vector(model) - before)
        lacking = len(moves) == 4
        assert any("lacks this block" in n for n in opt.info.notes.values()) == lacking
        assert ("lacks this block" in str(opt.coverage())) == lacking
    single = [make_normalized().float(), Invariant(0.5, reference)]
    assert train(*single, batch=[t.float() for t in data()]).info.accepted
    assert torch.equal(moves[0], moves[1])
    assert torch.equal(moves[2], moves[3])
    assert (moves[2] - moves[0]).norm() > 0.1 * moves[0].norm()


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_reference_of_another_width_is_refused(adaptive: bool) -> None:
    damping = Invariant(0.1, average(width=7))
    model = make_normalized()
    before = vector(model)
    with refused("reference does not fit", "7", "KFAC.average()"):
        train(model, Adaptive(damping) if adaptive else damping)
    assert torch.equal(vector(model), before)
