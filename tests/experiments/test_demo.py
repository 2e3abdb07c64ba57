"""The demonstration runs end to end, and its race is fair."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import hessian, vmap

from pullback import PullbackError
from pullback_experiments.showcase import problems
from pullback_experiments.showcase.problems import PROBLEMS, LeastSquares, PoissonTask, target
from pullback_experiments.showcase.race import run, tune


@pytest.mark.slow
def test_quick_demo_without_a_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pullback_experiments.demo", "--quick", "--out", str(tmp_path)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert outcome.returncode == 0, outcome.stderr
    titles = ("Least squares", "Poisson's equation", "Digits")
    for word in (
        *titles,
        "SGD",
        "Adam",
        "L-BFGS",
        "Natural gradient",
        "demo-quick.png",
        "poisson.png",
    ):
        assert word in outcome.stdout
    for file in ("demo-quick.png", "poisson.png", "demo-quick.json", "report.html"):
        assert (tmp_path / file).stat().st_size > 10_000
    text = (tmp_path / "report.html").read_text("utf-8")
    assert text.count("data-chart hidden") == 4
    assert outcome.stdout.rstrip().endswith("report.html")


def test_target_is_the_papers() -> None:
    x = torch.tensor([[0.5, 0.5], [1.0, 1.0]], dtype=torch.float64)
    # sin²(π/2) + sin²(3π/4) = 3/2, and sin²(π) + sin²(3π/2) = 1
    torch.testing.assert_close(target(x), torch.tensor([[1.5], [1.0]], dtype=torch.float64))


@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)
def test_contenders_start_equal_and_use_a_point_of_their_grid(make) -> None:
    problem = make()
    assert problem.measure(problem.model()) == problem.measure(problem.model())
    for contender in problem.contenders:
        if contender.grid:
            assert contender.settings in list(contender.candidates())


def test_a_curve_grows_in_time_and_steps_and_the_watcher_sees_the_end() -> None:
    problem = LeastSquares()
    shares: list[float] = []
    curve = run(
        problem,
        problem.contenders[-1],
        seconds=0.2,
        watch=lambda share, loss: shares.append(share),
    )
    assert shares[-1] == 1.0
    assert curve.seconds == sorted(curve.seconds)
    assert curve.steps == sorted(curve.steps)
    assert curve.seconds[-1] >= 0.2
    assert curve.values()[-1] < curve.values()[0]


def test_all_contenders_see_the_same_loss_of_a_pde() -> None:
    problem = PoissonTask()
    first = []
    for contender in problem.contenders:
        model = problem.model()
        first.append(problem.stepper(contender, model, contender(model))())
    # ½ mean |Δu + f|² + ½ mean u² by nested differentiation
    network = problem.model().network
    inside, boundary = (
        (problem._sites[name][0].x, problem._sites[name][0].weights)
        for name in ("equation", "dirichlet")
    )

    def u(x: Tensor) -> Tensor:
        return network(x[None])[0, 0]

    laplacian = vmap(lambda x: torch.trace(hessian(u)(x)))(inside[0])
    f = 2 * math.pi**2 * torch.sin(math.pi * inside[0]).prod(1)
    equation = (inside[1] * (laplacian + f).square()).sum() / inside[1].sum()
    edge = (boundary[1] * network(boundary[0])[:, 0].square()).sum() / boundary[1].sum()
    assert first == pytest.approx([0.5 * float((equation + edge).detach())] * 3, rel=1e-9)


def test_the_picture_of_a_pde_shows_every_contender(tmp_path: Path) -> None:
    problem = PoissonTask()
    path = problem.picture({c.name: problem.model() for c in problem.contenders}, tmp_path / "new")
    assert path.stat().st_size > 10_000
    assert LeastSquares().picture({}, tmp_path) is None


def test_a_diverging_setting_ends_last() -> None:
    problem = LeastSquares()
    sgd = problem.contenders[0]
    sgd = type(sgd)("SGD", sgd.build, grid={"lr": (1e300, 0.1)})
    ends = tune(problem, sgd, seconds=0.05)
    assert [at["lr"] for at, _ in ends] == [0.1, 1e300]
    assert math.isfinite(ends[0][1])
    assert not math.isfinite(ends[1][1])


def test_missing_scikit_learn_is_said_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PULLBACK_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(PullbackError, match="scikit-learn"):
        problems.load()
