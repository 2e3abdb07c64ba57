"""The reproduction of Yin (2024): its parts against dense oracles, and a quick run."""

import io
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.func import grad, vmap

from pullback import NaturalGradient
from pullback.solvers import OrthogonalGreedy, PseudoInverse, Solution
from pullback.steps import Clip, Constant, GridLineSearch, Local
from pullback_experiments import yin_2024
from pullback_experiments.framework import executor
from pullback_experiments.yin_2024 import problems
from pullback_experiments.yin_2024.methods import ArgMin, DirectionProbe, NaturalMethod
from pullback_experiments.yin_2024.problems import Fit, FitSetting
from pullback_experiments.yin_2024.runs import Summary, entries
from pullback_experiments.yin_2024.runs import run as run_one

EXPERIMENTS = {e.name.removeprefix("yin-2024-"): e for e in yin_2024.EXPERIMENTS}
FITTED = FitSetting(problems.least_squares, (2, 4, 1), {"equation": 40})
PINN = FitSetting(problems.poisson, (2, 4, 1), {"equation": 30, "dirichlet": 12})


def quiet() -> Console:
    return Console(file=io.StringIO())


def jacobian(fit: Fit, of: Callable[[dict[str, Tensor], Tensor], Tensor], x: Tensor) -> Tensor:
    """The rows ∂of/∂w at points x, by torch alone."""
    params = {n: p.detach() for n, p in fit.model.named_parameters()}
    actual = vmap(grad(of), (None, 0))(params, x)
    return torch.cat([actual[n].flatten(1) for n in params], 1)


def flat_gradient(fit: Fit) -> Tensor:
    gradient = torch.autograd.grad(fit.loss(), list(fit.model.parameters()))
    return torch.cat([g.flatten() for g in gradient])


def direction(fit: Fit, method: NaturalMethod) -> Tensor:
    optimizer = NaturalGradient(fit.model, solver=method.solver(), gram=method.gram)
    batch = fit.values if method.l2 else None
    return optimizer.direction(objective=fit.objective, metric_batch=batch).x


def natural(rcond: float | None = None, **options: Any) -> NaturalMethod:
    rule = partial(GridLineSearch, 30)
    return NaturalMethod("NGD", "", partial(PseudoInverse, rcond), rule, **options)


