"""The curves of a results file, by the experiment that made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pullback import PullbackError

from ... import registry
from ...framework.curves import Chart
from ...framework.results import Available
from ...framework.runner import opened

#: what records that were changed by hand make of a computation
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)


@dataclass(frozen=True)
class Curves:
    """What to draw, or why there is nothing; the reason is empty where none is expected."""

    charts: Sequence[Chart] = ()
    note: str = ""


def curves(path: Path, state: Mapping[str, Any]) -> Curves:
    """Those of all items that are done; experiments of others have none here."""
    name, quick = str(state["about"].get("name")), bool(state["about"].get("quick"))
    if name not in registry.names():
        return Curves()
    try:
        experiment = registry.find(name)
        if path.stem != experiment.stem(quick):
            return Curves(note=f"No curves: results of {name} are called {experiment.stem(quick)}.")
        held = opened(experiment, quick, path.parent)
        return Curves(experiment.curves(Available(held, quick)))
    except PullbackError as error:
        return Curves(note=f"No curves: {error.why}.")
    except MALFORMED as error:
        return Curves(note=f"No curves: the records were changed by hand ({error!r}).")
