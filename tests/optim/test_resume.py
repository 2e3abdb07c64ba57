"""Saving and loading: a run resumes to the same bits."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import pullback as pb
from tests.pairs import each_once

from .common import DOUBLE, closure_of, data, mlp, same, vector

S = pb.solvers
T = pb.steps
RUNS = {
    "Constant": lambda: (S.Cholesky(1e-2), T.Constant(0.5)),
    "PseudoInverse": lambda: (S.PseudoInverse(1e-3), T.Constant(0.1)),
    "ConjugateGradient": lambda: (S.ConjugateGradient(1e-2), T.Constant(0.5)),
    "GridLineSearch": lambda: (S.Cholesky(1e-2), T.GridLineSearch(6)),
    "Backtracking": lambda: (S.Cholesky(1e-2), T.Backtracking()),
    "LevenbergMarquardt": lambda: (S.Cholesky(), T.LevenbergMarquardt(1.0)),
    "TargetRatio": lambda: (S.PseudoInverse(), T.TargetRatio(radii=8)),
    "Spring": lambda: (S.Cholesky(1e-2), T.Spring(0.9, T.Constant(0.5))),
    "TrustNorm of Spring": lambda: (S.Cholesky(1e-2), T.TrustNorm(0.1, T.Spring(0.9))),
    "Spring of LevenbergMarquardt": lambda: (S.Cholesky(), T.Spring(0.5, T.LevenbergMarquardt())),
    "Sketched": lambda: (S.Sketched(rows=8, columns=16, damping=1e-2), T.Constant(0.5)),
    "Sketched TargetRatio": lambda: (S.Sketched(rows=9), T.TargetRatio(radii=8)),
}


def start(make, dtype: torch.dtype) -> tuple[nn.Module, pb.NaturalGradient]:
    torch.manual_seed(1)
    model = mlp(dtype=dtype)
    solver, step = make()
    return model, pb.NaturalGradient(model, solver=solver, step=step)


def store_and_load(state: object) -> object:
    """Through a file, as `torch.load` reads it by default."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("name", "dtype"), each_once(RUNS, [torch.float32, DOUBLE]))
