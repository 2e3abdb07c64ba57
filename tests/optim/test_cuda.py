"""On a GPU: the same answers, and device state restored as well."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import pullback as pb

from .common import DOUBLE, assert_close, closure_of, data, mlp, refused, vector

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MSE = pb.metrics.Fisher(pb.likelihoods.MSE())
S = pb.solvers
T = pb.steps
RUNS = {
    "Cholesky": lambda: (S.Cholesky(1e-2), T.Constant(0.5)),
    "PseudoInverse": lambda: (S.PseudoInverse(1e-3), T.Constant(0.1)),
    "ConjugateGradient": lambda: (S.ConjugateGradient(1e-2), T.Constant(0.5)),
    "Sketched": lambda: (S.Sketched(rows=8, columns=16, damping=1e-2), T.Constant(0.5)),
    "GridLineSearch": lambda: (S.Cholesky(1e-2), T.GridLineSearch(6)),
    "LevenbergMarquardt": lambda: (S.Cholesky(), T.LevenbergMarquardt(1.0)),
    "TargetRatio": lambda: (S.PseudoInverse(), T.TargetRatio(radii=8)),
    "Spring": lambda: (S.Cholesky(1e-2), T.Spring(0.9, T.Constant(0.5))),
}


def pair(make, dtype: torch.dtype, **options):
    """The same model and optimizer on both devices."""
    model = mlp(dtype=dtype)
    twin = copy.deepcopy(model).cuda()
    one, two = (
        pb.NaturalGradient(m, MSE, solver, step, **options)
        for m, (solver, step) in ((model, make()), (twin, make()))
    )
    return model, twin, one, two


@pytest.mark.parametrize(("dtype", "rtol"), [(DOUBLE, 1e-8), (torch.float32, 1e-2)])
@pytest.mark.parametrize("name", RUNS)
def test_closures_give_the_same_as_on_the_cpu(name: str, dtype, rtol: float) -> None:
    model, twin, one, two = pair(RUNS[name], dtype)
    x, y = data(12, dtype=dtype)
    for _ in range(3):
        a = one.step(closure_of(one, model, x, y))
        b = two.step(closure_of(two, twin, x.cuda(), y.cuda()))
        assert b.loss == pytest.approx(a.loss, rel=10 * rtol)
    assert_close(vector(twin).cpu(), vector(model), rtol)


@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
def test_forms_give_the_same_as_on_the_cpu(form: str) -> None:
    model, twin, one, two = pair(RUNS["Cholesky"], DOUBLE, gram=form)
    x, y = data(12)
    one.step(closure_of(one, model, x, y))
    two.step(closure_of(two, twin, x.cuda(), y.cuda()))
    assert_close(vector(twin).cpu(), vector(model), 1e-9)


@pytest.mark.parametrize("name", ["Cholesky", "GridLineSearch", "TargetRatio"])
def test_objectives_give_the_same_as_on_the_cpu(name: str) -> None:
    model = mlp()
    twin = copy.deepcopy(model).cuda()
    x, y = data(12)
    for _ in range(2):
        for net, a, b in ((model, x, y), (twin, x.cuda(), y.cuda())):
            solver, step = RUNS[name]()
            opt = pb.NaturalGradient(net, solver=solver, step=step)
            opt.step(objective=lambda p, n=net, a=a, b=b: functional_call(n, p, (a,)) - b)
    assert_close(vector(twin).cpu(), vector(model), 1e-8)


def test_groups_with_their_own_lr() -> None:
    model = mlp().cuda()
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[2].parameters(), "lr": 0.3},
    ]
    opt = pb.NaturalGradient(model, MSE, params=groups, step=T.Backtracking())
    x, y = (t.cuda() for t in data())
    closure = closure_of(opt, model, x, y)
    info = opt.step(closure)
    assert info.accepted
    assert closure().item() == pytest.approx(info.new_loss, rel=1e-12)


def test_the_devices_random_state_is_restored() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)).cuda()
    x, y = (t.cuda() for t in data(dtype=torch.float32))
    opt = pb.NaturalGradient(model, MSE, S.Cholesky(1e-2), T.GridLineSearch(5))
    closure = closure_of(opt, model, x, y)
    start = torch.cuda.get_rng_state()
    first = closure().item()
    after = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(start)
    info = opt.step(closure)
    assert info.loss == first
    assert torch.equal(torch.cuda.get_rng_state(), after)
    torch.cuda.set_rng_state(start)
    assert closure().item() == pytest.approx(info.new_loss, rel=1e-5)
    before = torch.cuda.get_rng_state()
    assert not opt.step(closure_of(opt, model, x * float("nan"), y)).accepted
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_random_points_on_the_device_are_the_same_in_loss_and_trials() -> None:
    model = mlp().cuda()

    def objective(p: dict[str, Tensor]) -> Tensor:
        x = torch.rand(6, 3, dtype=DOUBLE, device="cuda")
        return functional_call(model, p, (x,)) - x[:, :2]

    start = torch.cuda.get_rng_state()
    opt = pb.NaturalGradient(model, solver=S.Cholesky(1e-2), step=T.GridLineSearch(5))
    info = opt.step(objective=objective)
    assert info.accepted
    torch.cuda.set_rng_state(start)
    r = objective(dict(model.named_parameters()))
    assert 0.5 * r.square().sum(1).mean().item() == pytest.approx(info.new_loss, rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["in the closure", "around the step"])
def test_autocast(dtype: torch.dtype, where: str) -> None:
    model = mlp(dtype=torch.float32).cuda()
    twin = copy.deepcopy(model)
    x, y = (t.cuda() for t in data(40, dtype=torch.float32))
    opt = pb.NaturalGradient(model, MSE, S.Cholesky(1e-2))
    before = vector(model)

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype):
            z = model(x)
        assert z.dtype == dtype
        return z.float()

    if where == "in the closure":
        opt.step(closure_of(opt, call, x, y))
    else:
        with torch.autocast("cuda", dtype):
            opt.step(closure_of(opt, model, x, y, lambda z, y: F.mse_loss(z.float(), y)))
    exact = pb.NaturalGradient(twin, MSE, S.Cholesky(1e-2))
    exact.step(closure_of(exact, twin, x, y))
    assert_close(before - vector(model), before - vector(twin), 0.15)


@pytest.mark.parametrize("name", ["LevenbergMarquardt", "TargetRatio", "Spring", "Sketched"])
@pytest.mark.parametrize("map_location", ["cuda", "cpu"])
def test_a_run_resumes_to_the_same_bits(name: str, map_location: str) -> None:
    x, y = (t.cuda() for t in data(12))
    model = mlp().cuda()
    opt = None
    solver, step = RUNS[name]()
    opt = pb.NaturalGradient(model, MSE, solver, step)
    for _ in range(3):
        opt.step(closure_of(opt, model, x, y))
    file = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), file)
    for _ in range(3):
        opt.step(closure_of(opt, model, x, y))
    file.seek(0)
    weights, state = torch.load(file, map_location=map_location)
    resumed = mlp().cuda()
    resumed.load_state_dict(weights)
    solver, step = RUNS[name]()
    fresh = pb.NaturalGradient(resumed, MSE, solver, step)
    fresh.load_state_dict(state)
    for _ in range(3):
        fresh.step(closure_of(fresh, resumed, x, y))
    assert torch.equal(vector(resumed), vector(model))


@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
def test_embeddings_repeat_to_the_same_bits(form: str) -> None:
    start = nn.Sequential(nn.Embedding(4, 64), nn.Flatten(), nn.Linear(64 * 50, 4)).cuda()
    x = torch.randint(0, 4, (16, 50)).cuda()
    y = torch.randn(16, 4).cuda()
    ends = []
    for _ in range(4):
        model = copy.deepcopy(start)
        opt = pb.NaturalGradient(model, MSE, S.Cholesky(1e-2), gram=form)
        opt.step(closure_of(opt, model, x, y))
        ends.append(vector(model))
    assert all(torch.equal(e, ends[0]) for e in ends)


def test_a_model_moved_after_the_optimizer_was_made() -> None:
    model = mlp()
    opt = pb.NaturalGradient(model, MSE, S.Cholesky(1e-2), T.Spring())
    x, y = data()
    opt.step(closure_of(opt, model, x, y))
    model.cuda()
    assert opt.step(closure_of(opt, model, x.cuda(), y.cuda())).accepted


def test_parameters_on_several_devices_are_refused() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 4).cuda()
            self.b = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x.cuda()).cpu())

    model = Split()
    x, y = data(dtype=torch.float32)
    opt = pb.NaturalGradient(model)
    with refused("several devices", "['cpu', 'cuda:0']", "Move the model to one device"):
        opt.step(closure_of(opt, model, x, y))
