"""Solving: problems of many kinds, and runs that can be repeated, stopped, resumed and saved."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError, pde
from pullback.optim import NaturalGradient
from pullback.pde.judgement.history import History
from pullback.pde.judgement.yardstick import Yardstick
from pullback.pde.runs.run_file import RunFile

pi = math.pi
Case = tuple[pde.Problem, nn.Module, dict[str, Any]]
SQUARE = pde.Box([(0, 1), (0, 1)])


# --- problems of many kinds --------------------------------------------------------------------


def beam() -> Case:
    """A simply supported beam: fourth derivatives."""
    problem = pde.Problem(
        pde.Interval(0, 1),
        [
            pde.Equation(lambda u, x: u.xxxx / pi**4 - torch.sin(pi * x)),
            pde.Dirichlet(0.0),
            pde.Equation(lambda u: u.xx / pi**2, on=lambda d: d.boundary, name="moment"),
        ],
        exact=lambda x: torch.sin(pi * x),
    )
    return problem, pde.mlp(1, 10, 1, seed=0), dict(points=50)


def helmholtz() -> Case:
    def exact(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(2 * x) * torch.cos(1.5 * y)

    problem = pde.Problem(
        pde.Disk((0.0, 0.0), 1.0),
        [pde.Equation(lambda u: u.laplacian + 6.25 * u), pde.Dirichlet(exact)],
        exact=exact,
    )
    return problem, pde.mlp(2, 20, 1, seed=0), dict(points=144)


def advection() -> Case:
    """Advection–diffusion with Robin conditions."""

    def exact(x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(x) * torch.sin(y)

    def flux(x: Tensor, y: Tensor, normals: Tensor) -> Tensor:
        slope = normals[:, 0] * exact(x, y) + normals[:, 1] * torch.exp(x) * torch.cos(y)
        return exact(x, y) + 0.5 * slope

    def equation(u: Any, x: Tensor, y: Tensor) -> Tensor:
        source = torch.exp(x) * (torch.sin(y) + 2 * torch.cos(y))
        return u.x + 2 * u.y - 0.5 * u.laplacian - source

    problem = pde.Problem(SQUARE, [pde.Equation(equation), pde.Robin(1.0, 0.5, flux)], exact=exact)
    return problem, pde.mlp(2, 16, 1, seed=0), dict(points=144)


def oscillator() -> Case:
    """Two ordinary differential equations."""
    start = {"on": lambda d: d.face("t", "low")}
    problem = pde.Problem(
        pde.Interval(0, 2, name="t"),
        [
            pde.Equation(lambda u, v: u.t - v, lambda u, v: v.t + 4 * u),
            pde.Dirichlet(1.0, field="u", **start),
            pde.Dirichlet(0.0, field="v", **start),
        ],
        fields=("u", "v"),
        exact=lambda t: (torch.cos(2 * t), -2 * torch.sin(2 * t)),
    )
    return problem, pde.mlp(1, 14, 2, seed=0), dict(points=50)


def nonlinear() -> Case:
    def exact(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(x) * torch.cos(y)

    def equation(u: Any, x: Tensor, y: Tensor) -> Tensor:
        return u.laplacian - u**3 + 2 * exact(x, y) + exact(x, y) ** 3

    problem = pde.Problem(SQUARE, [pde.Equation(equation), pde.Dirichlet(exact)], exact=exact)
    return problem, pde.mlp(2, 16, 1, seed=0), dict(points=144)


def neumann() -> Case:
    """Determined up to a constant."""

    def exact(x: Tensor, y: Tensor) -> Tensor:
        return torch.cos(pi * x) * torch.cos(pi * y)

    problem = pde.Problem(
        SQUARE,
        [pde.Equation(lambda u, x, y: u.laplacian + 2 * pi**2 * exact(x, y)), pde.Neumann(0.0)],
        free=("u",),
        exact=exact,
    )
    return problem, pde.mlp(2, 20, 1, seed=0), dict(points=196)


def inverse() -> Case:
    """A coefficient from measurements."""
    x = torch.linspace(0.1, 0.9, 9).double()
    problem = pde.Problem(
        pde.Interval(0, 1),
        [
            pde.Equation(lambda u, k, x: (k * u.xx + pi**2 * torch.sin(pi * x)) / pi**2),
            pde.Dirichlet(0.0),
            pde.Data(x, torch.sin(pi * x) / 2),
        ],
        unknowns={"k": 0.5},
        exact=lambda x: torch.sin(pi * x) / 2,
    )
    return problem, pde.mlp(1, 10, 1, seed=0), dict(points=40, target=1e-4)


def ritz() -> Case:
    """An energy with a hard constraint; Gauss points integrate it exactly enough."""
    line = pde.Interval(0, 1)
    problem = pde.Problem(
        line,
        [pde.Energy(lambda u, x: 0.5 * u.x**2 - pi**2 * torch.sin(pi * x) * u)],
        exact=lambda x: torch.sin(pi * x),
    )
    network = pde.Hard(pde.mlp(1, 10, 1, seed=0), line, distance=lambda x: x * (1 - x))
    return problem, network, dict(points=60, sampler="gauss", target=1e-3)


def heat_with_periodic_embedding() -> Case:
    domain = pde.SpaceTime(pde.Interval(0, 1), (0, 0.5))
    problem = pde.Problem(
        domain,
        [
            pde.Equation(lambda u: u.t - 0.05 * u.xx),
            pde.Initial(lambda x: torch.sin(2 * pi * x)),
        ],
        exact=lambda x, t: torch.exp(-0.2 * pi**2 * t) * torch.sin(2 * pi * x),
    )
    network = nn.Sequential(pde.PeriodicEmbedding(2, 0, 1.0), pde.mlp(3, 14, 1, seed=0))
    return problem, network, dict(points=144)


CASES = [
    *(advection, heat_with_periodic_embedding),
    *(
        pytest.param(c, marks=pytest.mark.slow)  # docs/pdes.md solves the first two
        for c in (inverse, ritz, beam, neumann, helmholtz, oscillator, nonlinear)
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_problems_are_solved(case: Callable[[], Case]) -> None:
    problem, network, options = case()
    target = options.pop("target", 1e-2)
    solution = pde.solve(
        problem, network, steps=250, tol=target, measure=5, progress=False, **options
    )
    assert solution.error <= target, solution
    assert not solution.nested
    if problem.unknowns:
        assert solution.unknowns["k"] == pytest.approx(2.0, rel=1e-3)


def reaction_diffusion() -> Case:
    def u_(x: Tensor, t: Tensor) -> Tensor:
        return torch.exp(-t) * torch.cos(pi * x)

    def v_(x: Tensor, t: Tensor) -> Tensor:
        return 1 + t * torch.cos(pi * x)

    def one(u: Any, v: Any, x: Tensor, t: Tensor) -> Tensor:
        return u.t - 0.1 * u.xx - u * v + u_(x, t) * (1 - 0.1 * pi**2 + v_(x, t))

    def two(u: Any, v: Any, x: Tensor, t: Tensor) -> Tensor:
        source = torch.cos(pi * x) * (1 + 0.1 * pi**2 * t) + u_(x, t) * v_(x, t)
        return v.t - 0.1 * v.xx + u * v - source

    problem = pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 1)),
        [
            pde.Equation(one, two),
            *(pde.Neumann(0.0, field=f) for f in "uv"),
            pde.Initial(lambda x: torch.cos(pi * x), field="u"),
            pde.Initial(1.0, field="v"),
        ],
        fields=("u", "v"),
        exact=lambda x, t: (u_(x, t), v_(x, t)),
    )
    return problem, pde.mlp(2, 12, 12, 2, seed=0), dict(points=225)


def hole() -> Case:
    """A square minus a disk."""

    def exact(x: Tensor, y: Tensor) -> Tensor:
        return torch.log((x - 0.5) ** 2 + (y - 0.5) ** 2)

    problem = pde.Problem(
        SQUARE - pde.Disk((0.5, 0.5), 0.25),
        [pde.Equation(lambda u: u.laplacian), pde.Dirichlet(exact, weight=10.0)],
        exact=exact,
    )
    return problem, pde.mlp(2, 16, 16, 1, seed=0), dict(points=400, target=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", [reaction_diffusion, hole], ids=lambda c: c.__name__)
def test_larger_problems_are_solved(case: Callable[[], Case]) -> None:
    problem, network, options = case()
    target = options.pop("target", 1e-5)
    solution = pde.solve(problem, network, steps=600, tol=target, progress=False, **options)
    assert solution.error <= target, solution


# --- runs ----------------------------------------------------------------------------------------


def poisson(**options: Any) -> pde.Problem:
    return pde.Problem(
        pde.Interval(0, 1),
        [pde.Equation(lambda u, x: u.xx + pi**2 * torch.sin(pi * x)), pde.Dirichlet(0.0)],
        **{"exact": lambda x: torch.sin(pi * x), **options},
    )


def small(**options: Any) -> nn.Module:
    return pde.mlp(1, 6, 1, seed=1, **options)


def run(network: nn.Module | None = None, **options: Any) -> pde.PDESolution:
    return pde.solve(
        options.pop("problem", None) or poisson(),
        small() if network is None else network,
        **{"steps": 12, "points": 30, "progress": False, "patience": None, **options},
    )


def vector(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


REFINE = pde.Refine(every=3)
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "resample": {"resample": 3},
    "refine": {"refine": REFINE},
    "both": {"resample": 5, "refine": pde.Refine(every=2)},
    "sketched": {"solver": None},
    "unknown": {},
}


def problem_for(name: str) -> pde.Problem:
    if name != "unknown":
        return poisson()
    x = torch.linspace(0, 1, 5).double()
    return pde.Problem(
        pde.Interval(0, 1),
        [pde.Equation(lambda u, k: k * u.xx + 1), pde.Data(x, x * (1 - x))],
        unknowns={"k": 1.0},
    )


@pytest.mark.parametrize(
    "schedule",
    [
        *("both", "sketched"),
        *(
            pytest.param(s, marks=pytest.mark.slow)
            for s in ("plain", "unknown", "resample", "refine")
        ),
    ],
)
def test_resumed_runs_reach_the_same_bits(schedule: str, tmp_path: Path) -> None:
    options = {**SCHEDULES[schedule], "steps": 9}
    whole = run(problem=problem_for(schedule), **options)
    path = tmp_path / "run.pt"
    first = run(problem=problem_for(schedule), checkpoint=path, **{**options, "steps": 6})
    assert len(first.history) == 6
    resumed = run(problem=problem_for(schedule), checkpoint=path, **options)
    assert resumed.history.loss == whole.history.loss
    assert torch.equal(vector(resumed.network), vector(whole.network))
    assert resumed.unknowns == whole.unknowns
    assert len(resumed.history.seconds) == 9


@pytest.mark.parametrize("schedule", ["both", "refine"])
def test_interrupted_steps_are_repeated(schedule: str, tmp_path: Path) -> None:
    """A key pressed in the middle of a step, after its points were moved."""
    options = SCHEDULES[schedule]
    path = tmp_path / "run.pt"
    step = NaturalGradient.step
    options = {**options, "steps": 9}
    whole = run(**options)
    calls = 0

    def interrupt(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NaturalGradient, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(checkpoint=path, **options)
    assert path.exists()
    resumed = run(checkpoint=path, **options)
    assert resumed.history.loss == whole.history.loss
    assert torch.equal(vector(resumed.network), vector(whole.network))


def test_budgets(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    whole = run(steps=4)
    resumed = run(steps=4, checkpoint=path, budget=1e-9)
    calls = 1
    while "the budget" in resumed.stopped and calls < 10:
        resumed = run(steps=4, checkpoint=path, budget=1e-9)
        calls = calls + 1
    assert calls > 2
    assert "all 4 steps were taken" in resumed.stopped
    assert torch.equal(vector(resumed.network), vector(whole.network))
    none = run(budget=0.0)
    assert "the budget" in none.stopped
    assert len(none.history) == 0


def test_seeds_and_global_random_numbers() -> None:
    torch.manual_seed(0)
    one = run(sampler="uniform")
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    two = run(sampler="uniform")
    assert torch.equal(torch.random.get_rng_state(), state)
    other = run(sampler="uniform", seed=1)
    assert torch.equal(vector(one.network), vector(two.network))
    assert not torch.equal(vector(one.network), vector(other.network))


def test_stops() -> None:
    assert "all 0 steps were taken" in run(steps=0).stopped
    assert torch.equal(vector(run(steps=0).network), vector(small()))
    tolerant = run(steps=100, tol=1e-2)
    assert "tolerance" in tolerant.stopped
    assert tolerant.error <= 1e-2
    unknown = run(steps=200, tol=1e-3, problem=poisson(exact=None))
    assert "tolerance" in unknown.stopped
    assert unknown.loss <= 1e-3
    assert unknown.history.error == []
    errors: list[float] = []
    run(problem=poisson(exact=None), steps=1, callbacks=[lambda r, info: errors.append(r.error)])
    assert math.isnan(errors[0])
    patient = run(steps=400, patience=3, points=8, refine=None)
    reasons = ("1 %", "could not lower", "round-off is reached")
    assert any(reason in patient.stopped for reason in reasons)
    asked = run(callbacks=[lambda run, info: len(run.history) == 5])
    assert len(asked.history) == 5
    assert "callback" in asked.stopped


def test_callbacks_see_the_run() -> None:
    steps = []
    run(steps=4, callbacks=[lambda run, info: steps.append((info.loss, run.error, run.unknowns))])
    assert len(steps) == 4
    losses = [s[0] for s in steps]
    assert losses == sorted(losses, reverse=True)


def test_history() -> None:
    solution = run(measure=5)
    history = solution.history
    assert len(history) == len(history.damping) == len(history.accepted) == 12
    assert history.measured == [0, 5, 10, 12]
    assert history.seconds == sorted(history.seconds)
    assert history.clock[0] == 0.0
    assert history.error[-1] == pytest.approx(solution.error, rel=1e-12)
    assert history.seconds_to(1e9) == 0.0
    assert history.seconds_to(0.0) is None
    assert History.from_dict(history.as_dict()) == history
    twice = history.join(history)
    assert len(twice) == 24
    assert twice.measured[-1] == 24
    assert twice.seconds == sorted(twice.seconds)


def test_save_and_load(tmp_path: Path) -> None:
    solution = run()
    solution.save(tmp_path / "deep" / "solution.pt")
    loaded = pde.PDESolution.load(tmp_path / "deep" / "solution.pt", poisson(), pde.mlp(1, 6, 1))
    x = torch.rand(5, 1).double()
    assert torch.equal(loaded(x), solution(x))
    assert loaded.error == solution.error
    assert loaded.history == solution.history
    assert loaded.stopped == solution.stopped
    assert loaded.spectrum is not None
    assert solution.spectrum is not None
    assert torch.equal(loaded.spectrum, solution.spectrum)
    assert "12 steps" in repr(loaded)
    with pytest.raises(PullbackError, match="another run"):
        pde.PDESolution.load(tmp_path / "deep" / "solution.pt", poisson(name="other"), small())
    with pytest.raises(PullbackError, match="another network"):
        pde.PDESolution.load(tmp_path / "deep" / "solution.pt", poisson(), pde.mlp(1, 7, 1))


def test_the_spectrum_is_that_of_the_residuals() -> None:
    solution = run(steps=3)
    assert solution.spectrum is not None
    assert solution.spectrum.shape == (19,)
    assert bool((solution.spectrum >= 0).all())


def test_points_of_a_run_are_not_rounded() -> None:
    """The last steps of a float32 network are in float64, at unrounded points."""
    started = []
    third = pde.Problem(
        pde.Interval(0.1, 1 / 3),
        [pde.Equation(lambda u: u.xx), pde.Dirichlet(0.0)],
    )

    def note(run: Any, info: Any) -> None:
        started.append(run._collocation.objective.terms[1].map.x.double().flatten().tolist())

    run(small(dtype=torch.float32), problem=third, steps=10, callbacks=[note])
    assert started[0] != [0.1, 1 / 3]
    assert started[-1] == [0.1, 1 / 3]


def test_float32_networks() -> None:
    solution = run(small(dtype=torch.float32), steps=30)
    assert solution.error <= 2e-2
    assert next(solution.network.parameters()).dtype == torch.float32


def test_activations_without_rules_are_nested_and_said() -> None:
    network = pde.mlp(1, 6, 1, activation=nn.ELU, seed=0)
    with pytest.warns(UserWarning, match="nested automatic differentiation.*elu"):
        nested = run(network, steps=5)
    assert "elu" in nested.nested
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Derivatives are nested")
        assert run(steps=2).nested == ""


class Opaque(nn.Tanh):
    """tanh by an operation that jets do not know."""

    def forward(self, input: Tensor) -> Tensor:
        return 1 - 2 / (torch.exp(torch.mul(input, 2).clamp(-50, 50)) + 1)


def test_nested_derivatives_take_the_same_steps() -> None:
    plain = run(steps=6)
    with pytest.warns(UserWarning, match="clamp"):
        slow = run(pde.mlp(1, 6, 1, activation=Opaque, seed=1), steps=6)
    torch.testing.assert_close(
        torch.tensor(slow.history.loss), torch.tensor(plain.history.loss), rtol=1e-5, atol=1e-8
    )


def test_frozen_parameters_stay() -> None:
    network = small()
    network.get_parameter("0.weight").requires_grad_(False)
    before = {n: p.detach().clone() for n, p in network.named_parameters()}
    run(network, steps=4)
    moved = {n for n, p in network.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"0.bias", "2.weight", "2.bias"}


def test_modes_of_the_network_are_left_alone() -> None:
    network = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    network.eval()
    assert not run(network, steps=2).nested
    assert not network.training


def test_points_by_condition_and_several_samplers() -> None:
    for sampler in ("grid", "gauss", "sobol", "lhs", "uniform", pde.Grid()):
        solution = run(steps=2, sampler=sampler, points={"equation": 20})
        assert len(solution.history) == 2


def test_errors_of_fields() -> None:
    """‖u − u*‖/‖u*‖ per field and together, means left out of free fields."""
    line = pde.Interval(0, 1)
    problem = pde.Problem(
        line,
        [pde.Equation(lambda u, p: u.x + p)],
        fields=("u", "p"),
        free=("p",),
        exact=lambda x: (x, x**2),
    )
    x = torch.linspace(0, 1, 3).double()[:, None]

    def network(x: Tensor) -> Tensor:
        return torch.cat([x * 1.1, x**2 + 5], 1)

    yardstick = Yardstick(problem, x)
    errors = yardstick.errors(network)
    assert errors["u"] == pytest.approx(0.1)
    assert errors["p"] == pytest.approx(0.0, abs=1e-12)
    u = 1 / 3
    p = 1 / 5 - 1 / 9
    assert yardstick.error(network) == pytest.approx((0.01 * u / (u + p)) ** 0.5)


def test_checkpoints_are_written_now_and_then(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(RunFile, "seconds_between", 0.0)
    path = tmp_path / "run.pt"
    file_exists = []
    run(steps=3, checkpoint=path, callbacks=[lambda run, info: file_exists.append(path.exists())])
    assert file_exists == [False, True, True]


def test_any_of_torchs_optimizers_takes_the_losss_gradient(tmp_path: Path) -> None:
    """Plain gradient descent, by hand; and a run that goes on from its checkpoint."""
    problem = pde.Poisson(dim=1)
    start = pde.mlp(1, 6, 1, seed=0)
    options: dict[str, Any] = dict(points=30, progress=False, patience=None)

    def adam(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(module.parameters(), lr=1e-2)

    before = {n: p.detach().clone() for n, p in start.named_parameters()}
    x = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None]
    values = start(x).detach()
    once = pde.solve(
        problem,
        start,
        steps=1,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), 1e-3),
        **options,
    )
    moved = {n: (before[n] - p.detach()) / 1e-3 for n, p in start.named_parameters()}
    slope = sum(float((g * g).sum()) for g in moved.values())
    assert not torch.equal(start(x).detach(), values)
    # the loss falls by lr·|∇L|² to first order
    assert math.isclose((once.history.loss[0] - once.loss) / 1e-3, slope, rel_tol=0.2)

    whole = pde.solve(problem, pde.mlp(1, 6, 1, seed=0), steps=8, optimizer=adam, **options)
    path = tmp_path / "run.pt"
    for steps in (3, 8):
        resumed = pde.solve(
            problem, pde.mlp(1, 6, 1, seed=0), steps=steps, optimizer=adam, checkpoint=path,
            **options,
        )  # fmt: skip
    assert resumed.history.loss == whole.history.loss
    assert whole.history.loss[-1] < whole.history.loss[0]
