"""NaturalGradient on several processes takes the steps of one process on the joined batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pullback as pb

from .checks import Checks, only, same_everywhere, told_everywhere
from .world import World, place, round_off

CHECKS = Checks(__name__)
SIZE = 3
CUTS = (0, 5, 5, 12)  # process 1 has no samples


def mlp(width: int = 6, outputs: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, outputs)).to(place())


def conv() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)
    return nn.Sequential(*layers).to(place())


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.gate = nn.Parameter(torch.tensor([0.5, -0.2, 0.3, 1.0]))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.gate * self.norm(self.table(x))).mean(1))


def batch(model_name: str = "points", count: int = CUTS[-1]) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    shapes = {"points": (4,), "images": (1, 4, 4)}
    if model_name == "tokens":
        x = torch.randint(0, 7, (count, 5), generator=g)
    else:
        x = torch.randn(count, *shapes[model_name], generator=g)
    return x.to(place()), torch.randint(0, 3, (count,), generator=g).to(place())


def steps(
    opt: Any, call: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, scale: float, number: int
) -> list[Any]:
    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(call(x), y, reduction="sum") * scale
        loss.backward()
        return loss

    return [opt.step(closure) for _ in range(number)]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def compare(
    rank: int,
    model: nn.Module,
    make: Callable[..., Any],
    data: tuple[Tensor, Tensor],
    *,
    wrap: bool = True,
    cuts: tuple[int, ...] = CUTS,
    number: int = 4,
    tol: float = 1e-10,
) -> list[Any]:
    """Steps of all processes on their samples are those of the first one alone on all samples."""
    x, y = data
    shared = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # also on a process without samples, which measures nothing
        warnings.filterwarnings("error", message=".*the measured output does not")
        if wrap:
            outer = DDP(shared)
        else:
            outer = shared
        sharing = make(outer, **({} if wrap else {"group": dist.group.WORLD}))
        rows = slice(cuts[rank], cuts[rank + 1])
        infos = steps(sharing, outer, x[rows], y[rows], SIZE / len(x), number)
        same_everywhere(flat(shared))
        told_everywhere([(i.accepted, i.gram, i.rows, i.trials, i.loss) for i in infos])
        if rank == 0:
            single = copy.deepcopy(model)
            one = make(single, group=only(0))
            want = steps(one, single, x, y, 1 / len(x), number)
            agree(want, infos, tol)
            moved = (flat(single) - flat(model)).norm()
            assert (flat(single) - flat(shared)).norm() <= tol * moved
    return infos


def agree(want: list[Any], actual: list[Any], tol: float) -> None:
    """Raise unless the steps are the same, and some were taken."""
    assert any(info.accepted for info in want)
    for a, b in zip(want, actual, strict=True):
        assert (a.accepted, a.gram, a.rows, a.trials) == (b.accepted, b.gram, b.rows, b.trials)
        assert abs(a.loss - b.loss) <= tol * max(1, abs(a.loss))


FISHER = {"likelihood": pb.likelihoods.Categorical()}


def natural(solver: Any = None, step: Any = None, **options: Any) -> Callable[..., Any]:
    def make(model: nn.Module, **group: Any) -> Any:
        return pb.NaturalGradient(model, None, solver, step, **FISHER, **options, **group)

    return make


@CHECKS.add
def sample_space_by_the_kernel(rank: int, size: int) -> None:
    infos = compare(rank, mlp(16), natural(pb.solvers.Cholesky(1e-2)), batch())
    assert infos[0].gram == "kernel"


@CHECKS.add
def what_is_sent(rank: int, size: int) -> None:
    """Inputs and cotangents, and not rows of J, which take forty times as much here."""
    model = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh())
    outer = DDP(nn.Sequential(model, nn.Linear(300, 3)).to(place()))
    opt = natural(pb.solvers.Cholesky(1e-2), pb.steps.Constant(1.0))(outer)
    x, y = batch()
    share = slice(4 * rank, 4 * rank + 4)
    before = opt.traffic()
    assert steps(opt, outer, x[share], y[share], 1 / 4, 1)[0].gram == "kernel"
    after = opt.traffic()
    sent = {k: v.bytes - (before[k].bytes if k in before else 0) for k, v in after.items()}
    p = sum(w.numel() for w in outer.parameters())
    rows = 4 * 3
    widths = 4 * (4 + 300 + 300) + rows * (300 + 300 + 3)
    assert sent["objects"] <= 1.1 * 8 * widths * (size - 1)
    assert sent["kernel"] <= 8 * (size * rows) ** 2
    assert sent["objects"] < 8 * rows * p * (size - 1) / 40
    assert sum(sent.values()) <= 1.2 * (sent["objects"] + sent["kernel"] + 4 * 8 * p)


@CHECKS.add
def sample_space_by_rows(rank: int, size: int) -> None:
    make = natural(pb.solvers.PseudoInverse(), pb.steps.TargetRatio())
    infos = compare(rank, mlp(16), make, batch())
    assert infos[0].gram == "rows"


@CHECKS.add
def parameter_space_by_products(rank: int, size: int) -> None:
    # 120 and 60 rows, 51 parameters
    cuts = (0, 40, 40, 60)
    data = batch(count=60)
    infos = compare(rank, mlp(), natural(pb.solvers.Cholesky(1e-3)), data, cuts=cuts)
    assert (infos[0].gram, infos[0].rows, infos[0].parameters) == ("rows", 180, 51)


@CHECKS.add
def parameter_space_by_the_spectrum(rank: int, size: int) -> None:
    make = natural(pb.solvers.PseudoInverse(1e-8), pb.steps.TargetRatio())
    compare(rank, mlp(), make, batch(count=60), cuts=(0, 10, 10, 60))


@CHECKS.add
def parameter_space_by_the_summed_gram(rank: int, size: int) -> None:
    make = natural(pb.solvers.Cholesky(1e-2), gram="dense")
    compare(rank, mlp(), make, batch(count=60), cuts=(0, 40, 40, 60))


@CHECKS.add
def products_alone(rank: int, size: int) -> None:
    make = natural(pb.solvers.ConjugateGradient(1e-1, tol=1e-13), pb.steps.Constant(1.0))
    infos = compare(rank, mlp(), make, batch(), number=3)
    assert infos[0].gram == "matrix_free"


@CHECKS.add
def convolutions(rank: int, size: int) -> None:
    compare(rank, conv(), natural(pb.solvers.Cholesky(1e-2)), batch("images"))


@CHECKS.add
def embeddings_norms_and_gates(rank: int, size: int) -> None:
    compare(rank, Tokens().to(place()), natural(pb.solvers.Cholesky(1e-2)), batch("tokens"))


@CHECKS.add
def levenberg_marquardt(rank: int, size: int) -> None:
    def make(model: nn.Module, **group: Any) -> Any:
        options = {"likelihood": pb.likelihoods.Categorical(), **group}
        return pb.optim.DampedGaussNewton(model, **options)

    compare(rank, mlp(), make, batch())


@CHECKS.add
def hessian_free(rank: int, size: int) -> None:
    """Truncated conjugate gradients magnify round-off as they do with samples in another order."""
    x, y = batch(count=60)

    def run(selected: Any, group: Any) -> tuple[Tensor, Tensor]:
        model = mlp()
        opt = pb.optim.HessianFree(model, pb.likelihoods.Categorical(), group=group)
        scale = dist.get_world_size(group) / 60
        infos = steps(opt, model, x[selected], y[selected], scale, 3)
        assert all(info.accepted for info in infos)
        return torch.tensor([info.loss for info in infos], device=place()), flat(model)

    shared = run(slice(20 * rank, 20 * rank + 20), dist.group.WORLD)
    same_everywhere(*shared)
    if rank == 0:
        other = torch.randperm(60, generator=torch.Generator().manual_seed(0)).to(place())
        whole = run(slice(0, 60), only(0))
        permuted = run(other, only(0))
        for want, order, solution in zip(whole, permuted, shared, strict=True):
            assert (solution - want).norm() <= 100 * (order - want).norm() + 1e-9 * want.norm()
        assert (shared[1] - whole[1]).norm() <= 1e-3 * whole[1].norm()


@CHECKS.add
def spring_and_a_plain_module(rank: int, size: int) -> None:
    make = natural(pb.solvers.Cholesky(1e-2), pb.steps.Spring(step=pb.steps.GridLineSearch(8)))
    compare(rank, mlp(), make, batch(), wrap=False)


@CHECKS.add
def greedy(rank: int, size: int) -> None:
    make = natural(pb.solvers.OrthogonalGreedy(8, damping=1e-3))
    compare(rank, mlp(), make, batch())
    compare(rank, mlp(16), make, batch())


@CHECKS.add
def sketches(rank: int, size: int) -> None:
    solver = pb.solvers.Sketched(rows=20, damping=1e-2)
    compare(rank, mlp(16), natural(solver, gram="kernel"), batch(), number=4)


@CHECKS.add
def accumulated_calls(rank: int, size: int) -> None:
    """Two forward calls in a closure, of which the last process makes none."""
    x, y = batch()
    model = mlp(16)
    single = copy.deepcopy(model)
    shared = copy.deepcopy(model)

    def run(opt: Any, net: nn.Module, halves: list[slice], scale: float) -> None:
        def closure() -> Tensor:
            opt.zero_grad()
            total = torch.zeros((), device=place())
            for selected in halves:
                total = (
                    total + F.cross_entropy(net(x[selected]), y[selected], reduction="sum") * scale
                )
            if halves:
                total.backward()
            return total.detach()

        for _ in range(3):
            assert opt.step(closure).accepted

    make = natural(pb.solvers.Cholesky(1e-2))
    shares = [[slice(0, 3), slice(3, 4)], [slice(4, 12)], []][rank]
    run(make(shared, group=dist.group.WORLD), shared, shares, SIZE / 12)
    same_everywhere(flat(shared))
    if rank == 0:
        run(make(single, group=only(0)), single, [slice(0, 7), slice(7, 12)], 1 / 12)
        assert (flat(single) - flat(shared)).norm() <= 1e-10 * flat(single).norm()


@CHECKS.add
def objectives(rank: int, size: int) -> None:
    """Means over the points of all processes, one of which has none."""
    x, _ = batch()
    model = mlp(outputs=1)
    single = copy.deepcopy(model)
    shared = copy.deepcopy(model)

    def objective(net: nn.Module, x: Tensor) -> Callable[..., Any]:
        def residuals(params: dict[str, Tensor]) -> Any:
            z = torch.func.functional_call(net, params, (x,))[:, 0]
            return {"fit": (z - x[:, 0].sin(), 2.0), "size": 0.1 * z[: len(z) // 2 * 2]}

        return residuals

    options: Any = {"solver": pb.solvers.PseudoInverse(1e-8), "step": pb.steps.TargetRatio()}
    sharing = pb.NaturalGradient(shared, **options, group=dist.group.WORLD)
    local_objective = objective(shared, x[[slice(0, 4), slice(0, 0), slice(4, 12)][rank]])
    infos = [sharing.step(objective=local_objective) for _ in range(4)]
    same_everywhere(flat(shared))
    told_everywhere([(info.loss, info.rows) for info in infos])
    if rank == 0:
        one = pb.NaturalGradient(single, **options, group=only(0))
        for b in infos:
            a = one.step(objective=objective(single, x))
            assert abs(a.loss - b.loss) <= round_off()
            assert a.rows == b.rows
        # flat directions, in which parameters differ more than losses
        assert (flat(single) - flat(shared)).norm() <= 100 * round_off() * flat(single).norm()


@CHECKS.add
def a_nan_on_one_process_is_rejected_by_all(rank: int, size: int) -> None:
    x, y = batch()
    for poison in ("input", "loss"):
        model = mlp(16)
        outer = DDP(model)
        opt = natural(pb.solvers.Cholesky(1e-2))(outer)
        if rank == 2 and poison == "input":
            x2 = torch.full_like(x, torch.nan)
        else:
            x2 = x
        before = flat(model)
        saved = f"{opt.state_dict()}"
        if rank == 2 and poison == "loss":
            scale = float("nan")
        else:
            scale = 1 / 12
        info = steps(opt, outer, x2, y, scale, 1)[0]
        assert not info.accepted
        assert "not finite" in info.reason
        assert torch.equal(before, flat(model))
        assert saved == f"{opt.state_dict()}"
        assert steps(opt, outer, x, y, 1 / 12, 1)[0].accepted
        same_everywhere(flat(model))


@CHECKS.add
def an_error_on_one_process_is_an_error_on_all(rank: int, size: int) -> None:
    x, y = batch()
    model = mlp()
    opt = natural()(model, group=dist.group.WORLD)
    # depends on the model's parameters
    if rank == 1:
        x2 = model(x) @ x.new_ones(3, 4)
    else:
        x2 = x
    with pytest.raises(pb.PullbackError, match="input depends on" if rank == 1 else "Process 1"):
        steps(opt, model, x2, y, 1.0, 1)
    assert steps(opt, model, x, y, 1 / 12, 1)[0].accepted


@CHECKS.add
def what_the_processes_must_be_told(rank: int, size: int) -> None:
    model = mlp()
    with pytest.raises(pb.PullbackError, match="DistributedDataParallel"):
        natural()(model)
    with pytest.raises(pb.PullbackError, match="differ in their options"):
        natural(pb.solvers.Cholesky(1.0 + rank))(model, group=dist.group.WORLD)
    with torch.no_grad():
        model[0].weight += rank  # pyright: ignore
    opt = natural()(model, group=dist.group.WORLD)
    same_everywhere(flat(model))
    opt.param_groups[0]["lr"] = 1.0 + rank
    before = flat(model)
    with pytest.raises(pb.PullbackError, match="learning rates"):
        steps(opt, model, *batch(), 1 / 12, 1)
    assert torch.equal(before, flat(model))


@CHECKS.add
def metrics_that_couple_samples_are_refused(rank: int, size: int) -> None:
    x, y = batch()
    model = mlp()
    opt = pb.NaturalGradient(model, pb.metrics.Sobolev(1.0), group=dist.group.WORLD)
    with pytest.raises(pb.PullbackError, match="couples the samples"):
        steps(opt, model, x, y, 1 / 12, 1)


@pytest.mark.parametrize("name", CHECKS.functions)
def test_all_processes(world: World, name: str) -> None:
    CHECKS.run(world, name)
