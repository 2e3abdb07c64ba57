"""The experiment: examples once, theorems for every seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..framework.check import Check
from ..framework.experiment import Experiment, Item
from ..framework.results import Results
from ..framework.tabular import Table
from . import examples, theorems
from .checks import judged
from .theorems import INVERSES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = "van Oostrum, Müller and Ay (2023), Invariance Properties of the Natural Gradient"
_ABOUT = (
    "The paper has no experiments: its examples are at its own points, the random maps are ours. "
    "float64. A.2 is computed as corrected: the curve crosses itself at 0 and π."
)
SIZES = tuple(10.0**-k for k in range(1, 6))


@dataclass(frozen=True, kw_only=True)
class Examples(Experiment):
    """Theorems 1 and 2, and the examples."""

    name: str = "van-oostrum-2023-examples"
    paper: str = PAPER
    figure: str = "Theorems 1–2, Examples 1–2, A.3"
    claim: str = (
        "the natural parameter gradient moves the model by the projected gradient, in all "
        "coordinates alike; in other coordinates it is another vector"
    )
    about: str = _ABOUT
    quick_seeds: Sequence[int] = (0, 1, 2)

    def config(self, quick: bool) -> dict[str, Any]:
        shape = [theorems.INPUTS, theorems.INNER, theorems.OUTPUTS]
        return {"maps": shape, "inverses": list(INVERSES), "sizes": list(SIZES)}

    def items(self, quick: bool) -> list[Item]:
        return [
            Item(("example 1",), examples.rotated, once=True),
            Item(("example 2",), examples.crossing, once=True),
            Item(("A.3",), examples.parameters, once=True),
            Item(("theorems",), theorems.theorems),
            Item(("steps",), partial(theorems.steps, SIZES)),
        ]

    def judge(self, results: Results) -> list[Check]:
        return judged(results)

    def tables(self, results: Results) -> list[Table]:
        runs = results.of("theorems")
        rows = [
            [name, *(max(r[what][name] for r in runs) for what in ("projection", "model", "space"))]
            for name in INVERSES
        ]
        columns = ["G⁻", "from Π grad L", "from ψ's move", "as parameter vectors"]
        title = f"Largest relative differences over {len(results.seeds)} random maps"
        return [Table(columns, rows, title)]

    def draw(self, results: Results) -> dict[str, Figure]:
        from .figure import draw  # matplotlib is slow to import

        return {"": draw(results)}
