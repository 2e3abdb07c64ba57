"""Pictures of solutions: what is shown, written, and left alone."""

from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure

from pullback import PullbackError, pde


def solve_quickly(problem: pde.Problem, *, steps: int = 2, points: int = 36) -> pde.PDESolution:
    network = pde.mlp(problem.domain.dim, 6, len(problem.fields), seed=0)
    if isinstance(problem, pde.Ready):
        network = problem.wrap(network)
    return pde.solve(problem, network, steps=steps, points=points, progress=False)


def titles(figure: Figure) -> list[str]:
    return [t for a in figure.axes if (t := a.get_title("left"))]


CASES: dict[str, tuple[Any, list[str]]] = {
    "1D, an energy": (pde.Ritz1D, ["u", "|u", "relative", "loss above"]),
    "2D": (lambda: pde.Poisson(2), ["u", "|u", "relative", "loss", "singular"]),
    "1+1": (pde.Heat, ["u", "|u", "relative", "loss", "singular"]),
    "5D": (
        lambda: pde.Poisson(5),
        ["u at x3 = 0.5, x4 = 0.5, x5 = 0.5", "|u", "rel", "loss", "si"],
    ),
    "10D": (
        lambda: pde.Poisson(10),
        ["u on a slice: x3, …, x10", "|u", "relative", "loss", "sing"],
    ),
    "three fields": (pde.Kovasznay, ["u", "|u", "v", "|v", "p", "|p", "relative", "loss", "sing"]),
}


@pytest.mark.parametrize(("make", "starts"), CASES.values(), ids=CASES)
def test_panels(make: Any, starts: list[str]) -> None:
    shown = titles(solve_quickly(make()).plot())
    assert len(shown) == len(starts)
    assert all(t.startswith(s) for t, s in zip(shown, starts, strict=True)), shown


def test_a_file_in_a_new_folder(tmp_path: Path) -> None:
    solve_quickly(pde.Ritz1D()).plot(tmp_path / "new" / "picture.png")
    assert (tmp_path / "new" / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_unknown_solution_and_a_curved_domain(tmp_path: Path) -> None:
    """Without a truth there is no error panel; outside of a disk nothing is drawn."""
    problem = pde.Problem(pde.Disk(), [pde.Equation(lambda u: u.laplacian + 1), pde.Dirichlet()])
    figure = solve_quickly(problem).plot(tmp_path / "disk.svg")
    assert titles(figure)[:2] == ["u", "loss"]
    shown = figure.axes[0].images[0].get_array()
    assert shown.mask[0, 0]
    assert not shown.mask[100, 100]
    assert "<svg" in (tmp_path / "disk.svg").read_text()


def test_no_steps_and_float32() -> None:
    problem = pde.Poisson(2)
    network = pde.mlp(2, 4, 1, seed=0, dtype=torch.float32)
    solution = pde.solve(problem, network, steps=0, progress=False)
    shown = titles(solution.plot())
    assert [t.split()[0] for t in shown] == ["u", "|u", "relative"]


def test_an_exact_solution_has_no_error_to_show() -> None:
    """All errors are 0, which has no logarithm."""
    problem = pde.Problem(
        pde.Interval(0, 1),
        [pde.Equation(lambda u: u.xx), pde.Dirichlet()],
        exact=lambda x: 0 * x,
    )
    network = pde.mlp(1, 3, 1, seed=0)
    for p in network.parameters():
        torch.nn.init.zeros_(p)
    solution = pde.PDESolution(problem, network, pde.History())
    assert titles(solution.plot()) == ["u", "|u − exact|, at most 0.0e+00"]


def test_pressure_is_moved_onto_the_truth() -> None:
    """A field known up to a constant has no error from the constant."""
    problem = pde.Kovasznay()
    network = pde.mlp(2, 4, 3, seed=0)
    last = network[-1]
    assert isinstance(last, torch.nn.Linear)
    before = titles(pde.PDESolution(problem, network, pde.History()).plot())
    with torch.no_grad():
        last.bias[2] += 100
    after = titles(pde.PDESolution(problem, network, pde.History()).plot())
    assert before[5] == after[5]


def test_settings_of_matplotlib_are_left_alone() -> None:
    before = dict(matplotlib.rcParams)
    backend = matplotlib.rcParams._get_backend_or_none()  # pyright: ignore[reportAttributeAccessIssue]
    with matplotlib.rc_context({"figure.facecolor": "black"}):
        figure = solve_quickly(pde.Ritz1D(), steps=2).plot()
        assert matplotlib.rcParams["figure.facecolor"] == "black"
    assert figure.get_facecolor() == (1, 1, 1, 1)
    assert dict(matplotlib.rcParams) == before
    assert matplotlib.rcParams._get_backend_or_none() == backend  # pyright: ignore[reportAttributeAccessIssue]


def test_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PullbackError, match=r"\.png"):
        solve_quickly(pde.Ritz1D(), steps=0).plot(tmp_path / "picture.jpg")
