"""Plans: how many points, which draw, and where refinement moves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pullback import PullbackError, pde
from pullback.pde.discretization.plan import Refine, SamplingPlan
from pullback.pde.discretization.trial import Trial


def problem(**options: Any) -> pde.Problem:
    return pde.Problem(
        pde.Box([(0, 1), (0, 1)]),
        [
            pde.Equation(lambda u: u.laplacian + 1),
            pde.Dirichlet(0.0, **options),
            pde.Data(torch.rand(7, 2), torch.zeros(7)),
        ],
    )


def plan(of: pde.Problem, **options: Any) -> SamplingPlan:
    return SamplingPlan(
        of,
        100,
        **{
            **dict(points=None, sampler=None, seed=0, resample=None, refine=None),
            **options,
        },
    )


def test_counts() -> None:
    assert plan(problem()).counts == {"equation": 1000, "dirichlet": 250, "data": 7}
    assert plan(problem(), points=80).counts == {"equation": 80, "dirichlet": 20, "data": 7}
    assert plan(problem(points=33), points=80).counts["dirichlet"] == 33
    named = plan(problem(points=33), points={"dirichlet": 5})
    assert named.counts == {"equation": 1000, "dirichlet": 5, "data": 7}
    pinned = problem(on=pde.PointSet(torch.zeros(1, 2), names=("x", "y")))
    assert plan(pinned, points=80).counts["dirichlet"] == 1
    assert len(plan(pinned, points=80).draw(0)["dirichlet"][0]) == 1


@pytest.mark.parametrize(
    "options",
    [
        *({"points": n} for n in (0, -5, 10.0, "10", True)),
        *({"points": {"dirichlet": n}} for n in (0, 1.5)),
        {"points": {"neumann": 3}},
        *({"resample": n} for n in (0, -1, 1.5)),
    ],
)
def test_unusable_plans(options: dict[str, Any]) -> None:
    with pytest.raises(PullbackError):
        plan(problem(), **options)


def test_unusable_samplers_and_sizes() -> None:
    with pytest.raises(PullbackError, match="Unknown sampler"):
        plan(problem(), sampler="magic").draw(0)
    with pytest.raises(PullbackError, match="no full grid"):
        plan(problem(), points=3).draw(0)
    with pytest.raises(PullbackError, match="asked of a set"):
        plan(problem(), points={"data": 3}).draw(0)


@pytest.mark.parametrize(
    "options",
    [{"every": 0}, {"until": -1}],
)
def test_unusable_refinements(options: dict[str, Any]) -> None:
    with pytest.raises(PullbackError, match="refinement"):
        Refine(**options)


def test_draws() -> None:
    still = plan(problem())
    moving = plan(problem(), resample=3)
    assert [still.draw_number(i) for i in range(4)] == [0] * 4
    assert [moving.draw_number(i) for i in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert still.sampler == "grid"
    assert plan(pde.Heat(1)).sampler == "sobol"  # a grid misses layers that move
    assert moving.sampler == "sobol"
    one = moving.draw(0)
    two = moving.draw(1)
    repeated = moving.draw(0)
    for name in ("equation", "dirichlet"):
        assert torch.equal(one[name][0].x, repeated[name][0].x)
        assert not torch.equal(one[name][0].x, two[name][0].x)
    assert not torch.equal(
        plan(problem(), resample=3, seed=1).draw(0)["equation"][0].x, one["equation"][0].x
    )


def test_refinement_goes_where_the_residual_is() -> None:
    """With a residual that is large just at x < 0.2, most new points go there."""
    bumpy = pde.Problem(
        pde.Box([(0, 1), (0, 1)]),
        [
            pde.Equation(lambda u, x: 0 * u + 1e3 * (x < 0.2)),
            pde.Equation(lambda u, normals: u.normal + normals[:, 0], on=lambda d: d.boundary),
            pde.Dirichlet(0.0),
        ],
    )
    network = pde.mlp(2, 3, 1, seed=0)
    trial = Trial(network, {}, next(network.parameters()))
    it = plan(bumpy, points=400, refine=Refine(), sampler="uniform")
    before = it.draw(0)
    after = it.refine_sites(before, trial, 10)
    repeated = it.refine_sites(before, trial, 10)
    x = after["equation"][0].x
    assert len(x) == 400
    assert torch.equal(x, repeated["equation"][0].x)
    assert not torch.equal(x, it.refine_sites(before, trial, 11)["equation"][0].x)
    is_old = (x[:, None] == before["equation"][0].x[None]).all(-1).any(1)
    assert int(is_old.sum()) == 200
    assert float((x[~is_old][:, 0] < 0.2).double().mean()) > 0.5
    assert after["dirichlet"][0] is before["dirichlet"][0]
    edge = after["equation 2"][0]
    assert edge.normals is not None
    assert bool(bumpy.domain.boundary.contains(edge.x).all())
    for p, n in zip(edge.x, edge.normals, strict=True):  # they went along with their points
        assert not bool(bumpy.domain.contains((p + 1e-3 * n)[None]))


def test_refinement_in_single_precision() -> None:
    """Points stay in float64 while the network is evaluated in its own precision."""
    network = pde.mlp(2, 3, 1, seed=0, dtype=torch.float32)
    trial = Trial(network, {}, next(network.parameters()))
    it = plan(problem(), points=64, refine=Refine())
    after = it.refine_sites(it.draw(0), trial, 10)
    assert after["equation"][0].x.dtype == torch.float64


@pytest.mark.slow
def test_burgers_by_defaults_alone() -> None:
    """A layer of width 0.003: L-BFGS after Adam reaches 7.9e-3 in the same time."""
    problem = pde.Burgers()
    solution = pde.solve(problem, pde.network_for(problem), steps=150, progress=False)
    assert solution.error < 7.9e-3
