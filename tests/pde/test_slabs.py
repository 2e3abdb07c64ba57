"""Time in pieces: each slab goes on from the last, and together they solve the whole."""

from __future__ import annotations

import math
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError, pde
from pullback.pde.judgement.stop import Stop, StopReason
from pullback.pde.judgement.verdict import PDEVerdict
from pullback.pde.networks.modules import Slabs
from pullback.pde.networks.windows import read_initial_values, rescale_time, restrict_to_window
from pullback.pde.runs.run import Run
from pullback.pde.runs.settings import Limits, MethodOptions, SamplingOptions, Settings
from pullback.pde.runs.slabs import SlabMarch, summarize_verdicts

pi = math.pi


def heat(**options: Any) -> pde.Problem:
    return pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 1)),
        [
            pde.Equation(lambda u: u.t - 0.1 * u.xx),
            pde.Dirichlet(0.0),
            pde.Initial(lambda x: torch.sin(pi * x), weight=10.0),
        ],
        exact=lambda x, t: torch.exp(-0.1 * pi**2 * t) * torch.sin(pi * x),
        **options,
    )


def wave() -> pde.Problem:
    return pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 1)),
        [
            pde.Equation(lambda u: (u.tt - u.xx) / pi**2),
            pde.Dirichlet(0.0),
            pde.Initial(lambda x: torch.sin(pi * x), velocity=0.0, weight=10.0),
        ],
        exact=lambda x, t: torch.cos(pi * t) * torch.sin(pi * x),
    )


def run(problem: pde.Problem | None = None, **options: Any) -> pde.PDESolution:
    return pde.solve(
        problem or heat(),
        pde.mlp(2, 8, 1, seed=0),
        **{"steps": 6, "points": 49, "progress": False, "slabs": 2, **options},
    )


@pytest.mark.parametrize("problem", [heat, pytest.param(wave, marks=pytest.mark.slow)])
def test_slabs_together_solve_the_whole(problem: Any) -> None:
    solution = pde.solve(
        problem(),
        pde.mlp(2, 8, 1, seed=0),
        slabs=2,
        points=49,
        steps=150,
        tol=1e-2,
        progress=False,
    )
    assert solution.error < 3e-2
    assert isinstance(solution.network, Slabs)
    assert len(solution.network.networks) == 2


def test_a_slab_starts_where_the_last_one_ended() -> None:
    problem = wave()
    for before in (pde.mlp(2, 5, 1, seed=3), pde.mlp(2, 5, 1, seed=3, activation=nn.ELU)):
        later = problem.conditions[2].with_initial_values(
            read_initial_values(before, time_axis=1), problem.fields
        )
        assert isinstance(later, pde.Initial)
        x = torch.rand(6, 2).double()
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(before(y).sum(), y)
        value = later.value
        velocity = later.velocity
        assert callable(value)
        assert callable(velocity)
        torch.testing.assert_close(value(points=x), before(x)[:, 0].detach())
        torch.testing.assert_close(velocity(points=x), g[:, 1])
        torch.testing.assert_close(velocity(points=x.float()), g[:, 1], rtol=1e-4, atol=1e-5)
    values = read_initial_values(before, time_axis=1)
    assert (
        problem.conditions[1].with_initial_values(values, problem.fields) is problem.conditions[1]
    )


def test_fields_go_on_each_by_itself() -> None:
    problem = pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 1)),
        [
            pde.Equation(lambda u, v: u.t - v, lambda u, v: v.t + u),
            pde.Initial(1.0, field="u"),
            pde.Initial(0.0, field="v"),
        ],
        fields=("u", "v"),
        exact=lambda t: (torch.cos(t), -torch.sin(t)),
    )
    network = pde.mlp(2, 4, 2, seed=0)
    x = torch.rand(3, 2).double()
    for i, condition in enumerate(problem.conditions[1:]):
        values = read_initial_values(network, time_axis=1)
        later = condition.with_initial_values(values, problem.fields)
        assert torch.equal(later.value(points=x), network(x)[:, i].detach())  # pyright: ignore[reportAttributeAccessIssue]
    solution = pde.solve(
        problem, pde.mlp(2, 8, 2, seed=0), slabs=3, points=36, steps=150, tol=1e-2, progress=False
    )
    assert solution.error < 3e-2


def test_the_network_of_a_time() -> None:
    class Constant(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = value

        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x), 1), self.value).double()

    whole = Slabs([Constant(float(i)) for i in range(3)], torch.tensor([0.0, 1.0, 2.0, 3.0]))
    x = torch.tensor([[9, 0.0], [9, 0.5], [9, 1.5], [9, 2.5], [9, 3.0]]).double()
    assert whole(x)[:, 0].tolist() == [0, 0, 1, 2, 2]


