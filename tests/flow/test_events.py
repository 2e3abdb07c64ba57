"""Events with known times, reasons to stop, bad input, and a model that is left alone."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback import PullbackError, flow
from pullback.flow.field import count_lost
from pullback.likelihoods import Bernoulli, Categorical
from pullback.metrics import Fisher

DTYPE = torch.float64
Y = torch.tensor([1.0, -1.0, 1.0], dtype=DTYPE)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=DTYPE)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=DTYPE)


def problem() -> tuple[nn.Module, Tensor, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(5, 1, bias=False).double()
    x = draw(3, 5)
    return model, x, lambda: F.softplus(-Y * model(x)[:, 0]).mean()


def event_of_separation(stop: bool = False) -> flow.Event:
    return flow.Event(lambda s: float((Y * s.values[:, 0]).min()), "separated", stop)


def event_of_convergence(limit: float) -> flow.Event:
    return flow.Event(lambda s: log(limit) - log(s.loss), "converged")


def grows(z: Tensor) -> Tensor:
    return -(z**3).sum() / 3


def test_separation_and_convergence_at_their_exact_times() -> None:
    model, x, closure = problem()
    c = torch.log1p(torch.exp(Y * model(x)[:, 0].detach()))
    events = [event_of_separation(), event_of_convergence(1e-1)]
    trajectory = flow.integrate(
        model, closure, Fisher(Bernoulli()), (0, 50), events=events, rtol=1e-8, atol=1e-10
    )
    assert trajectory.status == "event"
    assert "converged" in trajectory.reason
    assert abs(trajectory.events["separated"][0] - (log(2) - float(c.min()))) < 1e-6
    # the loss of a sample is −log(1 − e^(−t−c))
    end = trajectory.events["converged"][0]
    assert end == trajectory.end
    assert abs(float(-torch.log1p(-torch.exp(-end - c)).mean()) / 1e-1 - 1) < 1e-5
    assert abs(float(trajectory.loss()) / 1e-1 - 1) < 1e-8
    with pytest.raises(PullbackError, match="outside the trajectory"):
        trajectory.values(trajectory.end + 1)


def test_an_event_that_holds_at_the_start() -> None:
    model, _, closure = problem()
    trajectory = flow.integrate(
        model, closure, Fisher(Bernoulli()), (0, 5), events=[event_of_convergence(100.0)]
    )
    assert trajectory.status == "event"
    assert trajectory.end == 0
    assert trajectory.steps == 0
    assert trajectory.t.tolist() == [0.0]


def test_an_event_of_ones_own() -> None:
    turn = flow.Event(lambda s: float(s.parameters[0]), "crossing", stop=False)

    def height(z: Tensor) -> Tensor:
        return z.sum()

    trajectory = flow.integrate(
        lambda x: x, height, torch.eye(2, dtype=DTYPE), (0, 3), start=tensor(1, 2), events=[turn]
    )
    assert trajectory.events == {"crossing": (0.0,)}  # positive from the start, then falling
    up = flow.Event(lambda s: -float(s.parameters[0]), "fell", stop=False)
    trajectory = flow.integrate(lambda x: x, height, None, (0, 3), start=tensor(1, 2), events=[up])
    assert abs(trajectory.events["fell"][0] - 1) < 1e-9


def test_blow_up_ends_with_a_reason() -> None:
    """θ' = θ² from 1 is 1/(1 − t)."""
    trajectory = flow.integrate(
        lambda x: x,
        grows,
        t=(0, 2),
        start=tensor(1),
        kind="euclidean",
        rtol=1e-4,
    )
    assert trajectory.status == "event"
    assert "blow-up" in trajectory.reason
    assert abs(trajectory.end - 1) < 1e-3
    assert bool(torch.isfinite(trajectory.points).all())


@pytest.mark.parametrize("method", ["DOP853", "LSODA", "BDF"])
def test_a_loss_that_ends_ends_the_flow(method: str) -> None:
    """θ' = 1/√(1 − θ) reaches 1, beyond which the loss is NaN, at t = 2/3."""
    trajectory = flow.integrate(
        lambda x: x,
        lambda z: 2 * (1 - z).sqrt().sum(),
        t=(0, 2),
        start=tensor(0),
        kind="euclidean",
        method=method,
        rtol=1e-6,
        atol=1e-8,
    )
    assert trajectory.status == "failed"
    assert not trajectory.ok
    assert "not finite" in trajectory.reason
    assert 0.5 < trajectory.end < 0.7
    assert bool(torch.isfinite(trajectory.points).all())
    assert bool(torch.isfinite(trajectory.flat(0.3)).all())


