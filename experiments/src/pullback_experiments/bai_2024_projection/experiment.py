"""The three items, and the laws of the projection view as checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import linear_regression
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..framework.check import Check, Claim, make_checks
from ..framework.curves import Chart
from ..framework.experiment import Context, Experiment, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table
from . import moves
from .figures import charts
from .moves import METHODS, NetworkData

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ORDERS = (0.0, 0.5, 1.0, 2.0)


def gradient_norm(
    points: Tensor, residuals: Tensor, resolution: int, *, order: float = 0.0, length: float = 20.0
) -> Tensor:
    r"""‖∇ℓ‖ in H^s of a circle with n = `resolution` points, for ℓ(f) = Σ_i L(f(x_i)).

    The inner product ⟨f, g⟩ = ∫ f (1 − ∂²)^s g is a matrix M, and ∇ℓ = M⁻¹Σ_i e_i δ_i. In L²
    (s = 0) its norm grows as √n without end: the gradient is a sum of delta functions, which are
    not in the space. It converges, to the reproducing kernel's value, exactly for s > 1/2.

    Args:
        points: x_i, (k,), rounded to the grid.
        residuals: e_i = L'(f(x_i)), (k,).
        resolution: n.
        order: s.
        length: of the circle. On a long one the kernels are those of the line, ½e^(−d) for s = 1
            and ¼e^(−d)(1 + d) for s = 2.

    >>> x, e = torch.tensor([0.0, 5.0]), torch.tensor([1.0, -1.0])
    >>> [round(float(gradient_norm(x, e, n, order=0.0)), 2) for n in (100, 400, 1600)]
    [3.16, 6.32, 12.65]
    >>> [round(float(gradient_norm(x, e, n, order=2.0)), 2) for n in (100, 400, 1600)]
    [0.69, 0.69, 0.69]
    """
    # in double precision: the symbol spans (1 + ξ²)^s
    e = residuals.double()
    spacing = length / resolution
    index = torch.round(points.double() / spacing).long() % resolution
    source = torch.zeros(resolution, dtype=torch.float64, device=points.device)
    source.index_add_(0, index, e)
    frequency = 2 * math.pi * torch.fft.fftfreq(resolution, spacing, dtype=torch.float64)
    symbol = (1 + frequency.to(points.device).square()) ** order
    # M = spacing · F⁻¹ diag(symbol) F, for sums over the grid in place of integrals
    gradient = torch.fft.ifft(torch.fft.fft(source) / (spacing * symbol)).real
    return (source * gradient).sum().clamp(min=0).sqrt()


@dataclass(frozen=True, kw_only=True)
class Projection(Experiment):
    """A wide network, whose tangent space holds every move of its data, and a narrow one.

    Attributes:
        wide_sizes, narrow: hidden units and data.
        resolutions: points of the circle on which norms of ∇ℓ are computed.
        expected_outcomes: which claims held in the full runs.
    """

    wide_sizes: tuple[int, int] = (40, 7)
    narrow: tuple[int, int] = (2, 41)
    resolutions: Sequence[int] = tuple(2**k for k in range(6, 17))
    expected_outcomes: Sequence[bool] = (True,) * 9
    seeds: Sequence[int] = tuple(range(5))

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "wide": list(self.wide_sizes),
            "narrow": list(self.narrow),
            "scale": moves.SCALE,
            "sizes": list(moves.SIZES),
            "resolutions": list(self.resolutions),
            "orders": list(ORDERS),
        }

    def items(self, quick: bool) -> list[Item]:
        return [
            Item(("resolution",), self._resolution, once=True),
            Item(("wide",), partial(self._moves, self.wide_sizes)),
            Item(("narrow",), partial(self._moves, self.narrow)),
        ]

    def _moves(self, shape: tuple[int, int], context: Context) -> Record:
        scene = NetworkData.of(*shape, context.device)
        x = scene.x[:, 0]
        grid = scene.grid[:, 0]
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
            "moves": {method: moves.compare_moves(scene, method) for method in METHODS},
        }

    def _resolution(self, context: Context) -> Record:
        """‖∇ℓ‖ in H^s of a loss on three points of a circle of length 16."""
        at = torch.tensor([2.0, 5.0, 6.0], dtype=torch.float64, device=context.device)
        c = torch.tensor([1.0, -0.7, 0.4], dtype=torch.float64, device=context.device)
        norms = {}
        for order in ORDERS:
            on_grids = [gradient_norm(at, c, n, order=order, length=16.0) for n in self.resolutions]
            norms[f"{order:g}"] = list(map(float, on_grids))
        return {"resolution": list(self.resolutions), "norms": norms}

    def judge(self, results: Results) -> list[Check]:
        return judge_claims(results, self.expected_outcomes)

    def curves(self, results: Results) -> list[Chart]:
        return charts(results)

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for name in ("wide", "narrow"):
            records = results.of(name)
            for method in METHODS:
                moves = [r["moves"][method] for r in records]
                worst = max(f["error"][2] / f["size"][2] for f in moves)
                orders = [slope(f["size"], f["error"]) for f in moves]
                rows.append([name, method, worst, f"{min(orders):.2f} to {max(orders):.2f}"])
        columns = ["network", "step", "error at |Δf| = 0.1, relative", "order in η"]
        title = f"Predicted against actual moves at held-out points, {len(results.seeds)} seeds"
        return [Table(columns, rows, title, text=2)]

    def draw(self, results: Results) -> dict[str, Figure]:
        from .figures import draw  # matplotlib is slow to import

        return {"": draw(results)}


def slope(x: Sequence[float], y: Sequence[float], most: float = 0.1) -> float:
    """Return the exponent a of y ∝ xᵃ, fitted by least squares of the logarithms where x ≤ most.

    >>> round(slope([0.1, 0.01], [3e-2, 3e-4]), 9)
    2.0
    """
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if a <= most]
    log_x = [math.log(a) for a, _ in pairs]
    log_y = [math.log(max(b, 1e-300)) for _, b in pairs]
    return linear_regression(log_x, log_y).slope


def judge_claims(results: Results, expected_outcomes: Sequence[bool]) -> list[Check]:
    """Return the checks of all claims; the order of the error is not claimed in the paper."""
    records = results.of("wide") + results.of("narrow")
    claims = [
        _at_most(records, "forms", 1e-8, "the three forms of P∇ℓ agree at points without data"),
        _at_most(records, "P twice", 1e-8, "P² = P"),
        _least(records, "S twice", 0.1, "S² ≠ S: the standard gradient is no projection"),
        _at_most(records, "orthogonal", 1e-7, "∇ℓ − P∇ℓ is orthogonal to the tangent space"),
        _at_most(
            results.of("wide"), "smoothed", 1e-6, "wide: a Sobolev step moves the data by −ηK∇ℓ"
        ),
        _order(records),
        *_resolution(results),
    ]
    return make_checks(claims, expected_outcomes, ours={5})


def _at_most(records: Sequence[dict], law: str, most: float, claim: str) -> Claim:
    worst = max(r["laws"][law] for r in records)
    return claim, worst <= most, f"{worst:.0e}, relative, at most"


def _least(records: Sequence[dict], law: str, least: float, claim: str) -> Claim:
    smallest = min(r["laws"][law] for r in records)
    return claim, smallest >= least, f"they differ by {smallest:.2g}, relative, at least"


def _order(records: Sequence[dict]) -> Claim:
    slopes = []
    for record, method in product(records, METHODS):
        move = record["moves"][method]
        slopes.append(slope(move["size"], move["error"]))
    claim = "the move is predicted up to an error ∝ η²"
    holds = all(abs(a - 2) <= 0.15 for a in slopes)
    return claim, holds, f"exponents {min(slopes):.3f} to {max(slopes):.3f}"


def _resolution(results: Results) -> list[Claim]:
    record = results.once("resolution")
    n = record["resolution"]
    norms = record["norms"]
    growth = slope(n, norms["0"], math.inf)
    border = norms["0.5"][-1] / norms["0.5"][len(n) // 2]
    change = {s: abs(norms[s][-1] / norms[s][-2] - 1) for s in ("1", "2")}
    return [
        ("in L² ‖∇ℓ‖ grows as √n without end", abs(growth - 0.5) < 0.01, f"as n^{growth:.3f}"),
        (
            "for s = 1/2, half the dimension, it still grows",
            border > 1.1,
            f"by a factor {border:.2f} from n = {n[len(n) // 2]} to {n[-1]}",
        ),
        (
            "for s = 1 and s = 2 it converges",
            max(change.values()) < 1e-3,
            f"the last doubling changes it by {change['1']:.0e} and {change['2']:.0e}",
        ),
    ]
