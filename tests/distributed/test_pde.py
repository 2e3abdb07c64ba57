"""pde.solve on several processes: points by rank, the solution of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from math import pi
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pullback as pb
from pullback import pde
from pullback.pde.discretization.trial import Trial
from pullback.pde.judgement.validation import Validation

from .checks import Checks, only, same_everywhere, told_everywhere
from .world import HANGS, World, place, round_off

CHECKS = Checks(__name__)


def network(inputs: int = 2) -> nn.Module:
    return pde.mlp(inputs, 8, 1, seed=0).to(place())


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def compare(rank: int, problem: pde.Problem, tol: float = 0.0, **options: Any) -> None:
    """The same problem by all processes together, and by the first one alone."""
    options = {"steps": 4, "measure": 3, "progress": False, "points": 50, **options}
    tol = tol or round_off()
    inputs = problem.domain.dim
    shared_network = network(inputs)
    with torch.no_grad():
        shared_network[-1].bias += rank  # pyright: ignore  # the first process's network counts
    solution = pde.solve(problem, shared_network, **options)
    same_everywhere(flat(shared_network))
    history = solution.history
    verdict = solution.verdict
    told_everywhere((history.loss, history.trials, history.moved, solution.loss, solution.unknowns))
    told_everywhere((verdict.name, verdict.reason))
    if rank == 0:
        one = network(inputs)
        start = flat(one)
        want = pde.solve(problem, one, group=only(0), **options)
        off = (flat(one) - flat(shared_network)).norm() / (flat(one) - start).norm()
        assert off <= tol, float(off)
        agree(want, solution, tol)


def agree(want: pde.PDESolution, actual: pde.PDESolution, tol: float) -> None:
    """Raise unless two runs tell the same."""
    losses = torch.tensor([want.history.loss, actual.history.loss])
    assert (losses[0] - losses[1]).abs().max() <= tol * losses[0].abs().max()
    assert want.history.trials == actual.history.trials
    assert want.verdict.name == actual.verdict.name
    assert want.verdict.reason == actual.verdict.reason
    for name in ("validated", "moved", "restarted"):
        assert getattr(want.history, name) == getattr(actual.history, name)
    fresh = torch.tensor([want.history.fresh_loss, actual.history.fresh_loss])
    assert ((fresh[0] - fresh[1]).abs() <= tol * losses[0].abs().max()).all()
    assert abs(want.loss - actual.loss) <= tol * max(abs(want.loss), 1e-3)
    assert set(want.unknowns) == set(actual.unknowns)
    for name, value in want.unknowns.items():
        assert abs(value - actual.unknowns[name]) <= tol
    if want.spectrum is not None:
        assert actual.spectrum is not None
        assert (want.spectrum - actual.spectrum).abs().max() <= tol * want.spectrum.max()


@CHECKS.add
def more_rows_than_parameters(rank: int, size: int) -> None:
    compare(rank, pde.Poisson(dim=2))


@CHECKS.add
def more_parameters_than_rows(rank: int, size: int) -> None:
    compare(rank, pde.Poisson(dim=2), points=12)


@CHECKS.add
def fewer_points_than_processes(rank: int, size: int) -> None:
    compare(rank, pde.Poisson(dim=2), points={"equation": 2, "dirichlet": 1}, sampler="uniform")


@CHECKS.add
def random_subspaces(rank: int, size: int) -> None:
    """Each process compresses its own rows, in one subspace."""
    for points in (50, 12):
        solver = pb.solvers.Sketched(columns=10)
        compare(rank, pde.Poisson(dim=2), points=points, solver=solver, steps=3)


@CHECKS.add
def integrals(rank: int, size: int) -> None:
    """A sum over points that is squared belongs to one process, and counts on all."""
    eigenproblem = pde.Problem(
        pde.Interval(0, 1),
        [
            pde.Equation(lambda u, k: u.xx + k * u),
            pde.Dirichlet(0.0),
            pde.Integral(lambda u: u**2, 1.0),
        ],
        unknowns={"k": 8.0},
    )
    compare(rank, eigenproblem, steps=6)


@CHECKS.add
def points_that_move(rank: int, size: int) -> None:
    compare(rank, pde.Heat(1), refine=pde.Refine(every=3), sampler="sobol")
    compare(rank, pde.Heat(1), resample=4)


@CHECKS.add
def points_that_are_overfitted(rank: int, size: int) -> None:
    """All processes see that at the same step, and get the points that the first one moved."""
    options: Any = {"points": 4, "sampler": "sobol", "measure": 2, "steps": 7, "progress": False}
    compare(rank, pde.Heat(1), **options)
    net = network()
    solution = pde.solve(pde.Heat(1), net, **options)
    assert solution.history.moved == [4, 6]
    same_everywhere(flat(net), torch.tensor(solution.history.moved), torch.tensor([solution.loss]))


@CHECKS.add
def runs_that_are_stuck(rank: int, size: int) -> None:
    """All processes go on from the same kicked parameters, and keep the same best ones."""
    problem = pde.Problem(
        pde.Interval(0, 1),
        [pde.Equation(lambda u, x: u.xx + pi**2 * torch.sin(pi * x)), pde.Dirichlet(0.0)],
    )
    options: Any = {"points": 40, "steps": 50, "patience": 2, "progress": False, "seed": 3}
    net = pde.mlp(1, 3, 1, seed=0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        solution = pde.solve(problem, net, **options)
    history = solution.history
    verdict = solution.verdict
    assert history.restarted
    assert "tries" in solution.stopped
    same_everywhere(flat(net), torch.tensor(history.loss), torch.tensor(history.restarted))
    same_everywhere(torch.tensor([verdict.training_loss, verdict.fresh_loss, verdict.relative]))
    texts = [str(w.message) for w in said if issubclass(w.category, UserWarning)]
    assert any(verdict.text in text for text in texts) == (verdict.alarming and rank == 0)

    # one process measures what the verdict says, and another seed of the points something else
    counts = {"equation": 40, "dirichlet": 10}
    trial = Trial(net, {}, next(net.parameters()))
    for seed, is_equal in ((3, True), (4, False)):
        single = Validation(problem, trial, counts, solution.weights, seed)
        near = abs(single.loss(len(history)) - verdict.fresh_loss) <= 1e-12 * verdict.fresh_loss
        assert near == is_equal
        if is_equal:
            assert abs(single.relative(len(history)) - verdict.relative) <= 1e-12

    with TemporaryDirectory() as folder:
        repeated = pde.mlp(1, 3, 1, seed=0)
        path = Path(folder) / "run.pt"
        stop = history.restarted[0] + 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for last in (stop, 0):
                calls = [lambda run, info, last=last: len(run.history) == last]
                interrupted = pde.solve(
                    problem, repeated, checkpoint=path, callbacks=calls, **options
                )
        assert interrupted.history.loss == history.loss
        assert torch.equal(flat(repeated), flat(net))


@CHECKS.add
def measured_values_and_unknowns(rank: int, size: int) -> None:
    x = torch.linspace(0, 1, 13, dtype=torch.float64)[:, None]
    problem = pde.Problem(
        pde.Interval(0, 1),
        [
            pde.Equation(lambda u, k: k * u.xx + 1),
            pde.Data(x, x[:, 0] * (1 - x[:, 0])),
            pde.Dirichlet(torch.zeros(2), points=2),
        ],
        unknowns={"k": 1.0},
    )
    compare(rank, problem, steps=6)  # later ones amplify a permutation of the points to 2e-8


@CHECKS.add
def energies(rank: int, size: int) -> None:
    problem = pde.Problem(
        pde.Interval(0, 1),
        [pde.Energy(lambda u: 0.5 * u.x**2 - u), pde.Dirichlet(0.0, weight=50.0)],
    )
    compare(rank, problem, step=pb.steps.GridLineSearch(20), solver=pb.solvers.Cholesky(1e-3))


@CHECKS.add
def other_optimizers(rank: int, size: int) -> None:
    compare(rank, pde.Poisson(2), optimizer=lambda m: torch.optim.Adam(m.parameters(), 1e-2))
    with pytest.raises(pb.PullbackError, match="not told"):
        pde.solve(pde.Poisson(2), network(), optimizer=pb.NaturalGradient, progress=False)


@CHECKS.add
def any_process_stops_all(rank: int, size: int) -> None:
    def stop(run: Any, info: Any) -> bool:
        return rank == 1 and len(run.history) == 3

    solution = pde.solve(pde.Poisson(2), network(), points=40, callbacks=[stop], progress=False)
    assert solution.verdict.reason == "a callback asked for it"
    assert len(solution.history) == 3
    solution = pde.solve(pde.Poisson(2), network(), points=40, budget=1e-6, progress=False)
    same_everywhere(torch.tensor(solution.history.seconds))
    assert len(solution.history) == 1


@CHECKS.add
def slabs(rank: int, size: int) -> None:
    """The first process alone warns of what the slabs did not reach."""

    def stop(run: Any, info: Any) -> bool:
        return len(run.history) == 2

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        options: Any = {"points": 40, "progress": False, "callbacks": [stop], "slabs": 2}
        pde.solve(pde.Heat(1), network(), **options)
    assert any("alone" in str(w.message) for w in said) == (rank == 0)


@CHECKS.add
def what_is_not_finite_is_named_everywhere(rank: int, size: int) -> None:
    """A residual that is not finite at the point which process 1 has."""
    problem = pde.Problem(
        pde.Interval(0, 1),
        [pde.Equation(lambda u, x: u.xx + 1 / (x - x1)), pde.Dirichlet()],
    )
    points = problem.conditions[0].region(problem.domain).sample(12, "grid").x
    x1 = float(points[1, 0])
    with pytest.raises(pb.PullbackError, match="'equation' is not finite"):
        pde.solve(problem, network(1), points=12, sampler="grid", progress=False)


@CHECKS.add
def checkpoints(rank: int, size: int) -> None:
    """The first process writes; another number of processes goes on to the same solution."""
    problem = pde.Poisson(2)
    options: Any = {"points": 40, "progress": False}
    whole = network()
    pde.solve(problem, whole, steps=5, **options)
    with TemporaryDirectory() as folder:
        # of each process
        path = Path(folder) / "run.pt"
        other = Path(folder) / "other.pt"
        pde.solve(problem, network(), steps=3, checkpoint=path, **options)
        assert path.exists() == (rank == 0)
        if rank == 0:
            copyfile(path, other)
        repeated = network()
        solution = pde.solve(problem, repeated, steps=5, checkpoint=path, **options)
        assert len(solution.history) == 5
        assert torch.equal(flat(repeated), flat(whole))
        same_everywhere(flat(repeated))
        if rank == 0:
            single = network()
            pde.solve(problem, single, steps=5, checkpoint=other, group=only(0), **options)
            assert (flat(single) - flat(whole)).norm() <= 1e-10 * flat(whole).norm()
    dist.barrier()


@CHECKS.add
def signals(rank: int, size: int) -> None:
    """Ctrl-C or SIGTERM on one process stops all after the same step, which is saved."""
    before = signal.getsignal(signal.SIGINT)
    for number, error in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):

        def interrupt(run: Any, info: Any, number: int = number) -> None:
            if rank == 1 and len(run.history) == 3:
                os.kill(os.getpid(), number)

        net = network()
        with TemporaryDirectory() as folder:
            path = Path(folder) / "run.pt"
            options: Any = {"points": 40, "progress": False, "checkpoint": path}
            with pytest.raises(error):
                pde.solve(pde.Poisson(2), net, callbacks=[interrupt], **options)
            same_everywhere(flat(net))
            assert path.exists() == (rank == 0)
            if rank == 0:
                state = torch.load(path, weights_only=True)
                assert len(state["history"]["loss"]) == 3
        assert signal.getsignal(signal.SIGINT) == before


@CHECKS.add
def all_must_solve_the_same(rank: int, size: int) -> None:
    with pytest.raises(pb.PullbackError, match="differ in what they solve"):
        pde.solve(pde.Poisson(2), network(), points=40 + rank, progress=False)


#: long runs on the way from a bad start
LONG = ("runs_that_are_stuck", "points_that_are_overfitted", "points_that_move")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in CHECKS.functions],
)
def test_all_processes(world: World, name: str) -> None:
    CHECKS.run(world, name)


def _kill_one_process(rank: int, size: int) -> None:
    def kill(run: Any, info: Any) -> None:
        if rank == 1 and len(run.history) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    pde.solve(pde.Poisson(2), network(), points=40, callbacks=[kill], progress=False)


def test_a_lost_process_is_an_error() -> None:
    processes = World(2, seconds=20.0)
    try:
        errors = processes.errors(_kill_one_process)
    finally:
        processes.close()
    assert all(errors)
    assert HANGS not in errors


def test_processes_that_were_not_introduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(pb.PullbackError, match="init_process_group"):
        pde.solve(pde.Poisson(2), network(), progress=False)


SCRIPT = """
import sys
import torch.distributed as dist
from pullback import pde

def tell(run, info):
    if dist.get_rank() == 0 and len(run.history) == 3:
        print("three", flush=True)

dist.init_process_group("gloo")
network = pde.mlp(2, 8, 1, seed=0)
options = {"points": 40, "patience": None, "progress": False, "checkpoint": sys.argv[1]}
pde.solve(pde.Poisson(2), network, steps=100_000, callbacks=[tell], **options)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_torchrun_is_interrupted(tmp_path: Path, number: int) -> None:
    script = tmp_path / "script.py"
    saved = tmp_path / "run.pt"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", str(script), str(saved)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "three\n"
        run.send_signal(number)
        assert run.wait(25) != 0  # torchrun kills after 30 seconds
    assert len(torch.load(saved, weights_only=True)["history"]["loss"]) >= 3