def test_nan_at_the_start() -> None:
    trajectory = flow.integrate(
        lambda x: x, lambda z: z.log().sum(), t=(0, 1), start=tensor(-1), kind="euclidean"
    )
    assert trajectory.status == "failed"
    assert "at the start" in trajectory.reason
    assert trajectory.flat().tolist() == [-1.0]
    model, x, _ = problem()
    with pytest.raises(PullbackError, match="not finite"):
        flow.integrate(model, lambda: (model(x) * torch.nan).sum(), t=(0, 1))


def test_a_budget_and_a_stiff_problem() -> None:
    scales = tensor(1, 1e6)

    def loss(z: Tensor) -> Tensor:
        return 0.5 * (scales * (z - 1) ** 2).sum()

    def run(method: str) -> flow.Trajectory:
        return flow.integrate(
            lambda x: x,
            loss,
            t=(0, 5),
            start=tensor(0, 0),
            kind="euclidean",
            method=method,
            rtol=1e-6,
            atol=1e-8,
            max_evaluations=400,
        )

    explicit = run("DOP853")
    implicit = run("LSODA")
    assert explicit.status == "budget"
    assert "evaluations" in explicit.reason
    assert explicit.evaluations < 500
    assert implicit.status == "finished"
    assert abs(float(implicit.flat()[0]) - (1 - float(torch.exp(tensor(-5))))) < 1e-4


def test_the_natural_flow_through_a_loss_of_rank_ends_finite() -> None:
    """φ = θ³ from 1 towards z = −1: the Gram vanishes on the way, at θ = 0."""
    trajectory = flow.integrate(
        lambda x: x**3,
        lambda z: 0.5 * ((z + 1) ** 2).sum(),
        t=(0, 5),
        start=tensor(1),
        max_evaluations=60,
    )
    assert bool(torch.isfinite(trajectory.points).all())
    assert trajectory.status in ("failed", "budget", "finished")
    assert trajectory.reason


def test_a_closure_whose_gradient_loses_its_digits_stops_and_says_so() -> None:
    model, x, _ = problem()
    closure = lambda: F.binary_cross_entropy_with_logits(model(x)[:, 0], (1 + Y) / 2)  # noqa: E731
    s0 = Y * tensor(2, 10, 16)
    with torch.no_grad():
        model.weight.copy_((torch.linalg.pinv(x) @ s0)[None])  # pyright: ignore
    trajectory = flow.integrate(
        model, closure, Fisher(Bernoulli()), (0, 60), method="RK45", rtol=1e-4, atol=1e-5
    )
    assert trajectory.status == "failed"
    assert "Supervised" in trajectory.reason
    assert 1 < trajectory.end < 3
    c = torch.log1p(torch.exp(Y * s0))
    for t in (0.5, 1.0):  # at 17 more than half of the digits are left of p − y
        truth = Y * (t + c + torch.log(-torch.expm1(-(t + c))))
        assert float((trajectory.values(t)[:, 0] - truth).abs().max()) < 1e-3


def test_digits_are_lost_where_the_answer_is_right_alone() -> None:
    z = tensor(2, 19, -19, 19, 40)
    y = tensor(1, 1, 0, 0, 1)
    assert count_lost(Bernoulli(), z, (z.sigmoid() - y) / 5) == 3
    logits = torch.stack([z, 0 * z], 1)
    classes = (1 - y).long()
    slope = logits.softmax(1) - F.one_hot(classes, 2)
    assert count_lost(Categorical(), logits, slope) == 3
    assert count_lost(None, z, z) == 0