def test_problems_are_the_papers() -> None:
    x = torch.tensor([0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(problems.target(x, x), torch.tensor([1.5, 1.0], dtype=x.dtype))
    assert problems.poisson().conditions[1].weight == 100
    assert [e.setting.layers for e in EXPERIMENTS.values()] == [
        (2, 30, 1),
        (2, 20, 20, 1),
        (2, 20, 20, 1),
    ]


def test_least_squares_loss_is_half_the_mean_square() -> None:
    fit = FITTED.start(0)
    u = fit.values(dict(fit.model.named_parameters()))[:, 0]
    want = 0.5 * (u - problems.target(*fit._inside.T)).square().mean()
    torch.testing.assert_close(fit.loss(), want)


def test_l2_metric_is_the_gram_of_u_at_the_losss_own_points() -> None:
    fit = PINN.start(1)
    j = jacobian(fit, lambda p, x: fit.model.apply_to(p, x[None])[0, 0], fit._inside)
    g = flat_gradient(fit)
    # rcond cuts singular values of A, so its square those of G
    want = torch.linalg.pinv(j.T @ j / len(j), hermitian=True, rtol=1e-6) @ g
    torch.testing.assert_close(direction(fit, natural(1e-3, l2=True)), want, rtol=1e-6, atol=1e-6)


def test_ngd_and_e_ngd_are_one_method_for_least_squares() -> None:
    one, two = (direction(FITTED.start(2), natural(1e-3, l2=l2)) for l2 in (False, True))
    torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-7)


class _Uphill:
    """A local picture in which every step raises the loss."""

    @staticmethod
    def local(x: Tensor) -> Local:
        return Local(
            loss=0.0,
            gradient=x,
            solve=lambda damping, about: Solution(x, 0.0),
            path=lambda: None,
            inner_products=lambda vectors: vectors @ vectors.T,
            losses=lambda moves: moves.norm(dim=1),
            lr=1.0,
            scaled=lambda v: v,
        )


def test_arg_min_moves_where_the_grid_search_rejects() -> None:
    local = _Uphill.local(torch.ones(3, dtype=torch.float64))
    assert not GridLineSearch(5).take(local).accepted
    move = ArgMin(5).take(local)
    assert move.accepted
    assert move.size == 0.5**4


def test_watch_sees_the_direction_before_it_is_cut() -> None:
    x = torch.tensor([5.0, -7.0], dtype=torch.float64)
    watch = DirectionProbe(Clip(1.0, Constant(1.0)))
    assert watch.take(_Uphill.local(x)).direction.tolist() == [1.0, -1.0]
    assert (watch.largest, watch.energy) == (7.0, 74.0)


def test_share_of_all_vectors_is_one_and_of_few_is_less() -> None:
    size = FITTED.start(0).size
    full, few = (natural(greedy=k).on(FITTED.start(0)).probe()["share"] for k in (size, 2))
    # vectors that round-off could not tell from the others are left out
    assert math.isclose(full, 1.0, rel_tol=0.05)
    assert 0 < few < full


def test_a_run_ends_where_it_is_stuck_or_lost() -> None:
    stuck = natural()
    stuck = replace(stuck, rule=lambda: Clip(1e-300, GridLineSearch(30)))
    record = run_one(FITTED, stuck, 0, 20)
    assert record.stuck == 1
    assert record.steps == [0, 1]
    assert record.loss[0] == record.loss[1]
    sgd = next(m for m, _ in EXPERIMENTS["shallow"].methods if m.name == "SGD")
    lost = run_one(FITTED, replace(sgd, lr=1e200), 0, 20)
    assert lost.stuck is not None
    assert Summary([lost]).loss == math.inf


def test_pretraining_is_adam_first() -> None:
    method = natural(pretrain=3)
    adam = next(m for m, _ in EXPERIMENTS["deep"].methods if m.name == "Adam")
    one, two = (run_one(FITTED, m, 0, 3) for m in (method, adam))
    assert one.loss == two.loss
    assert run_one(FITTED, method, 0, 4).values("rank")


def test_greedy_lowers_the_loss() -> None:
    method = replace(natural(), solver=lambda: OrthogonalGreedy(5))
    record = run_one(FITTED, method, 0, 10)
    assert record.loss[-1] < 0.5 * record.loss[0]
    assert set(record.values("rank")) == {5.0}


def test_entries_are_few_and_reach_the_end() -> None:
    assert max(entries(2000)) == 2000
    assert len(entries(2000)) <= 42


@pytest.mark.slow
def test_the_quick_version_judges_what_it_can_tell(tmp_path: Path) -> None:
    for experiment in EXPERIMENTS.values():
        assert experiment.short
        assert set(experiment.short) <= set(range(len(experiment.expected_outcomes)))
    few = FitSetting(problems.least_squares, (2, 6, 1), {"equation": 60})
    short = replace(EXPERIMENTS["shallow"], setting=few, quick_steps=3)
    outcome = executor.run(short, True, [0], tmp_path, quiet())
    assert [c.claim for c in outcome.checks] == [
        "the Gram is singular to working precision",
        "greedily chosen vectors keep nine tenths of the energy of the full direction",
        "NGD-OGA lowers the loss faster than NGD in 30 steps",
    ]
    assert outcome.verdict is not None
    assert outcome.verdict.why.startswith("in the short version ")


def test_every_method_takes_a_step_on_a_small_poisson_problem() -> None:
    for method, _ in EXPERIMENTS["poisson"].methods:
        record = run_one(PINN, method, 0, 1)
        assert record.steps[-1] == 1, method.name
        assert math.isfinite(record.loss[-1])


def test_every_group_names_methods_of_the_experiment() -> None:
    for experiment in EXPERIMENTS.values():
        names = {m.name for m, _ in experiment.methods}
        assert set().union(*experiment.groups.values()) == names
