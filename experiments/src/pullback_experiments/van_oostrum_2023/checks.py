"""The paper's statements as yes or no."""

from __future__ import annotations

from math import hypot, log

from ..framework.check import Check, recorded
from ..framework.results import Results
from .theorems import DAMPED, INVERSES

_EXACT = 1e-8  # relative: what the conditions of the random maps leave of sixteen digits
_TINY = 1e-12  # of numbers near one
_SOUND = tuple(name for name in INVERSES if name != DAMPED)


def judged(results: Results) -> list[Check]:
    """The theorems, then the examples; one printed number is wrong."""
    found = [*_theorems(results), *_examples(results)]
    ours, wrong = 5, 8  # damping is not in the paper; the point that A.2 prints
    return recorded(found, [i != wrong for i in range(len(found))], {ours})


def _theorems(results: Results) -> list[tuple[str, bool, str]]:
    runs = results.of("theorems")

    def worst(what: str) -> float:
        return max(r[what][name] for r in runs for name in _SOUND)

    one, two = worst("projection"), worst("model")
    space = min(r["space"]["Moore–Penrose"] for r in runs)
    damped = min(r["model"][DAMPED] for r in runs)
    cubic = max(r["cubic"] for r in runs)
    slope, first = order(results, "Moore–Penrose"), order(results, DAMPED)
    return [
        ("Theorem 1: any G⁻ moves the model by the projected gradient", one < _EXACT, f"{one:.0e}"),
        ("Theorem 2: that move is the same in all coordinates", two < _EXACT, f"{two:.0e}"),
        ("the parameter vector is not", space > 0.01, f"at least {space:.2g} apart"),
        (
            "a homeomorphism with differential zero leaves no move (Proposition 2)",
            cubic < _EXACT,
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
        (a, b), (x, y) = r["size"][-2:], r["apart"][name][-2:]
        slopes.append(log(x / y) / log(a / b))
    return sorted(slopes)[len(slopes) // 2]


def _examples(results: Results) -> list[tuple[str, bool, str]]:
    plane, cross, space = (results.once(k) for k in ("example 1", "example 2", "A.3"))
    (ax, ay), (bx, by) = plane["moves"]
    (gx, gy), ranks = plane["gradient"], plane["ranks"]
    split = _off((ax, ay, bx, by), (gx, 0.0, 0.0, gy))
    tangents = _off([*cross["tangents"][0], *cross["tangents"][1]], (2, 1, -2, 1))
    gram = _off(cross["grams"], (5, 5))
    wx, wy = cross["gradient"]
    a, b = (2 * wx + wy) / 5, (wy - 2 * wx) / 5
    moves = _off([*cross["moves"][0], *cross["moves"][1]], (2 * a, a, -2 * b, b))
    numbers = _off([*space["y_xi"], *space["y_theta"]], (3, 3, 4.8, 1.2))
    push = _off(space["moves"][0], space["moves"][1])
    return [
        (
            "Example 1: two spans that meet in zero, and a part of the gradient in each",
            ranks == [1, 1, 2] and split < _TINY,
            f"ranks {ranks[0]} and {ranks[1]}, together {ranks[2]}; off by {split:.0e}",
        ),
        (
            "A.2: tangent vectors (2, 1) and (−2, 1), G = 5, two moves from one point",
            max(tangents, gram, moves, hypot(*cross["right"])) < _TINY,
            f"off by {max(tangents, gram, moves):.0e}, with ξ₂ = π",
        ),
        (
            "the curve crosses itself at ξ₂ = π/2, as printed in A.2",
            hypot(*cross["printed"]) < _TINY,
            f"φ(π/2) = ({cross['printed'][0]:.0f}, {cross['printed'][1]:.0f}), not (0, 0)",
        ),
        (
            "A.3: y_Ξ = (3, 3) and y_Θ = (4⅘, 1⅕), one move of the model",
            max(numbers, push) < _TINY,
            f"off by {numbers:.0e}; moves {push:.0e} apart",
        ),
    ]


def _off(found: object, truth: object) -> float:
    return max(abs(a - b) for a, b in zip(found, truth, strict=True))  # pyright: ignore
