"""Figure 2: separable points of the plane; what depth does to EGD and does not to NGD."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ..framework.check import Check, Claim, make_checks
from ..framework.curves import Chart
from ..framework.experiment import Context, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table
from . import figures
from .common import (
    DTYPE,
    Repeated,
    angle,
    flat_start,
    generator,
    last,
    natural_flow,
    sample_descent,
)
from .margins import EuclideanFlow, Signed
from .solutions import lp_max_margin

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXIS = torch.tensor([1.0, 0.0], dtype=DTYPE)


#: y∘x on the inner side of the classes: the axis separates with margin 0.53, others do better
_FRONT = ((0.55, 2.6), (0.6, 1.5), (0.95, 0.6), (1.35, 0.1), (1.6, -0.15))


def points(seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x (40, 2) and y: five samples near `_FRONT`, the others behind them."""
    source = generator(seed)
    front = torch.tensor(_FRONT, dtype=DTYPE)
    front = front + 0.04 * (torch.rand(5, 2, generator=source, dtype=DTYPE) - 0.5)
    mix = torch.rand(35, 5, generator=source, dtype=DTYPE)
    behind = torch.rand(35, 2, generator=source, dtype=DTYPE)
    behind = 0.1 + behind * behind.new_tensor([1.6, 0.6])
    z = torch.cat([front, (mix / mix.sum(1, keepdim=True)) @ front + behind])
    y = torch.where(torch.rand(40, generator=source) < 0.5, 1.0, -1.0).to(DTYPE)
    return (y[:, None] * z).to(device), y.to(device)


@dataclass(frozen=True, kw_only=True)
class Planar(Repeated):
    """EGD and NGD at several depths, beside the largest margins.

    Attributes:
        depths: L.
        scale: α of EGD's start w₁ = … = w_{L−1} = α, w_L = 0.
        others: further α, of which only the end is kept.
        levels: −log ℓ at which EGD's direction is noted.
        lr: of NGD.
        end: NGF's time, and lr times NGD's steps.
    """

    depths: Sequence[int] = (1, 2, 3, 4, 5)
    seeds: Sequence[int] = tuple(range(5))
    scale: float = 0.3
    others: Sequence[float] = (0.01, 0.1, 1.0)
    levels: Sequence[float] = (1, 3, 10, 30, 100, 1e3, 1e4, 1e5, 1e6)
    lr: float = 0.05
    end: float = 50.0

    def config(self, quick: bool) -> dict[str, Any]:
        depths = self.depths
        if quick:
            depths = depths[:3]
        return {
            "depths": list(depths),
            "scale": self.scale,
            "others": list(self.others),
            "levels": list(self.levels),
            "lr": self.lr,
            "end": self.end,
        }

    def smoke(self) -> Self:
        return replace(self, judged=False, depths=(1, 2), levels=(1, 10), end=2.0)

    def items(self, quick: bool) -> list[Item]:
        config = self.config(quick)
        natural = [
            Item(("NGD", f"L={depth}"), partial(_natural, depth, config))
            for depth in config["depths"]
        ]
        return [Item(("EGD",), partial(_euclidean, config)), *natural]

    def line(self, record: Record) -> str:
        if "flow" in record:
            return f"{record['descent angle']:.2f}° from e₁"
        return ", ".join(f"{off:.1g}°" for off in record["off"]) + " from the margins"

    def judge(self, results: Results) -> list[Check]:
        depths = self.config(results.quick)["depths"]
        return make_checks(
            [
                *_euclidean_claims(results, depths),
                *_natural_claims(results, depths),
                _claim_start(results, depths),
            ],
            # at L = 3 one seed settles at another stationary point
            [*(d != 3 or results.quick for d in depths), *(True,) * 5],
            ours={len(depths) + 2, len(depths) + 4},
        )

    def curves(self, results: Results) -> list[Chart]:
        return figures.planar(results, self.config(results.quick)["depths"])

    def tables(self, results: Results) -> list[Table]:
        rows = []
        egd = results.of("EGD")
        for number, depth in enumerate(self.config(results.quick)["depths"]):
            ngd = results.of("NGD", f"L={depth}")
            rows.append(
                [
                    f"L = {depth}",
                    _median(r["angles"][number][-1] for r in egd),
                    _median(r["limit angle"][number] for r in egd),
                    max(r["off"][number] for r in egd),
                    _median(r["descent angle"] for r in ngd),
                    _median(r["flow angle"] for r in ngd),
                ]
            )
        columns = ["depth", "EGD", "ℓp margin, p = 2/L", "largest gap", "NGD", "NGF"]
        title = f"Degrees from e₁, medians over {len(results.seeds)} seeds"
        return [Table(columns, rows, title), self._starts(results)]

    def _starts(self, results: Results) -> Table:
        config = self.config(results.quick)
        ends = torch.stack([_tensor(r["by scale"]) for r in results.of("EGD")]).median(0).values
        scales = [config["scale"], *config["others"]]
        rows = [[f"α = {a:g}", *e] for a, e in zip(scales, ends.tolist(), strict=True)]
        columns = ["start", *(f"L = {d}" for d in config["depths"])]
        return Table(columns, rows, "EGD's degrees from e₁ by its start, medians")

    def draw(self, results: Results) -> dict[str, Figure]:
        return {"": figures.draw_planar(results, self.config(results.quick)["depths"], points)}


