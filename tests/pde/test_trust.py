"""Can a solution be trusted: fresh points, verdicts, checks, weights, runs that get stuck."""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import signal
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError, pde
from pullback.pde.discretization.trial import UNKNOWNS_PREFIX
from pullback.pde.judgement.estimate import SeenDirections, compute_standard_errors
from pullback.pde.judgement.stop import Stop, StopReason
from pullback.pde.judgement.verdict import PDEVerdict, find_exact_level
from pullback.pde.runs.progress import Log
from pullback.steps import TargetRatio

pi = math.pi


def poisson(scale: float = 1.0, **options: Any) -> pde.Problem:
    def equation(u: Any, x: Tensor) -> Tensor:
        return scale * (u.xx + pi**2 * torch.sin(pi * x))

    return pde.Problem(
        pde.Interval(0, 1),
        [pde.Equation(equation), pde.Dirichlet(0.0, weight=options.pop("weight", None))],
        **{"exact": lambda x: torch.sin(pi * x), **options},
    )


def run(**options: Any) -> pde.PDESolution:
    return pde.solve(
        options.pop("problem", None) or poisson(),
        options.pop("network", None) or pde.mlp(1, 6, 1, seed=1),
        **{"steps": 20, "points": 30, "progress": False, "patience": None, **options},
    )