def test_the_given_network_is_where_the_first_slab_starts() -> None:
    network = pde.mlp(2, 8, 1, seed=0)
    before = [p.detach().clone() for p in network.parameters()]
    run()
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


@pytest.mark.parametrize("options", [{"resample": 2}], ids=str)
def test_resumed_slabs_reach_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    """A budget ends runs within slabs; it counts what this call spends, not earlier ones."""
    options = {"steps": 3, **options}
    path = tmp_path / "run.pt"
    whole = run(**options)
    resumed = run(checkpoint=path, budget=1e-9, **options)
    calls = 1
    while "the budget" in resumed.stopped and calls < 30:
        resumed = run(checkpoint=path, budget=1e-9, **options)
        calls = calls + 1
    assert calls > 4
    assert resumed.history.loss == whole.history.loss
    resumed_state = resumed.network.state_dict()
    whole_state = whole.network.state_dict()
    assert all(torch.equal(resumed_state[k], whole_state[k]) for k in whole_state)


def test_budgets_and_callbacks_end_all_slabs() -> None:
    without_steps = run(budget=0.0)
    assert "the budget" in without_steps.stopped
    assert len(without_steps.history) == 0
    x = torch.rand(5, 2).double()
    assert without_steps(x).shape == (5, 1)
    assert "the budget of 0.001 s" in run(budget=1e-3).stopped  # and not the share of a slab
    by_callback = run(callbacks=[lambda run, info: len(run.history) == 2])
    assert len(by_callback.history) == 2
    assert "callback" in by_callback.stopped


def test_what_has_no_slabs() -> None:
    still = pde.Problem(pde.Interval(0, 1), [pde.Equation(lambda u: u.xx)])
    with pytest.raises(PullbackError, match="slabs need time"):
        pde.solve(still, pde.mlp(1, 3, 1), slabs=2)
    domain = pde.SpaceTime(pde.Interval(0, 1), (0, 1))
    fixed = pde.Problem(
        domain,
        [
            pde.Equation(lambda u: u.t),
            pde.Dirichlet(0.0, on=domain.face("x", "low")),
            pde.Initial(0.0),
        ],
    )
    with pytest.raises(PullbackError, match="as a function of the domain"):
        pde.solve(fixed, pde.mlp(2, 3, 1), slabs=2)
    for slabs in (0, -1, 1.5, ["a"], True):
        with pytest.raises(PullbackError, match="slabs= is not usable"):
            run(slabs=slabs)
    for times in ([0.5, 0.2], [0.0, 0.5], [1.0]):
        with pytest.raises(PullbackError, match="not in order"):
            run(slabs=times)


def test_slabs_end_at_given_times() -> None:
    network = run(slabs=[0.1, 0.4], steps=1).network
    assert isinstance(network, Slabs)
    assert network.edges.tolist() == pytest.approx([0, 0.1, 0.4, 1])


def rotation(time: float) -> pde.Problem:
    """A point that goes around a circle."""
    return pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, time)),
        [
            pde.Equation(lambda u, v: u.t - v, lambda u, v: v.t + u),
            pde.Initial(1.0, field="u"),
            pde.Initial(0.0, field="v"),
        ],
        fields=("u", "v"),
        exact=lambda t: (torch.cos(t), -torch.sin(t)),
    )


def automatic(problem: pde.Problem, **options: Any) -> pde.PDESolution:
    network = pde.mlp(2, 6, 2 if len(problem.fields) == 2 else 1, seed=0)
    default = {"slabs": "auto", "points": 36, "steps": 40, "tol": 1e-2, "measure": 5}
    return pde.solve(problem, network, progress=False, **{**default, **options})


@pytest.mark.slow
def test_slabs_of_one_length_where_all_is_easy() -> None:
    solution = automatic(heat(), steps=200)
    assert solution.error < 1e-2
    assert isinstance(solution.network, Slabs)
    assert len(solution.network.networks) == 1
    still = pde.solve(pde.Poisson(1), pde.mlp(1, 4, 1), slabs="auto", steps=2, progress=False)
    assert not isinstance(still.network, Slabs)


@pytest.mark.slow
def test_automatic_slabs_of_a_long_time() -> None:
    """In one piece the error stays near 1."""
    solution = automatic(rotation(6.0))
    assert solution.error < 2e-2
    network = solution.network
    assert isinstance(network, Slabs)
    assert len(network.networks) > 1
    lengths = network.edges.diff()
    assert float(network.edges[-1]) == 6.0
    assert float(lengths.min()) >= 6.0 / 16 * 0.99
    assert f"of {len(network.networks)}" in solution.stopped