def _euclidean(config: dict[str, Any], context: Context) -> Record:
    """Follow EGD's flow of all depths and starts at once, from level to level of the loss."""
    x, y = points(context.seed, context.device)
    depths = config["depths"]
    starts = list(product([config["scale"], *config["others"]], depths))  # (α, L) of each flow
    signed = Signed.of([(x, y)] * len(starts))
    flow = EuclideanFlow(signed, [d for _, d in starts], [a for a, _ in starts], rtol=1e-6)
    v = None
    angles: list[list[float]] = []  # by level, of the first scale's depths
    beta = torch.zeros(len(starts), 2, dtype=DTYPE)
    for level in config["levels"]:
        v = flow.run(level, v)
        beta = flow.beta(v).cpu()
        angles.append(_angles(beta[: len(depths)]))
    limits = [lp_max_margin(x, y, 2 / depth).beta.cpu() for depth in depths]
    return {
        "level": list(config["levels"]),
        "angles": [list(by_level) for by_level in zip(*angles, strict=True)],
        "beta": beta[: len(depths)].tolist(),
        "by scale": [_angles(ends) for ends in beta.split(len(depths))],
        "limit": [margin.tolist() for margin in limits],
        "limit angle": _angles(limits),
        "off": [angle(end, margin) for end, margin in zip(beta, limits, strict=False)],
    }


def _angles(directions: Iterable[Tensor]) -> list[float]:
    """Return the degrees from the axis e₁."""
    return [angle(beta, AXIS) for beta in directions]


def _natural(depth: int, config: dict[str, Any], context: Context) -> Record:
    x, y = points(context.seed, context.device)
    flow = natural_flow(flat_start(2, depth, 1.0, context.device), x, y, config["end"]).cpu()
    model = flat_start(2, depth, 1.0, context.device)
    steps = round(config["end"] / config["lr"])
    beta = last(sample_descent(model, x, y, config["lr"], steps)).cpu()
    return {
        "depth": depth,
        "beta": beta.tolist(),
        "flow": flow.tolist(),
        "descent angle": angle(beta, AXIS),
        "flow angle": angle(flow, AXIS),
    }


def _euclidean_claims(results: Results, depths: Sequence[int]) -> list[Claim]:
    runs = results.of("EGD")
    out = []
    for number, depth in enumerate(depths):
        off = max(r["off"][number] for r in runs)
        claim = f"EGD with L = {depth} finds the ℓp margin for p = 2/{depth}"
        out.append((claim, off < 0.01, f"at most {off:.1g}° from it"))
    deepest = max(r["angles"][-1][-1] for r in runs)
    first = min(r["angles"][0][-1] for r in runs)
    words = f"at L = {depths[-1]} at most {deepest:.1g}° from e₁, at L = 1 at least {first:.0f}°"
    out.append(("depth turns EGD towards the axis", deepest < first, words))
    return out


def _claim_start(results: Results, depths: Sequence[int]) -> Claim:
    """Spread of EGD's end over the starts, in degrees: per depth, the median over seeds."""
    ends = [_tensor(r["by scale"]) for r in results.of("EGD")]  # (scales, depths)
    spread = torch.stack([e.amax(0) - e.amin(0) for e in ends]).median(0).values
    words = ", ".join(f"{s:.0f}° at L = {d}" for d, s in zip(depths, spread.tolist(), strict=True))
    holds = bool(spread[:2].max() < 0.1) and bool(spread[2:].min() > 1)
    return "from L = 3 on the start α decides between stationary points", holds, words


def _natural_claims(results: Results, depths: Sequence[int]) -> list[Claim]:
    shallow, *deeper = [results.of("NGD", f"L={depth}") for depth in depths]
    angles = []
    for run, margins in zip(shallow, results.of("EGD"), strict=True):
        gaps = [abs(run["descent angle"] - a) for a in margins["limit angle"]]
        angles.append(min(gaps))
    ngd = max(_largest_angle(runs, shallow, "beta") for runs in deeper)
    ngf = max(_largest_angle(runs, shallow, "flow") for runs in deeper)
    return [
        ("NGD finds one direction at all depths", ngd < 0.5, f"at most {ngd:.1g}° apart"),
        ("so does its flow, to the integrator's accuracy", ngf < 1e-5, f"{ngf:.1g}°"),
        (
            "it is none of the margins",
            _median(angles) > 1,
            f"median {_median(angles):.1f}°, at least {min(angles):.2g}° from the nearest",
        ),
    ]


def _largest_angle(runs: Sequence[Record], others: Sequence[Record], entry: str) -> float:
    """Return the largest angle between the entries of two sequences of runs, seed by seed."""
    pairs = zip(runs, others, strict=True)
    return max(angle(_tensor(one[entry]), _tensor(other[entry])) for one, other in pairs)


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=DTYPE)


def _median(values: Any) -> float:
    return float(torch.tensor(list(values), dtype=DTYPE).quantile(0.5))
