"""What this package adds to the command `pullback`, by entry points of its distribution."""

from __future__ import annotations

from typing import Annotated

import typer

from pullback.cli import SETUP_MODULES
from pullback.cli.terminal import RESULTS, Device, Out, exit_on_refusal, make_console

from . import registry

SETUP_MODULES.append("pullback_experiments.problems")


def list_all(out: Out = RESULTS) -> None:
    """Show the set-ups that `solve` knows and the experiments of `run`, with times found here."""
    from pullback.cli.setups import list_setups

    from .commands.listing import experiments

    shown = make_console()
    shown.print(list_setups())
    shown.print()
    shown.print(experiments(out, shown.width))


def run(
    name: Annotated[str, typer.Argument(help="An experiment; `pullback list` shows them.")],
    quick: Annotated[bool, typer.Option("--quick", help="The short version.")] = False,
    seeds: Annotated[str | None, typer.Option(help="Such as 0-9 or 0,3,5.")] = None,
    device: Device = "cpu",
    out: Out = RESULTS,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop after so long; the same command goes on.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Seeds and items in so many processes.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option(help="Items of this name alone; may be given again.")
    ] = None,
) -> None:
    """Repeat a paper's experiment; what is finished is kept and not done again.

    Status: 0 all checks are as recorded, 1 some are not, 3 there is more to do.
    """
    from .framework import executor
    from .framework.progress import seed_range

    with exit_on_refusal():
        experiment = registry.find(name)
        if seeds is None:
            asked = None
        else:
            asked = seed_range(seeds)
        try:
            outcome = executor.run(
                experiment, quick, asked, out, make_console(),
                device=device, seconds=seconds, workers=workers, only=only or (),
            )  # fmt: skip
        except KeyboardInterrupt:
            results_file = out / f"{experiment.stem(quick)}.json"
            if results_file.exists():
                where = f"What was finished is in {results_file}"
            else:
                where = "Nothing was finished"
            words = f"Interrupted. {where}; the same command goes on."
            make_console().print(words, highlight=False, markup=False, soft_wrap=True)
            raise typer.Exit(130) from None
    raise typer.Exit(outcome.status)


def report(out: Out = RESULTS) -> None:
    """Build FOLDER/report.html, one page on all results under the folder."""
    from .commands.report import write

    with exit_on_refusal():
        path, left_out = write(out)
    for line in [*(f"Left out: {line}" for line in left_out), f"Written: {path}"]:
        make_console().print(line, highlight=False, markup=False, soft_wrap=True)


def bench(
    name: Annotated[
        str | None, typer.Argument(help="A benchmark; without a name, the time of one step.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Options of the benchmark: `NAME -- --help`.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu, cuda or cuda:1.")] = None,
) -> None:
    """Run a benchmark, or time one step of each method on this machine."""
    with exit_on_refusal():
        if name is None:
            _time_steps(device or "cpu")
            return
        extra = list(arguments or ())
        if device is not None:
            extra += ["--device", device]
        registry.run_benchmark(name, extra)


bench.context_settings = {"ignore_unknown_options": True}  # pyright: ignore[reportFunctionMemberAccess]


def _time_steps(device: str) -> None:
    """Print how long one step of each method takes."""
    from pullback.cli.environment import require_device

    from .commands.bench import table

    usable_device = require_device(device)
    terminal = make_console()
    with terminal.status("timing"):
        times = table(usable_device)
    terminal.print(times)
    for benchmark, summary in registry.list_benchmarks().items():
        terminal.print(f"pullback bench {benchmark:24}{summary}", highlight=False, markup=False)
