"""A process that is killed without warning goes on from its checkpoint to the same bits.

Run as a program, this file is the process: it solves every case in a child that ends by SIGKILL.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pullback import pde


@dataclass(frozen=True)
class Case:
    """A solve that ends after `saved` steps, is called again, and killed `later` steps on.

    Attributes:
        options: of `pde.solve`.
        saved: steps of the first call, whose checkpoint is left; 0 for none.
        later: steps between the checkpoint and the end; 0 is within the writing of the next one.
        slab: which slab of time this happens in.
    """

    options: dict[str, Any] = field(default_factory=dict)
    saved: int = 4
    later: int = 2
    slab: int = 0
    problem: Callable[[], pde.Problem] = lambda: pde.Poisson(1)

    def solve(self, path: Path | None, callbacks: Any = ()) -> pde.PDESolution:
        problem = self.problem()
        network = pde.mlp(problem.domain.dim, 4, len(problem.fields), seed=0)
        options = {"steps": 12, "points": 40, **self.options}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # none of them gets far
            return pde.solve(
                problem, network, checkpoint=path, callbacks=callbacks, progress=False, **options
            )

    def at(self, step: int, act: Callable[[], bool]) -> Any:
        def callback(run: pde.Run, info: Any) -> bool:
            domain = run.problem.domain
            if isinstance(domain, pde.SpaceTime):
                begins = domain.time[0]
            else:
                begins = 0.0
            is_reached = len(run.history) == step and begins == self.slab / self.options.get(
                "slabs", 1
            )
            return is_reached and act()

        return callback


def inverse_problem() -> pde.Problem:
    x = torch.linspace(0.1, 0.9, 9).double()
    return pde.Problem(
        pde.Interval(0, 1),
        [
            pde.Equation(lambda u, k: k.x * u.x + k * u.xx + 1),
            pde.Dirichlet(0.0, field="u"),
            pde.Data(x, x * (1 - x) / 2 + 0.01 * torch.sin(40 * x), field="u"),
            pde.Prior("k", mean=1.0),
        ],
        fields=("u", "k"),
    )


CASES = {
    "before the first checkpoint": Case(saved=0),
    "in the middle": Case(),
    "with moved points": Case({"refine": pde.Refine(every=2), "resample": 5}),
    "after a kick": Case({"patience": 2, "steps": 40, "points": 40}, saved=25),
    "in the second slab": Case({"slabs": 3}, slab=1, problem=lambda: pde.Heat(1)),
    "in the last slab": Case({"slabs": 2}, slab=1, saved=0, problem=lambda: pde.Heat(1)),
    "while a prior's weight is sought": Case({"steps": 30}, saved=12, problem=inverse_problem),
    "while a checkpoint is written": Case(later=0),
    "while the first one is written": Case(saved=0, later=0),
}
QUICK = ("while a checkpoint is written",)


def kill() -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    return True


def die(case: Case, path: Path) -> None:
    """Solve until the end comes; nothing after it is reached."""
    if case.saved:
        case.solve(path, [case.at(case.saved, lambda: True)])
    if case.later:
        case.solve(path, [case.at(case.saved + case.later, kill)])
    os.replace = lambda source, target: kill()  # the draft is complete, and not in place
    case.solve(path, [case.at(case.saved + 1, lambda: True)])


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("killed")
    selected = " ".join(item.name for item in request.session.items)
    names = [name for name in CASES if f"[{name}]" in selected]
    command = [sys.executable, __file__, str(out), *names]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return out


@pytest.mark.skipif(not hasattr(os, "fork"), reason="without fork")
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_killed_runs_go_on(name: str, folder: Path) -> None:
    case = CASES[name]
    path = folder / f"{name}.pt"
    left = sorted(p.name for p in folder.glob(f"{name}.pt*") if p.suffix != ".part")
    assert bool(left) == bool(case.saved or case.slab), "what was saved before is there"
    assert bool(list(folder.glob(f"{name}.pt*.part"))) == (case.later == 0)
    whole = case.solve(None)
    resumed = case.solve(path)
    assert resumed.history.loss == whole.history.loss
    assert bool(whole.history.restarted) == (name == "after a kick")
    assert all(step < case.saved for step in whole.history.restarted[:1])
    assert resumed.history.restarted == whole.history.restarted
    assert math.isfinite(resumed.loss)
    resumed_state = resumed.network.state_dict()
    whole_state = whole.network.state_dict()
    assert all(torch.equal(resumed_state[k], whole_state[k]) for k in whole_state)
    assert not list(folder.glob(f"{name}.pt*.part")), "the draft is gone"


if __name__ == "__main__":
    torch.set_num_threads(1)
    Case({"steps": 1}, problem=inverse_problem).solve(
        None
    )  # what it imports, the children need not
    for name in sys.argv[2:]:
        case = CASES[name]
        child = os.fork()
        if not child:
            try:
                die(case, Path(sys.argv[1]) / f"{name}.pt")
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status), name
        assert os.WTERMSIG(status) == signal.SIGKILL, name
