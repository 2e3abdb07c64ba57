"""Set-ups of PDEs: those with a name, those that a file describes, and the command `solve`."""

from __future__ import annotations

import inspect
import runpy
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from .. import pde
from .._core.errors import PullbackError, describe_nearest_names, import_extra
from . import SETUP_MODULES
from .environment import require_device
from .files import make_folder
from .record import count_parameters, describe_network, make_report, summarize, write
from .terminal import make_table


@dataclass(frozen=True)
class SolveRequest:
    """What the command `solve` was called with.

    Attributes:
        name: of a set-up, or a Python file that describes one.
        seed: of the network and the points.
        options: of `pde.solve`; they replace the set-up's own.
        device: where to run.
        out: the folder of results.
        fresh: whether to delete checkpoints first.
    """

    name: str
    seed: int
    options: dict[str, Any]
    device: str
    out: Path
    fresh: bool

    @property
    def stem(self) -> str:
        """The name of the set-up, without folder and suffix."""
        return Path(self.name).stem if self.is_file else self.name

    @property
    def is_file(self) -> bool:
        """Return True if the name is that of a Python file."""
        return self.name.endswith(".py")

    @property
    def checkpoint(self) -> Path:
        """The file from which a run goes on."""
        return self.out / f"{self.stem}-seed{self.seed}.pt"

    def result(self, suffix: str) -> Path:
        """Return the file of a picture or record; seeds do not overwrite each other."""
        if self.seed == 0:
            return self.out / f"{self.stem}.{suffix}"
        return self.out / f"{self.stem}-seed{self.seed}.{suffix}"


def solve_setup(request: SolveRequest, console: Console) -> bool:
    """Solve a set-up, from its checkpoint if there is one; return False if interrupted."""
    setup = _find_setup(request)
    with import_extra("plots"):  # before the run, not after it
        import_module("matplotlib")
    require_device(request.device)
    make_folder(request.out)
    _prepare_checkpoint(request, console)
    options = {**setup.options, **request.options}
    try:
        solution = setup.solve(
            request.seed, **options, device=request.device, checkpoint=request.checkpoint
        )
    except KeyboardInterrupt:
        remark = "Nothing was saved yet."
        if list_checkpoints(request.checkpoint):
            checkpoint = request.checkpoint
            remark = f"The run so far is in {checkpoint}; the same command goes on from there."
        _print_line(console, f"Interrupted. {remark}")
        return False
    console.print(summarize(solution))
    picture = request.result("png")
    record = request.result("json")
    report = make_report(request.name, setup, request.seed, request.device, options, solution)
    write(record, report)
    solution.plot(picture)
    _print_line(console, f"Written: {picture}, {record}, {request.checkpoint}")
    return True


def _find_setup(request: SolveRequest) -> pde.Setup:
    if request.name in _list_experiments():
        raise PullbackError(
            f"{request.name} cannot be solved",
            "it is an experiment",
            f"Use `pullback run {request.name}`",
        )
    if request.is_file:
        return load_setup(Path(request.name))
    _add_setups()
    return pde.setup(request.name)


def _prepare_checkpoint(request: SolveRequest, console: Console) -> None:
    """Delete checkpoints if a fresh start was asked for; otherwise say that the run goes on."""
    files = list_checkpoints(request.checkpoint)
    if request.fresh:
        for file in files:
            file.unlink()
    elif files:
        _print_line(console, f"Going on from {request.checkpoint} (--fresh starts over)")


def _print_line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def list_setups() -> Table:
    """Return a table of the set-ups that `solve` knows."""
    table = make_table("name", heading="set-ups: pullback solve NAME")
    table.add_column("equation; network", overflow="fold")
    _add_setups()
    for name in pde.SETUPS:
        setup = pde.setup(name)
        network = setup.network(0)
        slabs = setup.options.get("slabs", 1)
        if not isinstance(slabs, int):  # the times between slabs
            slabs = len(slabs) + 1
        widths = describe_network(network)
        if slabs > 1:
            widths = f"{slabs} × {widths}"
        equation = getattr(setup.problem, "equation", "")
        count = slabs * count_parameters(network)
        table.add_row(name, f"{equation}; {widths}, {count:,} parameters")
    return table


