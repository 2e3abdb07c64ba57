"""Ready problems: exact solutions solve them, wrapped networks do what is hard, set-ups fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError, pde
from pullback.pde.catalog.ready import Ready
from pullback.pde.discretization.term import build_term
from pullback.pde.discretization.trial import Trial
from pullback.pde.problem.conditions import Energy
from pullback.pde.problem.fields import call_by_name

from .residuals import assert_fits, assert_hard, drawn, residual

EXACT: dict[str, Callable[[], Ready]] = {
    **{f"poisson {d}": lambda d=d: pde.Poisson(d) for d in (1, 2, 3, 5, 10, 11, 100)},
    **{f"heat {d}": lambda d=d: pde.Heat(d) for d in (1, 2, 4)},
    "wave": pde.Wave,
    "wave 3": lambda: pde.Wave(3.0),
    "convection": pde.Convection,
    "schroedinger": pde.Schroedinger,
    "wave to 5": lambda: pde.Wave(time=5.0),
    "multiscale": pde.Multiscale,
    "helmholtz": pde.Helmholtz,
    "helmholtz 2": lambda: pde.Helmholtz(2, 3, 2.5),
    "kovasznay": pde.Kovasznay,
    "kovasznay 10": lambda: pde.Kovasznay(10),
    **{f"fokker-planck {d}": lambda d=d: pde.LogFokkerPlanck(d) for d in (1, 3, 9)},
}

#: the hard variant and the soft one
HARD: dict[str, tuple[Callable[..., Ready], dict[str, Any]]] = {
    "poisson 1": (pde.Poisson, {"dim": 1}),
    "poisson 3": (pde.Poisson, {"dim": 3}),
    "helmholtz": (pde.Helmholtz, {}),
    "heat 1": (pde.Heat, {"dim": 1}),
    "heat 4": (pde.Heat, {"dim": 4}),
    "wave": (pde.Wave, {}),
    "burgers": (pde.Burgers, {}),
    "convection": (pde.Convection, {}),
    "schroedinger": (pde.Schroedinger, {}),
    "fokker-planck": (pde.LogFokkerPlanck, {"dim": 3}),
}


#: a hundred dimensions take a second, by the code of ten
QUICK = [
    pytest.param(make, id=name, marks=pytest.mark.slow if name == "poisson 100" else ())
    for name, make in EXACT.items()
]


class Exact(nn.Module):
    """u* + ε v as a network, ε = 0 its parameter."""

    def __init__(self, problem: Ready, direction: Callable[[Any], Any] = lambda x: 1.0) -> None:
        super().__init__()
        self.problem = problem
        self.direction = direction
        self.epsilon = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        columns = {n: x[:, i : i + 1] for i, n in enumerate(self.problem.domain.names)}
        assert self.problem.exact is not None
        u = call_by_name(self.problem.exact, {"points": x, **columns}, "The exact solution")
        if isinstance(u, tuple):
            u = torch.cat(list(u), -1)
        return (u[:, None] if u.ndim == 1 else u) + self.direction(x) * self.epsilon


@pytest.mark.parametrize("make", QUICK)
def test_exact_solution_satisfies_every_condition(make: Callable[[], Ready]) -> None:
    problem = make()
    for condition in problem.conditions:
        assert residual(problem, condition, Exact(problem)).abs().max() <= 1e-9, condition.name


@pytest.mark.parametrize("make", QUICK)
def test_another_function_does_not(make: Callable[[], Ready]) -> None:
    problem = make()
    network = pde.mlp(problem.domain.dim, 8, len(problem.fields), seed=1)
    for condition in problem.conditions:
        assert residual(problem, condition, network).abs().max() > 1e-4, condition.name


@pytest.mark.parametrize(("make", "options"), HARD.values(), ids=HARD)
def test_wrapped_network_satisfies_what_is_not_in_the_loss(
    make: Callable[..., Ready], options: dict[str, Any]
) -> None:
    assert_hard(make, options)


@pytest.mark.parametrize(
    "make", [pde.Poisson, pde.Heat, pde.Wave, pde.Convection], ids=lambda make: make.__name__
)
def test_hard_lifts_agree_with_the_exact_solution(make: Callable[[], Ready]) -> None:
    """u* is of the hard form: it is the lift where the distance vanishes."""
    problem = make()
    for condition in problem.conditions[1:]:
        x = drawn(problem, condition)[0].x
        value = getattr(condition, "value", None)
        if value is not None:
            if callable(value):
                want = call_by_name(value, {"points": x, **problem.columns(x)}, "v")
            else:
                want = 0.0
            assert (problem.truth(x)[:, 0] - want).abs().max() < 1e-12


@pytest.mark.parametrize("make", [pde.Ritz1D, pde.RitzPoisson, lambda: pde.RitzPoisson(1)])
def test_exact_solution_is_stationary_for_the_energy(make: Callable[[], Ready]) -> None:
    """d/dε E(u* + ε v) = 0 for smooth v (that vanish on the boundary where values are hard)."""
    problem = make()
    (condition,) = problem.conditions
    assert isinstance(condition, Energy)
    v = problem.wrap(pde.mlp(problem.domain.dim, 8, 1, seed=5)).requires_grad_(False)
    network = Exact(problem, v.forward)
    trial = Trial(network, {}, network.epsilon)
    item = build_term(problem, condition, trial, (problem.domain.sample(900, "gauss"),))
    params = dict(trial.named_parameters())
    energy = item.loss(item.map(params))
    (slope,) = torch.autograd.grad(energy, list(params.values()))
    assert energy.item() < 0
    assert abs(slope.item()) < 1e-9


def test_reference_solves_the_equation() -> None:
    """Lightly, by differences of the reference; references have tests of their own."""
    problem = pde.Burgers(0.1)
    h = 1e-3
    x = torch.tensor([-0.6, -0.3, 0.2, 0.7], dtype=torch.float64)

    def at(dx: float, dt: float = 0.0) -> Tensor:
        return problem.truth(torch.stack([x + dx, torch.full_like(x, 0.15 + dt)], -1))[:, 0]

    u = at(0)
    left = at(-h)
    right = at(h)
    u_x = (right - left) / (2 * h)
    u_xx = (right - 2 * u + left) / h**2
    u_t = (at(0, h) - at(0, -h)) / (2 * h)
    assert (u_t + u * u_x - 0.1 * u_xx).abs().max() < 1e-4 * u_t.abs().max()


OWN = [name for name, make in pde.SETUPS.items() if make.__module__.startswith("pullback.")]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n == "poisson100d" else ()) for n in OWN],
)
def test_setups_fit_their_networks(name: str) -> None:
    assert_fits(pde.setup(name))


def test_set_ups_of_the_laboratory_are_said_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(pde.SETUPS, "kdv", raising=False)
    with pytest.raises(PullbackError, match="comes with pullback-experiments"):
        pde.setup("kdv")


@pytest.mark.slow
def test_setup_solves() -> None:
    solution = pde.setup("ritz").solve(seed=1, steps=40, progress=False)
    assert solution.error < 0.1


def test_two_scales_are_solved_together() -> None:
    solution = pde.setup("multiscale").solve(points=150, steps=12, progress=False)
    assert solution.error < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["multiscale", "wave-long"])
def test_waves_to_many_digits(name: str) -> None:
    assert pde.setup(name).solve(progress=False).error < 1e-9


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pde.Poisson(0), "dim"),
        (lambda: pde.Poisson(5, hard=True), "hard"),
        (lambda: pde.RitzPoisson(4), "from 1 to 3"),
        (lambda: pde.Helmholtz(0), "integers"),
        (lambda: pde.Multiscale(0), "integers"),
        (lambda: pde.Wave(-1.0), "speed"),
        (lambda: pde.Burgers(0.0), "viscosity"),
        (lambda: pde.setup("poison"), "poisson2d"),
        (lambda: pde.setup("burgers").solve(slabs=2), "need an initial condition"),
    ],
)
def test_bad_input(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(PullbackError, match=words):
        make()