def test_a_run_resumes_to_the_same_bits(name: str, dtype: torch.dtype) -> None:
    model, opt = start(RUNS[name], dtype)
    x, y = data(12, dtype=dtype)
    for _ in range(2):
        opt.step(closure_of(opt, model, x, y))
    saved = store_and_load({"model": model.state_dict(), "optimizer": opt.state_dict()})
    assert isinstance(saved, dict)
    want = []
    for _ in range(3):
        info = opt.step(closure_of(opt, model, x, y))
        want.append((vector(model), info.loss, info.damping, info.step_size, info.accepted))
    model, opt = start(RUNS[name], dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    for w, *facts in want:
        info = opt.step(closure_of(opt, model, x, y))
        assert torch.equal(vector(model), w)
        assert [info.loss, info.damping, info.step_size, info.accepted] == facts


@pytest.mark.parametrize("name", ["LevenbergMarquardt", "TargetRatio", "Spring", "Sketched"])
def test_the_saved_state_matters(name: str) -> None:
    """Without it the next step would be another: so the test above tests something."""
    model, opt = start(RUNS[name], DOUBLE)
    x, y = data(12)
    for _ in range(3):
        opt.step(closure_of(opt, model, x, y))
    twin = copy.deepcopy(model)
    solver, step = RUNS[name]()
    fresh = pb.NaturalGradient(twin, solver=solver, step=step)
    for _ in range(2):
        opt.step(closure_of(opt, model, x, y))
        fresh.step(closure_of(fresh, twin, x, y))
    assert not torch.equal(vector(model), vector(twin))


@pytest.mark.parametrize("name", RUNS)
def test_a_snapshot_is_not_changed_by_later_steps(name: str) -> None:
    model, opt = start(RUNS[name], DOUBLE)
    x, y = data(12)
    for _ in range(2):
        opt.step(closure_of(opt, model, x, y))
    snapshot = opt.state_dict()
    frozen = copy.deepcopy(snapshot)
    for _ in range(2):
        opt.step(closure_of(opt, model, x, y))
    assert same(snapshot, frozen)
    assert not same(snapshot, opt.state_dict())
    other_model, other = start(RUNS[name], DOUBLE)
    other.load_state_dict(snapshot)
    other.step(closure_of(other, other_model, x, y))
    assert same(snapshot, frozen)


def test_groups_and_their_rates_are_loaded() -> None:
    model = mlp()
    x, y = data()
    groups = [
        {"params": model[0].parameters(), "lr": 0.25},
        {"params": model[2].parameters(), "lr": 0.5},
    ]
    opt = pb.NaturalGradient(model, params=groups)
    scheduler = lr_scheduler.StepLR(opt, 1, 0.5)
    opt.step(closure_of(opt, model, x, y))
    scheduler.step()
    twin = copy.deepcopy(model)
    fresh = pb.NaturalGradient(
        twin, params=[{"params": twin[0].parameters()}, {"params": twin[2].parameters()}]
    )
    fresh.load_state_dict(opt.state_dict())
    assert [g["lr"] for g in fresh.param_groups] == [0.125, 0.25]
    opt.step(closure_of(opt, model, x, y))
    fresh.step(closure_of(fresh, twin, x, y))
    assert torch.equal(vector(model), vector(twin))


def test_a_dropout_run_resumes_with_the_random_state() -> None:
    def build() -> tuple[nn.Module, pb.NaturalGradient]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2))
        return model, pb.NaturalGradient(model, step=pb.steps.GridLineSearch(4))

    model, opt = build()
    x, y = data(12, dtype=torch.float32)
    opt.step(closure_of(opt, model, x, y))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict(), torch.get_rng_state()))
    for _ in range(5):
        opt.step(closure_of(opt, model, x, y))
    resumed, fresh = build()
    resumed.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    for _ in range(5):
        fresh.step(closure_of(fresh, resumed, x, y))
    assert torch.equal(vector(model), vector(resumed))


def test_an_objective_run_resumes_to_the_same_bits() -> None:
    x, y = data(12)

    def build() -> tuple[nn.Module, pb.NaturalGradient]:
        torch.manual_seed(1)
        model = mlp()
        return model, pb.NaturalGradient(
            model, solver=pb.solvers.PseudoInverse(), step=pb.steps.TargetRatio(radii=8)
        )

    def objective_of(model: nn.Module):
        def objective(params: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(model, params, (x,)) - y

        return objective

    model, opt = build()
    for _ in range(3):
        opt.step(objective=objective_of(model))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    for _ in range(5):
        opt.step(objective=objective_of(model))
    resumed, fresh = build()
    resumed.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    for _ in range(5):
        fresh.step(objective=objective_of(resumed))
    assert torch.equal(vector(model), vector(resumed))


def test_the_state_of_another_solver_can_be_loaded() -> None:
    model = mlp()
    x, y = data()
    one = pb.NaturalGradient(model, solver=pb.solvers.Cholesky(1e-2))
    two = pb.NaturalGradient(model, solver=pb.solvers.Sketched(rows=4, damping=1e-2))
    for opt in (one, two):
        opt.step(closure_of(opt, model, x, y))
    one.load_state_dict(two.state_dict())
    two.load_state_dict(one.state_dict())
    for opt in (one, two):
        assert opt.step(closure_of(opt, model, x, y)).accepted


def test_the_state_of_a_torch_optimizer_gives_the_rates() -> None:
    """Coming from SGD: param groups are taken, there is no step memory yet."""
    model = mlp()
    x, y = data()
    sgd = torch.optim.SGD(model.parameters(), lr=0.25)
    F.mse_loss(model(x), y).backward()
    sgd.step()
    opt = pb.NaturalGradient(model)
    opt.load_state_dict(sgd.state_dict())
    assert opt.param_groups[0]["lr"] == 0.25
    assert opt.step(closure_of(opt, model, x, y)).accepted
