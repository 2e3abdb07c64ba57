"""Residuals of ready problems, and what tables of problems and set-ups are tested for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pullback import pde
from pullback.pde.catalog.ready import Ready
from pullback.pde.discretization.sites import Sites
from pullback.pde.discretization.term import build_term, find_nesting_reason
from pullback.pde.discretization.trial import Trial
from pullback.pde.problem.conditions import Condition, Energy


def drawn(problem: pde.Problem, condition: Condition, n: int = 60) -> Sites:
    return condition.region(problem.domain).sample_sites(n, "sobol", seed=3)


def residual(problem: pde.Problem, condition: Condition, network: nn.Module) -> Tensor:
    """F at the points, (N, R), with the weights taken out again."""
    sites = drawn(problem, condition)
    trial = Trial(network, {}, next(network.parameters()))
    item = build_term(problem, condition, trial, sites)
    q = condition.weight * sites[0].weights / sites[0].weights.sum()
    out = item.map(dict(trial.named_parameters())) / q.sqrt()[:, None]
    assert not find_nesting_reason([item])
    return out.detach()


def assert_hard(make: Callable[..., Ready], options: dict[str, Any]) -> None:
    """A wrapped network satisfies what is not in the loss of the hard variant."""
    soft = make(**options)
    hard = make(**options, hard=True)
    assert hard.hard
    assert not soft.hard
    inputs = hard.domain.dim + any(isinstance(c, pde.Periodic) for c in soft.conditions)
    network = pde.mlp(inputs, 8, len(hard.fields), seed=0)
    assert soft.wrap(network) is network
    hard_names = {c.name for c in hard.conditions}
    dropped = [c for c in soft.conditions if c.name not in hard_names]
    assert dropped
    for condition in dropped:
        assert residual(soft, condition, hard.wrap(network)).abs().max() <= 1e-9, condition.name
    for condition in hard.conditions:
        assert residual(hard, condition, hard.wrap(network)).isfinite().all()


def assert_fits(setup: pde.Setup) -> None:
    """A set-up's network has finite residuals and the same parameters for the same seed."""
    network = setup.network(0)
    for condition in setup.problem.conditions:
        if not isinstance(condition, Energy):
            assert residual(setup.problem, condition, network.double()).isfinite().all()
    pairs = zip(setup.network(0).parameters(), setup.network(0).parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    points = setup.options.get("points")
    if isinstance(points, dict):
        assert set(points) == {c.name for c in setup.problem.conditions}
