"""The command `pullback`. Torch and the library are imported by the commands, not by their help."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated

import typer

from .. import __version__
from .._core.errors import PullbackError
from .terminal import (
    RESULTS,
    Device,
    Out,
    exit_on_refusal,
    make_console,
    replace_unknown_characters,
    show_plain_warnings,
)

app = typer.Typer(
    help="Natural gradients for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"pullback {__version__}")
        raise typer.Exit


@app.callback()
def _group(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Natural gradients for PyTorch."""
    replace_unknown_characters()
    show_plain_warnings()


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
    from .setups import SolveRequest, list_setups, solve_setup

    if name is None:
        make_console().print(list_setups())
        return

    options = {"steps": steps, "budget": seconds}
    request = SolveRequest(
        name=name,
        seed=seed,
        options={key: value for key, value in options.items() if value is not None},
        device=device,
        out=out,
        fresh=fresh,
    )
    with exit_on_refusal():
        is_finished = solve_setup(request, make_console())
    if not is_finished:
        raise typer.Exit(130)


@app.command()
def doctor() -> None:
    """Show versions and devices, and check the numerics in a few seconds."""
    from .doctor import examine

    is_healthy = examine(make_console())
    raise typer.Exit(0 if is_healthy else 1)


#: commands of the package pullback-experiments
LABORATORY_COMMANDS = ("run", "list", "report", "bench")


def _add_installed_commands() -> None:
    """Add the commands of other packages, and for missing ones a word on what to install."""
    commands = {command.name: command for command in entry_points(group="pullback.commands")}
    for name, command in commands.items():
        function = command.load()
        settings = getattr(function, "context_settings", None)
        app.command(name, context_settings=settings)(function)
    for name in LABORATORY_COMMANDS:
        if name not in commands:
            settings = {"ignore_unknown_options": True, "allow_extra_args": True}
            app.command(name, hidden=True, context_settings=settings)(refuse_missing_command)


def refuse_missing_command(context: typer.Context) -> None:
    """Exit with a message that names the package of the command."""
    with exit_on_refusal():
        raise PullbackError(
            f"`pullback {context.info_name}` is not installed",
            "it belongs to the package pullback-experiments",
            "Install it: `pip install ./experiments` in a clone",
        )


_add_installed_commands()
