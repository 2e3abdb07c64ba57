"""The command `pullback`. Torch and the library are imported by the commands, not by their help."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated

import typer

from .. import __version__
from .terminal import RESULTS, Device, Out, console, forgiving, refusing

app = typer.Typer(
    help="Natural gradients for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pullback {__version__}")
        raise typer.Exit


@app.callback()
def _group(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Natural gradients for PyTorch."""
    forgiving()


@app.command()
def solve(
    name: Annotated[
        str | None, typer.Argument(help="A set-up, or a file my_problem.py; none: show set-ups.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the network and the points.")] = 0,
    steps: Annotated[int | None, typer.Option(min=0, help="At most so many.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Stop after so long.")] = None,
    device: Device = "cpu",
    out: Out = RESULTS,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over.")] = False,
) -> None:
    """Solve a set-up: a table here; NAME.png, NAME.json and a checkpoint in the folder.

    A file defines `problem` and, where it wants, `network` (of a seed) and `options`.
    Called again, the run goes on from its checkpoint.
    """
    from .solving import setups, solved

    if name is None:
        console().print(setups())
        return

    given = {"steps": steps, "budget": seconds}
    with refusing():
        interrupted = solved(name, seed, given, device, out, fresh, console())
    if interrupted:
        raise typer.Exit(130)


@app.command()
def doctor() -> None:
    """Show versions and devices, and check the numerics in a few seconds."""
    from .doctor import examined

    healthy = examined(console())
    raise typer.Exit(0 if healthy else 1)


for command in entry_points(group="pullback.commands"):
    app.command(command.name)(command.load())