def test_automatic_slabs_end_when_asked() -> None:
    asked = automatic(heat(), callbacks=[lambda run, info: True])
    assert len(asked.history) == 1
    none = automatic(heat(), budget=0.0)
    assert len(none.history) == 0
    assert none(torch.rand(5, 2).double()).shape == (5, 1)


def test_resumed_automatic_slabs_reach_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slabs that were given up are given up again, from their checkpoints."""
    options: dict[str, Any] = {"steps": 4, "tol": None, "points": 16}
    whole = automatic(rotation(6.0), **options)
    path = tmp_path / "run.pt"
    readings = count()
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: float(next(readings)))
        for _ in range(2):
            resumed = automatic(rotation(6.0), checkpoint=path, budget=5.0, **options)
            assert "the budget" in resumed.stopped
    resumed = automatic(rotation(6.0), checkpoint=path, **options)
    resumed_state = resumed.network.state_dict()
    whole_state = whole.network.state_dict()
    assert all(torch.equal(resumed_state[k], whole_state[k]) for k in whole_state)


def test_the_worst_slab_is_told_where_budgets_ended_all() -> None:
    """Later slabs inherit the errors of the first, however small their own residuals are."""
    ended = Stop(StopReason.BUDGET_SPENT, 1.0)
    verdicts = [PDEVerdict(ended, False, 1e-3, 1e-3, size) for size in (1e-2, 3e-2, 1e-6)]
    verdict = summarize_verdicts(verdicts, 3, ended=False)
    assert verdict.name == "unfinished"
    assert verdict.alarming
    assert verdict.reason == "the budget of 1 s is spent in slab 2 of 3"


def test_a_network_for_later_times_is_the_same_function() -> None:
    """Its time goes from −1 to 1 again."""
    domain = heat().domain
    plain = nn.Sequential(pde.PeriodicEmbedding(2, 0, 2.0, 2), *pde.mlp(5, 6, 1, seed=0))
    first = pde.Rescaled(pde.Symmetric(plain, 0, 1), pde.SpaceTime(pde.Interval(0, 1), (0, 0.25)))
    restricted = restrict_to_window(heat(), 0.5, 0.75, read_initial_values(first, time_axis=1))
    later = rescale_time(first, restricted, keep_function=True)
    x = restricted.domain.sample(20, "uniform", seed=1).x
    torch.testing.assert_close(later(x), first(x), rtol=1e-12, atol=1e-12)
    assert isinstance(later, pde.Rescaled)
    assert (later.low[1], later.high[1]) == (0.5, 0.75)
    fresh = rescale_time(first, restricted, keep_function=False)
    x0 = x - torch.tensor([0, 0.5])
    torch.testing.assert_close(fresh(x), first(x0))
    assert float(first.high[1]) == 0.25
    squared = pde.Rescaled(nn.Sequential(Squared(), *pde.mlp(2, 6, 1, seed=0)), domain)
    torch.testing.assert_close(rescale_time(squared, restricted, keep_function=True)(x), squared(x))


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**2


@pytest.mark.parametrize("problem", [heat, pytest.param(wave, marks=pytest.mark.slow)])
def test_error_estimates_of_slabs(problem: Any) -> None:
    """Errors of the first slab are those of the second, however well that is solved."""
    solution = pde.solve(
        problem(), pde.mlp(2, 8, 1, seed=0), slabs=2, points=64, steps=25, progress=False
    )
    estimate = solution.check().estimate
    assert estimate is not None
    assert solution.error / 2 < estimate.error < 20 * solution.error
    assert isinstance(solution.network, Slabs)
    with torch.no_grad():  # spoil the first slab alone
        next(solution.network.networks[0].parameters()).mul_(1.02)
    spoiled = solution.check().estimate
    assert spoiled is not None
    assert solution.error > 3e-3
    assert solution.error / 2 < spoiled.error < 20 * solution.error


def test_slabs_before_the_last_one_are_solved_to_a_smaller_tolerance() -> None:
    class Tolerances(SlabMarch):
        def _append_slab(self, run: Run, solution: pde.PDESolution, end: float) -> bool:
            tolerances.append(solution.verdict.stop.limit)
            return super()._append_slab(run, solution, end)

    tolerances: list[float] = []
    limits = Limits(steps=60, tol=0.5, patience=None, budget=None)
    settings = Settings(
        sampling=SamplingOptions(points=36, sampler=None, seed=0, resample=None, refine=None),
        method=MethodOptions(solver=None, step=None, gram="auto", memory=2**32, optimizer=None),
        limits=limits,
        causal=False,
        measure=1,
        callbacks=(),
        device=None,
        progress=False,
        group=None,
    )
    Tolerances(heat(), pde.mlp(2, 8, 1, seed=0), None, settings).solve(2)
    assert tolerances == pytest.approx([5e-3, 0.5])
