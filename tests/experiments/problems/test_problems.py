"""Problems with computed references: wrapped networks, set-ups, short solves and refusals."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pullback import PullbackError, pde
from pullback.maps.jets import Jet, Scheme
from pullback.pde.catalog.ready import Ready
from pullback.solvers import Cholesky
from pullback.steps import LevenbergMarquardt
from pullback_experiments import problems
from pullback_experiments.problems.periodic import smoothed_kink
from pullback_experiments.problems.setups import OURS
from tests.pde.residuals import assert_fits, assert_hard

#: the hard variant and the soft one
HARD: dict[str, tuple[Callable[..., Ready], dict[str, Any]]] = {
    "allen-cahn": (problems.AllenCahn, {}),
    "allen-cahn 1e-2": (problems.AllenCahn, {"diffusion": 1e-2}),
    "kdv": (problems.KdV, {}),
    "cavity": (problems.Cavity, {}),
}


@pytest.mark.parametrize(("make", "options"), HARD.values(), ids=HARD)
def test_wrapped_network_satisfies_what_is_not_in_the_loss(
    make: Callable[..., Ready], options: dict[str, Any]
) -> None:
    assert_hard(make, options)


@pytest.mark.parametrize("name", OURS)
def test_setups_fit_their_networks(name: str) -> None:
    assert pde.SETUPS[name] is OURS[name]
    assert_fits(problems.setup(name))


def test_smoothed_kink_is_smooth_across_the_period() -> None:
    """Built in, x² cos πx is three times differentiable at x = ±1 for t > 0, and starts right."""
    problem = problems.AllenCahn(1e-3, hard=True)
    network = problem.wrap(pde.mlp(3, 6, 1, seed=2))
    t = torch.tensor([1e-6, 1e-3, 0.3, 1.0], dtype=torch.float64)
    scheme = Scheme.of([(0,), (0, 0), (0, 0, 0)])
    left, right = (
        network(Jet.input(torch.stack([torch.full_like(t, e), t], -1), scheme)).stack_channels()
        for e in (-1.0, 1.0)
    )
    scale = left.abs().amax((1, 2), keepdim=True) + 1
    assert ((left - right).abs() / scale).max() < 1e-9
    x = torch.linspace(-1, 1, 21, dtype=torch.float64)
    at_start = network(torch.stack([x, torch.zeros_like(x)], -1))[:, 0]
    torch.testing.assert_close(at_start, x**2 * torch.cos(torch.pi * x), rtol=0, atol=1e-13)


def test_smoothed_kink_is_the_heat_equations() -> None:
    """The kink's part solves w_t = D w_xx − decay·w up to smooth terms of size D."""
    x = 1 - torch.logspace(-6, -2, 30, dtype=torch.float64)
    scheme = Scheme.of([(1,), (0, 0)])
    at = Jet.input(torch.stack([x, torch.full_like(x, 0.01)], -1), scheme)
    x = at[:, :1]
    gap = 1 - x  # the other end is far away
    near = (2 * gap + (50 - math.pi**2) * gap**3) * torch.exp(-25 * gap**2)
    remainder = x**2 * torch.cos(math.pi * x) - near
    for decay in (0.0, 10.0):
        jet = (smoothed_kink(x, at[:, 1:], 1e-4, decay) - remainder).stack_channels()
        w, w_t, w_xx = (jet[scheme.position[i], :, 0] for i in ((), (1,), (0, 0)))
        left = w_t - 1e-4 * w_xx + decay * w
        # nearly constant in a layer where w_t falls by a factor 40
        assert (left - left[0]).abs().max() < 1e-2 * (w_t - w_t[-1]).abs().max()


@pytest.mark.parametrize(
    "make", [problems.KuramotoSivashinsky, pytest.param(problems.GrayScott, marks=pytest.mark.slow)]
)
def test_a_short_time_is_solved_in_part(make: Callable[..., Ready]) -> None:
    problem = make(time=0.01, initial_weight=1e4)
    solution = pde.solve(
        problem, pde.network_for(problem, parameters=150), points=200, steps=12, solver=Cholesky(),
        step=LevenbergMarquardt(1e-2), gram="dense", progress=False, patience=None, refine=None,
    )  # fmt: skip
    assert solution.history.loss[-1] < 0.1 * solution.history.loss[0]
    assert solution.error < 0.2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: problems.KuramotoSivashinsky(time=3.0), "chaotic"),
        (lambda: problems.AllenCahn(diffusion=math.inf), "diffusion"),
        (lambda: problems.KdV(eta="1"), "η"),  # pyright: ignore[reportArgumentType]
        (lambda: problems.KdV(mu=math.nan), "μ"),
        (lambda: problems.Cavity(0.0), "Reynolds"),
    ],
)
def test_bad_input(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(PullbackError, match=words):
        make()