class Wave(nn.Module):
    """a sin πx."""

    def __init__(self, amplitude: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(amplitude, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return torch.sin(pi * x) * self.a


def make_solution(problem: pde.Problem, network: nn.Module) -> pde.PDESolution:
    return pde.PDESolution(problem, network, pde.History())


def test_residuals_are_relative_to_the_terms_that_should_cancel() -> None:
    """u = 1.1 sin πx leaves −0.1π² sin πx of the terms 1.1π² sin πx and π² sin πx."""
    residuals = make_solution(poisson(), Wave(1.1)).residual
    assert residuals["equation"].rms == pytest.approx(0.1 * pi**2 / 2**0.5, rel=1e-3)
    assert residuals["equation"].relative == pytest.approx(0.1 / (1.1**2 + 1) ** 0.5, rel=1e-3)
    assert residuals["dirichlet"].size == pytest.approx(1.1 / 2**0.5, rel=1e-3)
    assert residuals["dirichlet"].relative < 1e-12
    assert residuals["equation"].affine
    nonlinear = pde.Problem(pde.Interval(0, 1), [pde.Equation(lambda u: u.x * u)])
    assert not make_solution(nonlinear, Wave(1.0)).residual["equation"].affine


def test_a_laplacian_is_sized_by_its_terms() -> None:
    """xy is harmonic: nothing cancels but second derivatives, which are zero too; x² − y² has 2."""

    class Saddle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Any) -> Any:
            return (x[:, :1] * x[:, :1] - x[:, 1:] * x[:, 1:]) * self.a

    square = pde.Box([(0, 1), (0, 1)])
    problem = pde.Problem(square, [pde.Equation(lambda u: u.laplacian)])
    residual = make_solution(problem, Saddle()).residual["equation"]
    assert residual.size == pytest.approx(8**0.5)
    assert residual.relative < 1e-12


def test_fresh_points_are_measured_and_overfitting_is_said() -> None:
    with pytest.warns(UserWarning, match="overfitted.*Use more points"):
        bad = run(points=8, steps=40, refine=None)
    assert bad.verdict.name == "overfitted"
    assert bad.verdict.fresh_loss > 10 * bad.verdict.training_loss
    assert bad.history.validated == [10, 20, 30, 40]
    assert bad.history.moved == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        good = run(steps=40)
    assert good.verdict.name == "converged"
    assert "converged" in good.stopped
    assert good.verdict.relative < 1e-4


def test_an_unfinished_answer_is_warned_of_unless_that_was_asked_for() -> None:
    with pytest.warns(UserWarning, match="unfinished: all 2 steps.*Give more steps"):
        run(steps=2)
    with pytest.warns(UserWarning, match="unfinished: the budget of 0 s"):
        none = run(budget=0.0)
    assert none.verdict.relative > 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(callbacks=[lambda run, info: True])


def test_verdicts_say_what_is_missing() -> None:
    """Residuals above 1e-8 of their terms are warned of, unless that was asked for."""
    ended = PDEVerdict(Stop(StopReason.ALL_STEPS, 9), False, 1e-9, 2e-9, 1e-5)
    assert ended.name == "converged"
    assert ended.alarming
    assert "More steps= or budget=, or a wider or deeper network would" in ended.text
    assert replace(ended, relative=2e-8).alarming
    assert not replace(ended, relative=9e-9).alarming
    assert "would" not in replace(ended, relative=9e-9).text
    falling = replace(ended, falling=0.034)
    assert "all 9 steps were taken while the loss fell by 3% a step; residuals" in falling.text
    assert "all 9 steps were taken; residuals" in replace(falling, relative=9e-9).text
    assert not replace(falling, stop=Stop(StopReason.CALLBACK)).alarming
    assert not replace(falling, stop=Stop(StopReason.TOLERANCE_REACHED, 0.1)).alarming
    stuck = replace(ended, stop=Stop(StopReason.LOSS_LEVEL, 50), stuck=True)
    assert "another may contradict it" in replace(stuck, relative=0.1, fresh_loss=1e-9).text
    assert stuck.alarming
    assert "of their terms; the error is unknown. A wider or deeper network would" in stuck.text
    single = replace(stuck, exact=find_exact_level(torch.finfo(torch.float32).eps))
    assert "A wider or deeper network in float64 would" in single.text
    exact = replace(single, relative=1.5e-6)
    assert not exact.alarming
    assert "round-off in the network's precision: network.double() gets further" in exact.text
    energy = replace(ended, relative=math.nan)
    assert energy.name == ""
    assert "no residual says how good it is. Compare two" in energy.text


def test_runs_that_end_early_say_how_fast_they_were() -> None:
    with pytest.warns(UserWarning, match="while the loss fell by"):
        solution = pde.solve(
            pde.Poisson(1), pde.mlp(1, 10, 1, seed=0), points=60, steps=30, progress=False
        )
    losses = solution.history.loss[: solution.history.settled[-1]]  # of long steps
    pace = 1 - (losses[-1] / losses[-21]) ** (1 / 20)
    assert solution.verdict.falling == pytest.approx(pace)


class Growing(nn.Module):
    """a e⁻ᵗ + b e^(10(t − 1))."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))

    def forward(self, t: Any) -> Any:
        return self.a * torch.exp(-t) + self.b * torch.exp(10 * (t - 1))


def test_small_residuals_of_an_unstable_equation_are_doubted() -> None:
    """u' = 10u − 11e⁻ᵗ: what is off by 5e-5 at first is off by 1 at last."""
    unstable = pde.Problem(
        pde.Interval(0, 1, name="t"),
        [
            pde.Equation(lambda u, t: u.t - 10 * u + 11 * torch.exp(-t)),
            pde.Dirichlet(1.0, on=lambda domain: domain.face("t", "low")),
        ],
        exact=lambda t: torch.exp(-t),
    )
    with pytest.warns(UserWarning, match=r"doubtful: .*estimated as 0\.3.*check\(against"):
        solution = run(problem=unstable, network=Growing(), steps=0)
    assert solution.verdict.relative < 1e-4
    assert solution.verdict.estimated == pytest.approx(solution.error, rel=0.2)


def test_terms_that_vanish_are_sized_by_the_field() -> None:
    """All terms of Δu = 0 are round-off at u = x; a residual of 1e-9 of its variation is small."""
    flat = pde.Problem(
        pde.Box([(0, 1), (0, 1)]),
        [pde.Equation(lambda u: u.laplacian), pde.Dirichlet(lambda x, y: x)],
    )
    network = nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[1.0, 0.0]]))
        network.bias.fill_(1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = pde.solve(flat, network, steps=0, progress=False)
    assert solution.residual["equation"].size > 1e-2
    assert solution.verdict.name == "converged"


def test_points_move_where_they_are_overfitted() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moved = run(points=8, steps=41)
    assert moved.history.moved
    assert set(moved.history.moved) <= {10, 20, 30, 40}


def test_balanced_weights() -> None:
    """An equation that is a hundred times larger wants a boundary a hundred times heavier."""
    plain, scaled = (
        run(steps=1, problem=poisson(scale, weight="balanced")) for scale in (1.0, 100.0)
    )
    assert plain.weights["equation"] == 1.0
    assert run(steps=1).weights["dirichlet"] == 1.0
    assert scaled.weights["dirichlet"] == 100 * plain.weights["dirichlet"]
    weighted = pde.Problem(
        pde.Interval(0, 1), [pde.Equation(lambda u: u.xx + 1), pde.Dirichlet(0.0, weight=3.0)]
    )
    assert run(steps=1, problem=weighted).weights["dirichlet"] == 3.0
    singular = pde.Problem(  # whose slopes are not finite
        pde.Interval(0, 1),
        [pde.Equation(lambda u, x: u.xx + 0 * u / (0 * x)), pde.Dirichlet(0.0, weight="balanced")],
    )
    with pytest.raises(PullbackError, match="not finite"):
        run(steps=1, problem=singular)


@pytest.mark.parametrize("steps", [10, 25])
def test_errors_are_estimated(steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solution = run(steps=steps)
    check = solution.check()
    assert check.estimate is not None
    assert check.estimate.affine
    assert solution.error / 3 <= check.estimate.error <= 30 * solution.error
    for word in ("equation", "dirichlet", "relative", "estimated error", "true error"):
        assert word in str(check)


def test_checks_compare_two_solutions() -> None:
    one, two = (make_solution(poisson(), Wave(a)) for a in (1.0, 1.1))
    assert one.check(against=two).difference == pytest.approx(0.1)


def test_unknowns_have_standard_errors() -> None:
    """k of k u = y with noise σ at n points, where u = 1 on the boundary: σ/√n by hand."""
    n = 400
    noise = 0.1
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 1, n).double()[:, None]
    y = 2 + noise * torch.randn(n, generator=generator, dtype=torch.float64)

    region = pde.PointSet(x, names=("x",))
    problem = pde.Problem(
        pde.Interval(0, 1),
        [pde.Equation(lambda u, k: k * u - y, on=region), pde.Dirichlet(1.0, weight=1.0)],
        unknowns={"k": float(y.mean())},
    )
    network = pde.mlp(1, 1, 1, seed=0)
    with torch.no_grad():
        for p in network.parameters():
            p.zero_()
        network.get_parameter("2.bias").fill_(1.0)
    for name, p in network.named_parameters():
        p.requires_grad_(name == "2.bias")
    solution = pde.PDESolution(problem, network, pde.History(), unknowns=problem.unknowns)
    estimate = solution.check().estimate
    assert estimate is not None
    assert estimate.spread["k"] == pytest.approx(noise / n**0.5, rel=0.1)


def test_standard_errors_of_few_data_are_right_on_average() -> None:
    """The mean variance over many noises is that of least squares, by hand, for four data."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 12, generator=generator, dtype=torch.float64)
    data = torch.randn(4, 14, generator=generator, dtype=torch.float64)
    rows = torch.cat([torch.nn.functional.pad(1e3 * rows, (2, 0)), data])
    pseudo_inverse = torch.linalg.pinv(rows)
    true = pseudo_inverse[:2, 40:].norm(dim=1)
    params = {f"{UNKNOWNS_PREFIX}{name}": torch.zeros(()) for name in "kc"}
    params["network"] = torch.zeros(12)
    directions = SeenDirections.of(rows)
    squared_errors = torch.zeros(2, dtype=torch.float64)
    for _ in range(400):
        noise = torch.zeros(44, dtype=torch.float64)
        noise[40:] = torch.randn(4, generator=generator, dtype=torch.float64)
        residuals = noise - rows @ (pseudo_inverse @ noise)
        errors = compute_standard_errors(params, directions, residuals)
        squared_errors += torch.tensor([errors[name] for name in "kc"]).double().square() / 400
    torch.testing.assert_close(squared_errors.sqrt(), true, rtol=0.1, atol=0.0)


def test_derivatives_of_solutions() -> None:
    solution = make_solution(poisson(), pde.mlp(1, 6, 1, seed=1))
    x = torch.rand(5, 1, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    (first,) = torch.autograd.grad(solution.network(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(solution.d("x")(x.detach()), first.detach())
    torch.testing.assert_close(solution.d("xx")(x.detach()), second)
    torch.testing.assert_close(solution.d("x", "x")(x.detach()), second)
    with pytest.raises(PullbackError, match="no derivative"):
        solution.d("y")
    with pytest.raises(PullbackError, match="list of points"):
        solution.d("x")(torch.rand(5, 3))


def test_saved_solutions_know_their_problem(tmp_path: Path) -> None:
    solution = run(steps=2)
    path = tmp_path / "solution.pt"
    solution.save(path)
    assert pde.PDESolution.load(path, poisson(), pde.mlp(1, 6, 1)).verdict == solution.verdict
    with pytest.raises(PullbackError, match="another run"):
        pde.PDESolution.load(path, poisson(scale=2.0), pde.mlp(1, 6, 1))


def test_solutions_pickle() -> None:
    solution = run(steps=2)
    unpickled = pickle.loads(pickle.dumps(solution))
    x = torch.rand(4, 1).double()
    assert torch.equal(unpickled(x), solution(x))
    assert torch.equal(unpickled.d("xx")(x), solution.d("xx")(x))
    assert unpickled.stopped == solution.stopped
    with pytest.raises(PullbackError, match="No solution"):
        _ = unpickled.error


def test_stuck_runs_go_on_from_kicked_parameters(tmp_path: Path) -> None:
    """Patience 2 takes any pause for a plateau. The best is kept, and resumed to the same bits."""
    options: dict[str, Any] = dict(steps=50, patience=2, points=40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = run(network=pde.mlp(1, 3, 1, seed=0), **options)
        path = tmp_path / "run.pt"
        for stop in (whole.history.restarted[0] + 2, 0):
            resumed = run(
                network=pde.mlp(1, 3, 1, seed=0),
                checkpoint=path,
                callbacks=[lambda run, info, stop=stop: len(run.history) == stop],
                **options,
            )
    assert whole.history.restarted
    assert "tries" in whole.stopped
    assert resumed.history.loss == whole.history.loss
    for a, b in zip(resumed.network.parameters(), whole.network.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_runs_settle_at_their_end(dtype: torch.dtype) -> None:
    """The last tenth of the steps is short, unless the caller says how long they are."""

    def solve_poisson(**options: Any) -> pde.PDESolution:
        network = pde.mlp(1, 10, 1, seed=0, dtype=dtype)
        return pde.solve(pde.Poisson(1), network, points=60, steps=40, progress=False, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settled = solve_poisson()
        unsettled = solve_poisson(step=TargetRatio())
    assert settled.history.settled == [36]
    assert unsettled.history.settled == []
    assert settled.history.loss[:36] == unsettled.history.loss[:36]
    assert settled.error < unsettled.error / 20
    assert next(settled.network.parameters()).dtype == dtype


def test_a_dense_gram_is_announced() -> None:
    with pytest.warns(UserWarning, match="memory= allows.*half of the digits"):
        run(steps=1, memory=4000)


def test_a_terminated_run_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"

    def terminate(run: Any, info: Any) -> None:
        if len(run.history) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        run(checkpoint=path, callbacks=[terminate])
    assert left.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert len(run(checkpoint=path, steps=6).history) == 6


def test_plain_lines_and_forecasts() -> None:
    file = io.StringIO()
    log = Log(file, "Poisson", 400)
    log(1, loss=1.0, fresh=math.nan)
    log.forecast(399, 0.01, math.inf, 0)
    assert file.getvalue() == ""
    log.forecast(399, 2.0, math.inf, 2**30)
    assert file.getvalue() == "Poisson: 399 steps of 2 s: about 13 min, 1 GiB for the Jacobian\n"
    log.forecast(399, 2.0, 60.0, 0)
    assert file.getvalue().endswith("about 13 min, of which the budget allows about 30\n")


def test_a_run_says_what_it_will_take(capsys: pytest.CaptureFixture[str]) -> None:
    """Time and memory, after the first step; slabs say so one by one."""
    options: Any = {"steps": 10**6, "points": 16, "callbacks": [lambda run, info: True]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pde.solve(pde.Heat(1), pde.mlp(2, 3, 1, seed=0), slabs=2, **options)
    said = capsys.readouterr().err
    assert "Heat 1+1D, t = 0 to 0.5: 999999 steps of" in said
    assert "GiB for the Jacobian" in said


def test_slabs_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has half of it, since its parameters are random, and the others share the rest."""
    seconds_per_step = 1 / 64  # sums of it are exact
    readings = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: seconds_per_step * next(readings))
    steps_by_start: Counter[float] = Counter()

    def count_step(run: pde.Run, info: Any) -> bool:
        assert isinstance(run.problem.domain, pde.SpaceTime)
        steps_by_start[run.problem.domain.time[0]] += 1
        return False

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solution = pde.solve(
            pde.Heat(1),
            pde.mlp(2, 4, 1, seed=0),
            points=36,
            slabs=3,
            budget=12 * seconds_per_step,
            steps=10_000,
            patience=None,
            callbacks=[count_step],
            progress=False,
        )
    networks = solution.network.networks
    assert isinstance(networks, nn.ModuleList)
    assert len(networks) == 3
    ends = [torch.cat([p.flatten() for p in n.parameters()]) for n in networks]
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[1], ends[2])
    assert [steps_by_start[start] for start in sorted(steps_by_start)] == [6, 3, 3]
    assert "the budget" in solution.stopped


