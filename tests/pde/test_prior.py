"""Unknown fields from data with noise: the prior's weight by the marginal likelihood."""

from __future__ import annotations

from math import pi

import pytest
import torch
from torch import Tensor

from pullback import pde
from pullback._core.errors import PullbackError
from pullback._core.processes import Processes
from pullback.pde.discretization.sites import draw_sites
from pullback.pde.discretization.term import build_term
from pullback.pde.discretization.trial import Trial
from pullback.pde.discretization.weights import choose_prior_factor

LINE = pde.Interval(0, 1)


def conductivity(x: Tensor) -> Tensor:
    return 1 + 0.5 * torch.sin(2 * pi * x)


def heat_source(x: Tensor) -> Tensor:
    """f = −(k u')' for u = sin πx."""
    first = pi * torch.cos(2 * pi * x) * pi * torch.cos(pi * x)
    return conductivity(x) * pi**2 * torch.sin(pi * x) - first


def inverse_problem(seed: int, noise: float, *prior: pde.Condition) -> pde.Problem:
    """(k u')' + f = 0 with u measured at 50 places."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(50, 1, generator=generator, dtype=torch.float64)
    errors = noise * torch.randn(50, generator=generator, dtype=torch.float64)
    return pde.Problem(
        LINE,
        [
            pde.Equation(lambda u, k, x: k.x * u.x + k * u.xx + heat_source(x)),
            pde.Dirichlet(0.0, field="u"),
            pde.Data(x, torch.sin(pi * x[:, 0]) + errors, field="u"),
            *prior,
        ],
        fields=("u", "k"),
        exact=lambda x: (torch.sin(pi * x), conductivity(x)),
    )


def test_evidence_against_the_density_of_the_data() -> None:
    """−2 log N(z_d; −A_d δ₀, τ(1 + A_d K⁻¹A_dᵀ)) at its best τ, by torch's normal distribution."""
    problem = inverse_problem(0, 0.05, pde.Prior("k", mean=1.0))
    trial = Trial(pde.mlp(1, 3, 2, seed=1), {}, torch.zeros(1).double())
    params = dict(trial.named_parameters())
    terms = [
        (c, build_term(problem, c, trial, draw_sites(problem, c, 50, "sobol", 0)))
        for c in problem.conditions
    ]
    factor = choose_prior_factor(terms, params, Processes())
    rows = {c.name: t.map.linearize(params).rows().detach() for c, t in terms}
    values = {c.name: t.map.linearize(params).value.detach().flatten() for c, t in terms}

    def log_density(s: float) -> float:
        names = ("equation", "dirichlet", "prior")
        scales = (1.0, 1.0, s**0.5)
        a = torch.cat([w * rows[n] for n, w in zip(names, scales, strict=True)])
        z = torch.cat([w * values[n] for n, w in zip(names, scales, strict=True)])
        k = a.T @ a
        k += 1e-12 * k.diagonal().max() * torch.eye(len(k)).double()
        start = -torch.linalg.solve(k, a.T @ z)
        c = torch.eye(50).double() + rows["data"] @ torch.linalg.solve(k, rows["data"].T)
        mean = -rows["data"] @ start
        off = values["data"] - mean
        noise = float(off @ torch.linalg.solve(c, off)) / 50
        normal = torch.distributions.MultivariateNormal(mean, noise * (c + c.T) / 2)
        return float(normal.log_prob(values["data"]))

    factors = [10 ** (k / 4) for k in range(-8, 5)]
    assert factor == pytest.approx(max(factors, key=log_density))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_field_from_data_with_one_per_cent_of_noise(seed: int) -> None:
    """Without the prior the coefficient runs away by a factor of 20 to 100."""
    problem = inverse_problem(seed, 0.01, pde.Prior("k", mean=1.0))
    network = pde.mlp(1, 10, 2, seed=seed)
    solution = pde.solve(problem, network, points=60, steps=250, progress=False)
    assert solution.errors["k"] < 0.2
    assert solution.weights["equation"] == 1.0
    assert solution.weights["prior"] < 1e-2


def test_data_come_first() -> None:
    """Equations are light until the data are fitted; a weight that is given stays."""
    problem = inverse_problem(0, 0.01, pde.Prior("k", mean=1.0))
    solution = pde.solve(problem, pde.mlp(1, 4, 2, seed=0), points=20, steps=2, progress=False)
    assert solution.weights == {"equation": 1e-4, "dirichlet": 1.0, "data": 1.0, "prior": 1.0}
    weighted = inverse_problem(0, 0.01, pde.Prior("k", weight=0.1))
    solution = pde.solve(weighted, pde.mlp(1, 4, 2, seed=0), points=20, steps=2, progress=False)
    assert solution.weights == {"equation": 1.0, "dirichlet": 1.0, "data": 1.0, "prior": 0.1}
    assert set(solution.residual) == {"equation", "dirichlet", "data"}, "a prior does not vanish"


def test_refusals() -> None:
    for options in ({"weight": "balanced"}, {"length": 0.0}, {"mean": float("nan")}):
        with pytest.raises(PullbackError, match="prior"):
            pde.Prior("k", **options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PullbackError, match="field"):
        pde.Prior(3)  # pyright: ignore[reportArgumentType]
