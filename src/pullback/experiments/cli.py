"""The command `pullback`. Torch and the library are imported by the commands, not by their help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import __version__
from .._core.errors import PullbackError
from . import registry
from .framework.seeds import seed_range
from .framework.terminal import console as terminal
from .framework.terminal import forgiving

app = typer.Typer(
    help="Natural gradients for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

_RESULTS = Path("results")
Out = Annotated[Path, typer.Option(help="Folder of results.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]


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


@contextmanager
def refusing() -> Iterator[None]:
    """A request that cannot be met ends with its message and status 1, without a traceback."""
    try:
        yield
    except (PullbackError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None


@app.command("list")
def list_all(out: Out = _RESULTS) -> None:
    """Show the set-ups that `solve` knows and the experiments of `run`, with times found here."""
    from .commands.listing import experiments, setups

    console = terminal()
    console.print(setups(console.width))
    console.print()
    console.print(experiments(out, console.width))


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="An experiment; `pullback list` shows them.")],
    quick: Annotated[bool, typer.Option("--quick", help="The short version.")] = False,
    seeds: Annotated[str | None, typer.Option(help="Such as 0-9 or 0,3,5.")] = None,
    device: Device = "cpu",
    out: Out = _RESULTS,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop after so long; the same command goes on.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Seeds and items in so many processes.")] = 1,
) -> None:
    """Repeat a paper's experiment; what is finished is kept and not done again.

    Status: 0 all checks are as recorded, 1 some are not, 3 there is more to do.
    """
    with refusing():
        found = registry.find(name)
        asked = None if seeds is None else seed_range(seeds)
        try:
            done = found.run(
                quick, asked, out, terminal(), device=device, seconds=seconds, workers=workers
            )
        except KeyboardInterrupt:
            kept = out / f"{found.stem(quick)}.json"
            where = f"What was finished is in {kept}" if kept.exists() else "Nothing was finished"
            words = f"Interrupted. {where}; the same command goes on."
            terminal().print(words, highlight=False, markup=False, soft_wrap=True)
            raise typer.Exit(130) from None
    raise typer.Exit(done.status)


@app.command()
def solve(
    name: Annotated[
        str, typer.Argument(help="A set-up (`pullback list` shows them), or a file my_problem.py.")
    ],
    seed: Annotated[int, typer.Option(help="Of the network and the points.")] = 0,
    steps: Annotated[int | None, typer.Option(min=0, help="At most so many.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Stop after so long.")] = None,
    device: Device = "cpu",
    out: Out = _RESULTS,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over.")] = False,
) -> None:
    """Solve a set-up: a table here; NAME.png, NAME.json and a checkpoint in the folder.

    A file defines `problem` and, where it wants, `network` (of a seed) and `options`.
    Called again, the run goes on from its checkpoint.
    """
    from .commands.solving import solved

    given = {"steps": steps, "budget": seconds}
    with refusing():
        interrupted = solved(name, seed, given, device, out, fresh, terminal())
    if interrupted:
        raise typer.Exit(130)


@app.command()
def report(out: Out = _RESULTS) -> None:
    """Build FOLDER/report.html, one page on all results under the folder."""
    from .commands.report import write

    with refusing():
        path, left_out = write(out)
    console = terminal()
    for line in left_out:
        console.print(f"Left out: {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"Written: {path}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def bench(device: Device = "cpu") -> None:
    """Time one step of each method on this machine."""
    from .commands.bench import table
    from .framework.device import usable

    with refusing():
        where = usable(device)
        console = terminal()
        with console.status("timing"):
            found = table(where)
        console.print(found)


@app.command()
def doctor() -> None:
    """Show versions and devices, and check the numerics in a few seconds."""
    from .commands.doctor import examined

    healthy = examined(terminal())
    raise typer.Exit(0 if healthy else 1)


def main() -> None:
    """Run the command."""
    app()


if __name__ == "__main__":
    main()
