"""A PDE in one line of the terminal."""

from __future__ import annotations

import inspect
import runpy
import sys
import traceback
from collections.abc import Callable
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
from .environment import usable
from .files import folder
from .record import described, parameters, report, summary, write
from .terminal import columns


def solved(
    name: str,
    seed: int,
    given: dict[str, Any],
    device: str,
    out: Path,
    fresh: bool,
    console: Console,
) -> bool:
    """Solve a set-up, from its checkpoint where there is one; whether it was interrupted.

    `given` are options that replace the set-up's own, None where they do not.
    """
    if name in _experiments():
        raise PullbackError(
            f"{name} cannot be solved", "it is an experiment", f"Use `pullback run {name}`"
        )
    if name.endswith(".py"):
        found, name = from_file(Path(name)), Path(name).stem
    else:
        _add_setups()
        found = pde.setup(name)
    with import_extra("plots"):  # before the run, not after it
        import_module("matplotlib")
    usable(device)
    folder(out)
    kept = out / f"{name}-seed{seed}.pt"
    if fresh:
        for file in checkpoints(kept):
            file.unlink()
    elif checkpoints(kept):
        words = f"Going on from {kept} (--fresh starts over)"
        console.print(words, highlight=False, markup=False, soft_wrap=True)
    options = {**found.options, **{k: v for k, v in given.items() if v is not None}}
    try:
        solution = found.solve(seed, **options, device=device, checkpoint=kept)
    except KeyboardInterrupt:
        where = f"The run so far is in {kept}; the same command goes on from there."
        left = where if checkpoints(kept) else "Nothing was saved yet."
        console.print(f"Interrupted. {left}", highlight=False, markup=False, soft_wrap=True)
        return True
    console.print(summary(solution))
    stem = name if seed == 0 else f"{name}-seed{seed}"  # one does not overwrite the other
    picture, record = out / f"{stem}.png", out / f"{stem}.json"
    write(record, report(name, found, seed, device, options, solution))
    solution.plot(picture)
    words = f"Written: {picture}, {record}, {kept}"
    console.print(words, highlight=False, markup=False, soft_wrap=True)
    return False


def setups() -> Table:
    """The set-ups that `solve` knows."""
    table = columns("name", heading="set-ups: pullback solve NAME")
    table.add_column("equation; network", overflow="fold")
    _add_setups()
    for name in pde.SETUPS:
        found = pde.setup(name)
        network, slabs = found.network(0), found.options.get("slabs", 1)
        slabs = slabs if isinstance(slabs, int) else len(slabs) + 1
        words = f"{slabs} × {described(network)}" if slabs > 1 else described(network)
        equation = getattr(found.problem, "equation", "")
        count = f"{slabs * parameters(network):,} parameters"
        table.add_row(name, f"{equation}; {words}, {count}")
    return table


def _add_setups() -> None:
    """Let other packages add theirs to `pde.SETUPS`."""
    for module in SETUP_MODULES:
        import_module(module)


def _experiments() -> list[str]:
    """Names of the command `run`, where a package adds it."""
    found = entry_points(group="pullback.experiments")
    return [name for names in found for name in names.load()()]


def from_file(path: Path) -> pde.Setup:
    """The set-up that a Python file describes.

    The file defines `problem`; where it wants, `network` (a function of the seed) and `options` of
    `pde.solve`.
    """
    defined = _executed(path)
    problem = defined.get("problem")
    if not isinstance(problem, pde.Problem):
        raise PullbackError(
            f"{path} defines no problem",
            f"its name problem is {problem!r}",
            "Write problem = pde.Problem(...) in it",
        )
    make: Callable[[int], nn.Module] = defined.get(
        "network", lambda seed: pde.network_for(problem, seed=seed)
    )
    if isinstance(make, nn.Module) or not callable(make):
        raise PullbackError(
            f"The network of {path} is no function",
            f"got {make!r}",
            "Write network = lambda seed: pde.mlp(2, 20, 20, 1, seed=seed)",
        )
    return pde.Setup(
        problem, partial(_made, path, make), _options(path, defined.get("options", {}))
    )


def _executed(path: Path) -> dict[str, Any]:
    """The names that a file defines; it may import what lies beside it."""
    if not path.is_file():
        raise PullbackError(f"There is no file {path}", "it does not exist", "Check the path")
    sys.path.insert(0, str(path.resolve().parent))
    try:
        return runpy.run_path(str(path))
    except PullbackError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
        raise PullbackError(
            f"{path} cannot be run",
            f"line {line}: {type(error).__name__}: {error}",
            f"Mend it; `python {path}` shows where it came from",
        ) from error


def _made(path: Path, make: Callable[[int], nn.Module], seed: int) -> nn.Module:
    """The file's network for a seed."""
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


def _options(path: Path, options: object) -> dict[str, Any]:
    """The file's options of `pde.solve`; device and checkpoint are the command's."""
    known = inspect.signature(pde.solve).parameters.keys()
    known -= {"problem", "network", "seed", "device", "checkpoint"}
    if not isinstance(options, dict):
        raise PullbackError(
            f"The options of {path} are no dict", f"got {options!r}", 'Write {"points": 1000}'
        )
    for name in options.keys() - known:
        flags = ("seed", "device")
        raise PullbackError(
            f"The options of {path} have an unknown name {name!r}",
            f"the command has --{name}"
            if name in flags
            else describe_nearest_names(str(name), sorted(known)),
            "Use names of pde.solve's arguments",
        )
    return dict(options)


def checkpoints(path: Path) -> list[Path]:
    """The files of a run: slabs of time have one each, with their number behind the name."""
    return [p for p in path.parent.glob(f"{path.name}*") if p.suffix != ".part"]