def test_the_model_is_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    model.eval()
    x = draw(3, 5)
    frozen = model[0].bias
    frozen.requires_grad_(False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    random = torch.get_rng_state()

    def closure() -> Tensor:
        loss = F.softplus(-Y * model(x)[:, 0]).mean()
        loss.backward()
        return loss

    trajectory = flow.integrate(model, closure, Fisher(Bernoulli()), (0, 1), rtol=1e-4, atol=1e-6)
    trajectory.values(0.5)
    trajectory.loss(0.5)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)
    assert torch.equal(random, torch.get_rng_state())
    values = trajectory.values()
    trajectory.load_(model)
    assert float((model(x) - values).abs().max()) < 1e-14
    assert torch.equal(model[0].bias, before["0.bias"])
    assert "0.bias" not in trajectory.parameters()
    trajectory.load_(model, 0.0)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    with pytest.raises(PullbackError, match="no parameter"):
        trajectory.load_(nn.Linear(2, 2))


def test_a_failing_closure_leaves_the_model_alone_too() -> None:
    model, x, _ = problem()
    before = model.weight.detach().clone()  # pyright: ignore
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) > 20:
            raise KeyError("user code")
        return F.softplus(-Y * model(x)[:, 0]).mean()

    with pytest.raises(KeyError):
        flow.integrate(model, closure, Fisher(Bernoulli()), (0, 1))
    assert torch.equal(model.weight, before)  # pyright: ignore


def test_kept_times() -> None:
    model, _, closure = problem()
    rough = {"rtol": 1e-4, "atol": 1e-6}
    dense = flow.integrate(model, closure, Fisher(Bernoulli()), (0, 1.2), **rough)
    path = flow.integrate(
        model, closure, Fisher(Bernoulli()), (0, 1.2), at=[0.0, 0.5, 1.0], **rough
    )
    assert path.t.tolist() == [0.0, 0.5, 1.0]
    assert path.points.shape == (3, 5)
    assert torch.equal(path.points, dense.flat(path.t))
    assert dense.values(path.t).shape == (3, 3, 1)
    assert dense.loss(path.t).shape == (3,)
    assert path.end == 1.2
    assert torch.equal(path.flat(), dense.flat())
    with pytest.raises(PullbackError, match="not kept"):
        path.flat(0.7)
    trajectory = flow.integrate(
        model,
        closure,
        Fisher(Bernoulli()),
        (0, 30),
        at=[0.0, 1.0, 29.0],
        events=[event_of_convergence(0.1)],
        **rough,
    )
    assert trajectory.t.tolist() == [0.0, 1.0]
    assert "finished" in repr(dense)


def float_model() -> nn.Module:
    return nn.Linear(5, 1)


def run(**changes: object) -> object:
    model, _, closure = problem()
    arguments = {
        "model": model,
        "closure_or_objective": closure,
        "metric": Fisher(Bernoulli()),
        "t": (0, 1),
        **changes,
    }
    return flow.integrate(**arguments)  # pyright: ignore