def _add_setups() -> None:
    """Import the modules by which other packages add set-ups to `pde.SETUPS`."""
    for module in SETUP_MODULES:
        import_module(module)


def _list_experiments() -> list[str]:
    """Return the names that the command `run` knows, if a package adds that command."""
    names: list[str] = []
    for entry_point in entry_points(group="pullback.experiments"):
        names += entry_point.load()()
    return names


def load_setup(path: Path) -> pde.Setup:
    """Return the set-up that a Python file describes.

    The file defines `problem` and may define `network`, a function of the seed, and `options` of
    `pde.solve`.
    """
    names = _execute(path)
    problem = names.get("problem")
    if not isinstance(problem, pde.Problem):
        raise PullbackError(
            f"{path} defines no problem",
            f"its name problem is {problem!r}",
            "Write problem = pde.Problem(...) in it",
        )

    def default_network(seed: int) -> nn.Module:
        return pde.network_for(problem, seed=seed)

    make: Callable[[int], nn.Module] = names.get("network", default_network)
    if isinstance(make, nn.Module) or not callable(make):
        raise PullbackError(
            f"The network of {path} is no function",
            f"got {make!r}",
            "Write network = lambda seed: pde.mlp(2, 20, 20, 1, seed=seed)",
        )
    options = _check_options(path, names.get("options", {}))
    return pde.Setup(problem, partial(_make_network, path, make), options)


def _execute(path: Path) -> dict[str, Any]:
    """Return the names that a file defines; it may import modules of its folder."""
    if not path.is_file():
        raise PullbackError(f"There is no file {path}", f"looked in {Path.cwd()}", "Check the path")
    sys.path.insert(0, str(path.resolve().parent))
    try:
        return runpy.run_path(str(path))
    except PullbackError:
        raise
    except Exception as error:
        raise PullbackError(
            f"{path} cannot be run",
            f"line {_find_line(error, path)}: {type(error).__name__}: {error}",
            f"Mend it; `python {path}` shows where it came from",
        ) from error


def _find_line(error: Exception, path: Path) -> int | None:
    """Return the line of the file at which the error arose."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    if not lines:
        return None
    return lines[-1]


def _make_network(path: Path, make: Callable[[int], nn.Module], seed: int) -> nn.Module:
    """Return the file's network for a seed."""
    try:
        inspect.signature(make).bind(seed)
    except TypeError as error:
        raise PullbackError(
            f"The network of {path} takes no seed",
            str(error),
            "Write network = lambda seed: pde.mlp(2, 20, 20, 1, seed=seed)",
        ) from error
    network = make(seed)
    if not isinstance(network, nn.Module):
        raise PullbackError(
            f"The network of {path} is no module",
            f"for seed {seed} the function returned {network!r}",
            "Return a torch.nn.Module, such as pde.mlp(2, 20, 20, 1, seed=seed)",
        )
    return network


def _check_options(path: Path, options: object) -> dict[str, Any]:
    """Return the file's options of `pde.solve`; device and checkpoint are the command's."""
    known = inspect.signature(pde.solve).parameters.keys()
    known -= {"problem", "network", "seed", "device", "checkpoint"}
    if not isinstance(options, dict):
        raise PullbackError(
            f"The options of {path} are no dict", f"got {options!r}", 'Write {"points": 1000}'
        )
    for name in options.keys() - known:
        why = describe_nearest_names(str(name), sorted(known))
        if name in ("seed", "device"):
            why = f"the command has --{name}"
        raise PullbackError(
            f"The options of {path} have an unknown name {name!r}",
            why,
            "Use names of pde.solve's arguments",
        )
    return dict(options)


def list_checkpoints(path: Path) -> list[Path]:
    """Return the files of a run: slabs of time have one each, numbered after the name."""
    return [p for p in path.parent.glob(f"{path.name}*") if p.suffix != ".part"]
