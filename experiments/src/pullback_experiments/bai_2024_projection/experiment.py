"""The three items, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pullback.kernels import gradient_norm

from ..framework.check import Check
from ..framework.curves import Chart
from ..framework.experiment import Context, Experiment, Item
from ..framework.plain import Record
from ..framework.results import Results
from ..framework.tabular import Table
from . import moves
from .charts import charts
from .checks import judged, slope
from .moves import METHODS, Scene

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDERS = (0.0, 0.5, 1.0, 2.0)


@dataclass(frozen=True, kw_only=True)
class Projection(Experiment):
    """A wide network, whose tangent space holds every move of its data, and a narrow one.

    Attributes:
        wide, narrow: hidden units and data.
        resolutions: points of the circle on which norms of ∇ℓ are computed.
        held: which claims held in the full runs.
    """

    wide: tuple[int, int] = (40, 7)
    narrow: tuple[int, int] = (2, 41)
    resolutions: Sequence[int] = tuple(2**k for k in range(6, 17))
    held: Sequence[bool] = (True,) * 9
    seeds: Sequence[int] = tuple(range(5))

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "wide": list(self.wide),
            "narrow": list(self.narrow),
            "scale": moves.SCALE,
            "sizes": list(moves.SIZES),
            "resolutions": list(self.resolutions),
            "orders": list(ORDERS),
        }

    def items(self, quick: bool) -> list[Item]:
        return [
            Item(("resolution",), self._resolution, once=True),
            Item(("wide",), partial(self._moves, self.wide)),
            Item(("narrow",), partial(self._moves, self.narrow)),
        ]

    def _moves(self, shape: tuple[int, int], context: Context) -> Record:
        scene = Scene.of(*shape, context.device)
        x, grid = scene.x[:, 0], scene.grid[:, 0]
        with torch.no_grad():
            f = scene.net(scene.grid)[:, 0]
        return {
            "x": x,
            "y": moves.target(x),
            "grid": grid,
            "target": moves.target(grid),
            "f": f,
            "residual": scene.residuals[:, 0],
            "gradient": scene.gradient(scene.grid)[:, 0],
            "laws": moves.projections(scene),
            "moves": {method: moves.compared(scene, method) for method in METHODS},
        }

    def _resolution(self, context: Context) -> Record:
        """‖∇ℓ‖ in H^s of a loss on three points of a circle of length 16."""
        at = torch.tensor([2.0, 5.0, 6.0], dtype=torch.float64, device=context.device)
        c = torch.tensor([1.0, -0.7, 0.4], dtype=torch.float64, device=context.device)
        norms = {
            f"{s:g}": [
                float(gradient_norm(at, c, n, order=s, length=16.0)) for n in self.resolutions
            ]
            for s in ORDERS
        }
        return {"resolution": list(self.resolutions), "norms": norms}

    def judge(self, results: Results) -> list[Check]:
        return judged(results, self.held)

    def curves(self, results: Results) -> list[Chart]:
        return charts(results)

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for name in ("wide", "narrow"):
            records = results.of(name)
            for method in METHODS:
                found = [r["moves"][method] for r in records]
                worst = max(f["error"][2] / f["size"][2] for f in found)
                orders = [slope(f["size"], f["error"]) for f in found]
                rows.append([name, method, worst, f"{min(orders):.2f} to {max(orders):.2f}"])
        columns = ["network", "step", "error at |Δf| = 0.1, relative", "order in η"]
        title = f"Predicted against actual moves at held-out points, {len(results.seeds)} seeds"
        return [Table(columns, rows, title, text=2)]

    def draw(self, results: Results) -> dict[str, Figure]:
        from .figure import draw  # matplotlib is slow to import

        return {"": draw(results)}
