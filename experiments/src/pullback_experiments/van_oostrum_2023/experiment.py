"""The experiment: examples once, theorems for every seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import product
from math import hypot, log
from typing import TYPE_CHECKING, Any, Literal

from ..framework import plots
from ..framework.check import Check, Claim, make_checks
from ..framework.experiment import Experiment, Item
from ..framework.plots import INK, PALETTE
from ..framework.store import Results
from ..framework.tabular import Table
from . import examples, theorems
from .theorems import DAMPED, INVERSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
        shape = list(astuple(theorems.SIZES))
        return {"maps": shape, "inverses": list(INVERSES), "sizes": list(SIZES)}

    def items(self, quick: bool) -> list[Item]:
        return [
            Item(("example 1",), examples.compare_rotated_maps, once=True),
            Item(("example 2",), examples.compare_at_crossing, once=True),
            Item(("A.3",), examples.parameters, once=True),
            Item(("theorems",), theorems.theorems),
            Item(("steps",), partial(theorems.steps, SIZES)),
        ]

    def judge(self, results: Results) -> list[Check]:
        return judge_claims(results)

    def tables(self, results: Results) -> list[Table]:
        runs = results.of("theorems")
        rows = []
        for name in INVERSES:
            projection = max(r["projection"][name] for r in runs)
            model = max(r["model"][name] for r in runs)
            space = max(r["space"][name] for r in runs)
            rows.append([name, projection, model, space])
        columns = ["G⁻", "from Π grad L", "from ψ's move", "as parameter vectors"]
        title = f"Largest relative differences over {len(results.seeds)} random maps"
        return [Table(columns, rows, title)]

    def draw(self, results: Results) -> dict[str, Figure]:
        return {"": draw(results)}


@dataclass(frozen=True)
class RoundOff:
    """Differences up to which numbers in float64 are taken for equal."""

    #: relative: what the conditions of the random maps leave of sixteen digits
    of_random_maps: float = 1e-8
    #: of the examples, whose numbers are near one
    of_examples: float = 1e-12


ROUND_OFF = RoundOff()
_SOUND = tuple(name for name in INVERSES if name != DAMPED)


def judge_claims(results: Results) -> list[Check]:
    """Return the checks of theorems and examples; one printed number is wrong."""
    claims = [*_theorems(results), *_examples(results)]
    # damping is not in the paper; the point that A.2 prints
    ours = 5
    wrong = 8
    return make_checks(claims, [i != wrong for i in range(len(claims))], {ours})


def _theorems(results: Results) -> list[Claim]:
    runs = results.of("theorems")

    def worst(what: str) -> float:
        return max(r[what][name] for r, name in product(runs, _SOUND))

    one = worst("projection")
    two = worst("model")
    space = min(r["space"]["Moore–Penrose"] for r in runs)
    damped = min(r["model"][DAMPED] for r in runs)
    cubic = max(r["cubic"] for r in runs)
    slope = order(results, "Moore–Penrose")
    first = order(results, DAMPED)
    return [
        (
            "Theorem 1: any G⁻ moves the model by the projected gradient",
            one < ROUND_OFF.of_random_maps,
            f"{one:.0e}",
        ),
        (
            "Theorem 2: that move is the same in all coordinates",
            two < ROUND_OFF.of_random_maps,
            f"{two:.0e}",
        ),
        ("the parameter vector is not", space > 0.01, f"at least {space:.2g} apart"),
        (
            "a homeomorphism with differential zero leaves no move (Proposition 2)",
            cubic < ROUND_OFF.of_random_maps,
            f"{cubic:.0e}",
        ),
        (
            "steps of finite size end elsewhere, in proportion to their size (section 4)",
            0.9 < slope < 1.1,
            f"differences over moves fall as η^{slope:.2f}",
        ),
        (
            "with damping the move depends on coordinates, however small the step",
            damped > 1e-4 and first < 0.5,
            f"at least {damped:.1g}; η^{first:.2f}",
        ),
    ]


def order(results: Results, name: str) -> float:
    """The median slope of log difference against log η between the two smallest steps."""
    slopes = []
    for r in results.of("steps"):
        a, b = r["size"][-2:]
        x, y = r["apart"][name][-2:]
        slopes.append(log(x / y) / log(a / b))
    return sorted(slopes)[len(slopes) // 2]


def _examples(results: Results) -> list[Claim]:
    plane, cross, space = (results.once(k) for k in ("example 1", "example 2", "A.3"))
    (ax, ay), (bx, by) = plane["moves"]
    gx, gy = plane["gradient"]
    ranks = plane["ranks"]
    split = _off((ax, ay, bx, by), (gx, 0.0, 0.0, gy))
    tangents = _off([*cross["tangents"][0], *cross["tangents"][1]], (2, 1, -2, 1))
    gram = _off(cross["grams"], (5, 5))
    wx, wy = cross["gradient"]
    a = (2 * wx + wy) / 5
    b = (wy - 2 * wx) / 5
    moves = _off([*cross["moves"][0], *cross["moves"][1]], (2 * a, a, -2 * b, b))
    numbers = _off([*space["y_xi"], *space["y_theta"]], (3, 3, 4.8, 1.2))
    push = _off(space["moves"][0], space["moves"][1])
    return [
        (
            "Example 1: two spans that meet in zero, and a part of the gradient in each",
            ranks == [1, 1, 2] and split < ROUND_OFF.of_examples,
            f"ranks {ranks[0]} and {ranks[1]}, together {ranks[2]}; off by {split:.0e}",
        ),
        (
            "A.2: tangent vectors (2, 1) and (−2, 1), G = 5, two moves from one point",
            max(tangents, gram, moves, hypot(*cross["right"])) < ROUND_OFF.of_examples,
            f"off by {max(tangents, gram, moves):.0e}, with ξ₂ = π",
        ),
        (
            "the curve crosses itself at ξ₂ = π/2, as printed in A.2",
            hypot(*cross["printed"]) < ROUND_OFF.of_examples,
            f"φ(π/2) = ({cross['printed'][0]:.0f}, {cross['printed'][1]:.0f}), not (0, 0)",
        ),
        (
            "A.3: y_Ξ = (3, 3) and y_Θ = (4⅘, 1⅕), one move of the model",
            max(numbers, push) < ROUND_OFF.of_examples,
            f"off by {numbers:.0e}; moves {push:.0e} apart",
        ),
    ]


def _off(value: object, truth: object) -> float:
    return max(abs(a - b) for a, b in zip(value, truth, strict=True))  # pyright: ignore


_PHI = PALETTE[1]
_PSI = PALETTE[0]
_SOFT = PALETTE[6]

Corner = Literal["lower right", "upper right"]


def draw(results: Results) -> Figure:
    """Draw examples 1 and 2 on the model, A.3 on the parameter space, and finite steps."""
    figure = plots.make_figure(9.5, 8.2, "The natural parameter gradient, and what it depends on")
    one, two, three, four = figure.subplots(2, 2).flat
    _plane(one, results)
    _eight(two, results)
    _space(three, results)
    _steps(four, results)
    return figure


def _arrow(axes: Axes, end: Sequence[float], color: str, name: str) -> None:
    """Draw an arrow from zero."""
    style = {"arrowstyle": "-|>", "color": color, "lw": 2, "mutation_scale": 14}
    x, y = end
    axes.annotate("", (x, y), (0, 0), arrowprops={**style, "shrinkA": 0, "shrinkB": 0})
    axes.plot([], [], color=color, lw=2, label=name)


def _format_axes(axes: Axes, title: str, x: str, y: str, legend: Corner = "lower right") -> None:
    plots.format_axes(axes, logx=False, logy=False)
    axes.set_aspect("equal")
    axes.locator_params(nbins=6)
    plots.label(axes, x, y, title)
    axes.legend(frameon=False, fontsize=8, loc=legend)


def _plane(axes: Axes, results: Results) -> None:
    records = results.once("example 1")
    axes.axhline(0, color=_PHI, lw=0.8, ls="--")
    axes.axvline(0, color=_PSI, lw=0.8, ls="--")
    _arrow(axes, records["gradient"], INK, "grad L")
    _arrow(axes, records["moves"][0], _PHI, "through φ")
    _arrow(axes, records["moves"][1], _PSI, "through ψ")
    axes.set(xlim=(-0.5, 1.3), ylim=(-0.6, 1.0))
    _format_axes(axes, "Example 1: spans that meet in zero", "x", "y")


def _eight(axes: Axes, results: Results) -> None:
    records = results.once("example 2")
    at = [math.pi * (-0.25 + 1.5 * i / 200) for i in range(201)]
    axes.plot([math.sin(2 * t) for t in at], [math.sin(t) for t in at], color=_SOFT, lw=1.2)
    for end, color, name in zip(
        records["moves"], (_PHI, _PSI), ("φ at ξ₁ = 0", "ψ at θ₁ = 0, ξ₂ = π"), strict=True
    ):
        _arrow(axes, end, color, name)
    _arrow(axes, records["gradient"], INK, "grad L")
    axes.plot(0, 0, "o", color=INK, ms=4)
    _format_axes(axes, "Example 2: a crossing", "x = sin 2ξ", "y = sin ξ")
    # inside the upper loop, where no line is
    inside = {"bbox_to_anchor": (0, 0.72), "bbox_transform": axes.transData}
    axes.legend(frameon=False, fontsize=8, loc="center", **inside)


def _space(axes: Axes, results: Results) -> None:
    records = results.once("A.3")
    axes.plot([-0.5, 6.5], [6.5, -0.5], color=_SOFT, lw=1.2, label="all y with Gy = ∇L")
    _arrow(axes, records["y_xi"], _PHI, r"$y_\Xi$ = (3, 3)")
    _arrow(axes, records["y_theta"], _PSI, r"$y_\Theta$ = (4⅘, 1⅕)")
    axes.set(xlim=(-0.5, 6.5), ylim=(-0.5, 6.5))
    _format_axes(axes, "A.3: two vectors, one move", "y₁", "y₂", "upper right")


def _steps(axes: Axes, results: Results) -> None:
    runs = results.of("steps")
    names = {"Moore–Penrose": "G⁺", DAMPED: "(G + λ)⁻¹"}
    for color, (key, name) in zip((_PHI, _PSI), names.items(), strict=True):
        xs = [r["size"][::-1] for r in runs]
        plots.plot_band(axes, xs, [r["apart"][key][::-1] for r in runs], color, name)
    plots.format_axes(axes)
    plots.label(axes, "step size η", "difference of φ and ψ, per move", "Section 4: finite steps")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