BAD: dict[str, tuple[dict[str, object], str]] = {
    "float32": ({"model": float_model()}, "float64"),
    "float32 start": ({"model": lambda x: x, "start": torch.ones(2), "metric": None}, "float64"),
    "kind": ({"kind": "riemannian"}, "kind"),
    "method": ({"method": "Euler"}, "method"),
    "euclidean with a metric": ({"kind": "euclidean"}, "no metric"),
    "euclidean with a solver": (
        {"kind": "euclidean", "metric": None, "solver": pb.solvers.Cholesky()},
        "no metric",
    ),
    "backwards": ({"t": (1, 0)}, "time span"),
    "endless": ({"t": (0, float("inf"))}, "time span"),
    "no span": ({"t": 3}, "time span"),
    "times outside": ({"at": [0.5, 2.0]}, "at="),
    "times out of order": ({"at": [0.5, 0.2]}, "at="),
    "no times": ({"at": []}, "at="),
    "tolerance": ({"rtol": 0.0}, "rtol"),
    "budget": ({"max_evaluations": 0}, "max_evaluations"),
    "no event": ({"events": [3]}, "event"),
    "no loss": ({"closure_or_objective": 3}, "The loss is not usable"),
    "start of a module": ({"start": tensor(1)}, "start"),
    "function without start": ({"model": lambda x: x}, "start"),
    "empty start": ({"model": lambda x: x, "start": tensor()}, "start"),
    "metric of another size": (
        {
            "model": lambda x: x,
            "start": tensor(1, 2),
            "closure_or_objective": lambda z: z.sum(),
            "metric": torch.eye(3, dtype=DTYPE),
        },
        "fit",
    ),
    "indefinite metric": (
        {
            "model": lambda x: x,
            "start": tensor(1, 2),
            "closure_or_objective": lambda z: z.sum(),
            "metric": torch.diag(tensor(1, -1)),
        },
        "semidefinite",
    ),
    "no tensor": (
        {"model": lambda x: 1.0, "start": tensor(1), "closure_or_objective": lambda z: z},
        "point of Z",
    ),
    "a vector of losses": (
        {"model": lambda x: x, "start": tensor(1, 2), "closure_or_objective": lambda z: z},
        "not one number",
    ),
    "closure without a loss": ({"closure_or_objective": lambda: None}, "return the loss"),
    "a metric with residuals": (
        {"closure_or_objective": lambda params: params["weight"]},
        "metric",
    ),
    "two reductions": (
        {
            "closure_or_objective": flow.Supervised(draw(3, 5), (1 + Y) / 2, Bernoulli()),
            "reduction": "sum",
        },
        "reductions",
    ),
    "signs as labels": (
        {"closure_or_objective": flow.Supervised(draw(3, 5), Y, Bernoulli())},
        "labels",
    ),
    "no likelihood": (
        {"closure_or_objective": flow.Supervised(draw(3, 5), Y, "bernoulli")},  # pyright: ignore
        "likelihood",
    ),
    "an event of several numbers": ({"events": [flow.Event(lambda s: s.flat)]}, "not one number"),
    "targets that are no tensor": (
        {"closure_or_objective": flow.Supervised(draw(3, 5), [0.0, 1.0, 1.0], Bernoulli())},
        "targets",
    ),
    "an event that is NaN": ({"events": [flow.Event(lambda s: float("nan"))]}, "NaN"),
}


@pytest.mark.parametrize(("changes", "match"), BAD.values(), ids=BAD)
def test_bad_input(changes: dict[str, object], match: str) -> None:
    with pytest.raises(PullbackError, match=match):
        run(**changes)


def test_an_event_that_is_no_function() -> None:
    with pytest.raises(PullbackError):
        flow.Event(3)  # pyright: ignore


def test_a_stochastic_loss_is_refused() -> None:
    model, x, _ = problem()
    generator = torch.Generator().manual_seed(0)

    def closure() -> Tensor:
        noise = torch.rand(3, generator=generator, dtype=DTYPE)
        return (noise * model(x)[:, 0] ** 2).sum()

    with pytest.raises(PullbackError, match="stochastic"):
        flow.integrate(model, closure, t=(0, 1))


def test_dropout_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    x = draw(3, 5)
    state = torch.get_rng_state()
    closure = lambda: F.softplus(-Y * model(x)[:, 0]).mean()  # noqa: E731
    with pytest.raises(PullbackError, match="stochastic"):
        flow.integrate(model, closure, kind="euclidean", t=(0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert flow.integrate(model.eval(), closure, kind="euclidean", t=(0, 1)).ok


def test_a_function_has_no_other_inputs() -> None:
    trajectory = flow.integrate(lambda w: w, lambda z: z.square().sum(), t=(0, 0.1), start=draw(2))
    with pytest.raises(PullbackError, match="no model"):
        trajectory.values(None, draw(2))


def test_a_single_event_needs_no_list() -> None:
    trajectory = run(events=flow.Event(lambda s: s.t - 0.25, "then"))
    assert isinstance(trajectory, flow.Trajectory)
    assert trajectory.status == "event"
    assert abs(trajectory.end - 0.25) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_map_that_rounds_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(PullbackError, match="needs float64"):
        flow.integrate(lambda v: v.to(dtype) ** 2, torch.sum, start=tensor(1, 2), t=(0.0, 1.0))


@pytest.mark.parametrize("start", [[1.0], 1.0])
def test_a_start_that_is_no_tensor(start: object) -> None:
    with pytest.raises(PullbackError, match=r"start .* float type"):
        flow.integrate(lambda v: v, torch.sum, start=start, t=(0.0, 1.0))  # pyright: ignore