def test_a_network_for_a_problem() -> None:
    for problem in (pde.Poisson(5), pde.Kovasznay(), pde.Poisson(1)):
        network = pde.network_for(problem, seed=0)
        out = network(problem.domain.sample(3).x)
        assert out.shape == (3, len(problem.fields))


LINE = pde.Interval(0, 1)
START = LINE.face("x", "low")


@pytest.mark.parametrize(
    "conditions",
    [
        [pde.Equation(lambda u: u.xx + 1), pde.Dirichlet(0.0, on=START)],
        pytest.param(
            [pde.Equation(lambda u, x: u.xx + pi**2 * torch.cos(pi * x)), pde.Neumann(0.0)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one end", "slopes alone"],
)
def test_a_missing_condition_is_noticed(conditions: list[Any]) -> None:
    problem = pde.Problem(LINE, conditions)
    with pytest.warns(UserWarning, match=r"doubtful: .*do not determine the solution.*missing"):
        solution = pde.solve(problem, pde.mlp(1, 10, 1, seed=0), steps=60, points=100)
    assert solution.verdict.relative < 1e-4
    assert solution.verdict.estimated == math.inf
    assert "estimated error: not determined by the conditions" in str(solution.check())


@pytest.mark.parametrize("known", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_unknowns_of_which_only_a_ratio_matters_are_noticed(known: bool) -> None:
    x = torch.linspace(0, 1, 20, dtype=torch.float64)
    if known:
        k = {}
    else:
        k = {"k": 0.7}

    def equation(u: Any, x: Tensor, c: Tensor, k: Any = 0.7) -> Tensor:
        return k * u.xx + c * pi**2 * torch.sin(pi * x)

    def without_k(u: Any, x: Tensor, c: Tensor) -> Tensor:
        return equation(u, x, c)

    law = without_k if known else (lambda u, x, c, k: equation(u, x, c, k))
    conditions = [pde.Equation(law), pde.Dirichlet(0.0), pde.Data(x, torch.sin(pi * x) / 2)]
    problem = pde.Problem(LINE, conditions, unknowns={"c": 1.3, **k})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        solution = pde.solve(problem, pde.mlp(1, 10, 1, seed=0), steps=60, points=100)
    spread = solution.check().estimate.spread  # pyright: ignore[reportOptionalMemberAccess]
    assert solution.verdict.loose == (() if known else ("c", "k"))
    assert [v == math.inf for v in spread.values()] == [not known] * len(spread)
    assert any("do not determine c and k" in str(w.message) for w in said) is not known
    assert (", not determined by the conditions" in str(solution.check())) is not known
    if known:
        assert abs(solution.unknowns["c"] - 0.35) < 1e-6


def relaxation(t: Tensor, rate: float, source: float) -> Tensor:
    """Return the solution of u' = source − rate·u, u(0) = 1."""
    return source / rate + (1 - source / rate) * torch.exp(-rate * t)


def test_standard_errors_of_two_unknowns_are_those_of_the_exact_model() -> None:
    count = 60
    noise = 0.01
    t = torch.linspace(0, 1, count, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    values = relaxation(t, 2.0, 1.0)
    values = values + noise * torch.randn(count, generator=generator, dtype=torch.float64)
    problem = pde.Problem(
        pde.Interval(0, 1, name="t"),
        [
            pde.Equation(lambda u, k, c: u.t + k * u - c),
            pde.Dirichlet(1.0, on=lambda domain: domain.face("t", "low")),
            pde.Data(t, values),
        ],
        unknowns={"k": 1.0, "c": 0.5},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solution = pde.solve(
            problem, pde.mlp(1, 6, 1, seed=0), points=80, steps=40, patience=None, progress=False
        )
    estimate = solution.check().estimate
    assert estimate is not None
    truth = torch.tensor([2.0, 1.0], dtype=torch.float64)

    def predict(unknowns: Tensor) -> Tensor:
        return relaxation(t, unknowns[0], unknowns[1])  # pyright: ignore[reportArgumentType]

    jacobian = torch.autograd.functional.jacobian(predict, truth)
    assert isinstance(jacobian, Tensor)
    bound = noise * torch.linalg.inv(jacobian.T @ jacobian).diagonal().sqrt()
    spread = torch.tensor([estimate.spread["k"], estimate.spread["c"]], dtype=torch.float64)
    torch.testing.assert_close(spread, bound, rtol=0.3, atol=0.0)
    unknowns = [solution.unknowns["k"], solution.unknowns["c"]]
    distance = torch.tensor(unknowns, dtype=torch.float64) - truth
    assert bool((distance.abs() < 3 * bound).all())
