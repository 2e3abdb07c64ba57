"""The re-implemented reference computes the same loss, gradient and Gram as the library."""

from typing import Any

import torch
from torch import Tensor

from pullback import NaturalGradient, pde
from pullback.optim import Objective
from pullback.pde.discretization.sites import draw_sites
from pullback.pde.discretization.term import build_term
from pullback.pde.discretization.trial import Trial
from pullback.solvers import PseudoInverse
from pullback_experiments.benchmarks import poisson
from pullback_experiments.benchmarks.reference_engd import Reference


def parts() -> tuple[Reference, Trial, Objective]:
    network = pde.mlp(2, 3, 1, seed=0)
    problem = poisson.poisson()
    trial = Trial(network, {}, next(network.parameters()))
    sites = {
        c.name: draw_sites(problem, c, n, "uniform", 3)
        for c, n in zip(problem.conditions, (20, 8), strict=True)
    }
    objective = Objective(
        [build_term(problem, c, trial, sites[c.name]) for c in problem.conditions]
    )
    inside, boundary = (sites[c.name][0] for c in problem.conditions)
    return Reference(network, inside, boundary, poisson.source), trial, objective


def params_of(reference: Reference) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in reference.network.named_parameters()}


def test_loss_and_gram_are_the_librarys() -> None:
    reference, trial, objective = parts()
    params = dict(trial.named_parameters())
    linears = [t.map.linearize(params) for t in objective.terms]
    a = torch.cat([x.rows() for x in linears])
    want = sum(0.5 * x.value.square().sum() for x in linears)
    torch.testing.assert_close(reference.loss(params_of(reference)), want)
    gram = reference.gram(params_of(reference))
    torch.testing.assert_close(gram, a.T @ a)
    reference.products = False
    torch.testing.assert_close(reference.gram(params_of(reference)), gram)


def test_a_step_is_the_best_of_the_grid_along_the_natural_gradient() -> None:
    reference, trial, objective = parts()
    optimizer = NaturalGradient(trial, solver=PseudoInverse(), gram="dense")
    x = optimizer.direction(objective=objective).x
    before = torch.cat([p.detach().flatten() for p in trial.parameters()])
    loss = reference.step()
    moved = before - torch.cat([p.detach().flatten() for p in trial.parameters()])
    size = float(moved @ x / (x @ x))
    assert (moved - size * x).norm() <= 1e-5 * moved.norm()
    assert abs(loss - float(reference.loss(params_of(reference)))) <= 1e-9 * loss


def test_a_clock_knows_when_a_target_was_reached() -> None:
    clock = poisson.Clock()
    clock.add_measurement(1.0)
    assert clock.time(lambda: sum(range(10_000))) == 49_995_000
    clock.steps = 1
    clock.add_measurement(1e-7)
    report = clock.report()
    assert report["seconds to"] == {"1e-06": clock.wall, "1e-09": None}
    assert report["error"] == 1e-7


def test_a_run_that_never_arrives_counts_with_all_its_time() -> None:
    def run(error: float, seconds: float, to: float | None) -> dict[str, Any]:
        reached = {"1e-06": to, "1e-09": None}
        times = {"seconds": seconds, "CPU seconds": seconds}
        return {
            "error": error,
            "steps": 10,
            **times,
            "seconds to": reached,
            "CPU seconds to": reached,
        }

    summary = poisson.summary(
        {"0": {"ours": run(1e-8, 4.0, 2.0), "reference": run(1.0, 30.0, None)}}
    )
    assert summary["ratio of median seconds to 1e-06"] == 15.0
    assert summary["reference"]["never at 1e-06"] == 1
    assert summary["ours"]["at most"] == {"1e-06": 1, "1e-09": 0}
