"""The three experiments with their methods and lengths, and the paper's claims as checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pullback.solvers import Cholesky, OrthogonalGreedy, PseudoInverse, Relative, Solver
from pullback.steps import Backtracking, Clip, GridLineSearch, Step, TargetRatio

from ..framework.check import Check, Claim, make_checks
from . import problems
from .experiment import Comparison
from .methods import ArgMin, DescentMethod, FirstOrder, NaturalMethod
from .problems import FitSetting
from .runs import LEVELS, Summary


def least_squares_claims(
    summaries: dict[str, Summary], size: int, expected_outcomes: Sequence[bool]
) -> list[Check]:
    """What section 2.1 shows and section 1.1 promises, for p = size parameters."""
    full, greedy, damped = (summaries[m] for m in ("NGD", "NGD-OGA", "NGD-OGA, damped"))
    return make_checks(
        [
            _singular(full, size),
            _nearly_best(full),
            _faster("NGD-OGA", greedy, "NGD", full),
            _safer("NGD-OGA", greedy, "NGD", full),
            _as_accurate("NGD-OGA", greedy, "NGD", full),
            _cheaper("NGD-OGA", greedy, "NGD", full),
            _never_stuck("NGD-OGA", greedy),
            _never_stuck("NGD-OGA, damped", damped),
        ],
        expected_outcomes,
        ours={7},
    )


def poisson_claims(
    summaries: dict[str, Summary], size: int, expected_outcomes: Sequence[bool]
) -> list[Check]:
    """What section 2.2 says, for p = size parameters."""
    cut, greedy, plain = (summaries[m] for m in ("E-NGD", "E-NGD-OGA", "E-NGD, not cut"))
    first = cut.first("largest")
    pretrained = summaries["E-NGD, pre-trained"]
    return make_checks(
        [
            _singular(plain, size),
            ("the first directions are astronomical", first > 1e6, f"an entry of {first:.0e}"),
            (
                "E-NGD sometimes sticks at a large loss",
                cut.below(LEVELS.solved) < len(cut),
                _got(cut),
            ),
            _nearly_best(cut),
            _safer("E-NGD-OGA", greedy, "E-NGD", cut),
            _as_accurate("E-NGD-OGA", greedy, "E-NGD, not cut", plain),
            _cheaper("E-NGD-OGA", greedy, "E-NGD, not cut", plain),
            _safer("E-NGD", cut, "E-NGD, not cut", plain),
            _safer("E-NGD, pre-trained", pretrained, "E-NGD", cut),
            _small("E-NGD, pre-trained", pretrained),
            _safer("E-NGD, backtracking", summaries["E-NGD, backtracking"], "E-NGD", cut),
            _safer("E-NGD, from rows", summaries["E-NGD, from rows"], "E-NGD, not cut", plain),
        ],
        expected_outcomes,
        ours={11},
    )


def _got(summary: Summary) -> str:
    return f"{summary.below(LEVELS.solved)} of {len(summary)} below {LEVELS.solved:g}"


def _singular(full: Summary, size: int) -> Claim:
    rank = full.median("rank")
    return "the Gram is singular to working precision", rank < size, f"rank {rank:g} of {size}"


def _nearly_best(full: Summary) -> Claim:
    share = full.median("share")
    claim = "greedily chosen vectors keep nine tenths of the energy of the full direction"
    return claim, share >= 0.9, f"median {share:.2f}"


def _faster(one: str, first: Summary, two: str, second: Summary) -> Claim:
    a = first.after(LEVELS.early_steps)
    b = second.after(LEVELS.early_steps)
    claim = f"{one} lowers the loss faster than {two} in {LEVELS.early_steps} steps"
    return claim, a < b, f"median loss {a:.1e} against {b:.1e}"


def _safer(one: str, first: Summary, two: str, second: Summary) -> Claim:
    claim = f"{one} gets somewhere from more seeds than {two}"
    holds = first.below(LEVELS.solved) > second.below(LEVELS.solved)
    return claim, holds, f"{_got(first)}, against {_got(second)}"


def _as_accurate(one: str, first: Summary, two: str, second: Summary) -> Claim:
    a = min(first.errors)
    b = min(second.errors)
    claim = f"the best run of {one} is as accurate as that of {two}, within a factor of ten"
    return claim, a <= 10 * b, f"errors {a:.1e} and {b:.1e}"


def _cheaper(one: str, first: Summary, two: str, second: Summary) -> Claim:
    a = 1e3 * first.per_step
    b = 1e3 * second.per_step
    claim = f"a step of {one} costs less than half of one of {two}"
    return claim, a < 0.5 * b, f"{a:.0f} and {b:.0f} ms"


def _small(name: str, summary: Summary) -> Claim:
    first = summary.first("largest")
    return f"the first direction of {name} is moderate", first < 10, f"an entry of {first:.0e}"


def _never_stuck(name: str, summary: Summary) -> Claim:
    holds = summary.stuck == 0
    return f"{name} never gets stuck", holds, f"{summary.stuck} of {len(summary)} did"


@dataclass(frozen=True)
class PaperSettings:
    """The numbers of the paper's methods, and of our damped variants."""

    #: step sizes 1, ½, …, 2⁻²⁹: the paper's logarithmic grid of [0, 1]
    grid: int = 30
    #: bound on each entry of the direction, the paper's
    largest_entry: float = 1000.0
    #: of the mean eigenvalue of G, in the variants that the paper does not have
    damping: float = 1e-6


SETTINGS = PaperSettings()
_ADDED = f"λ = {SETTINGS.damping:g} tr G/p"
_ADAM = (1e-3, 3e-3, 1e-2, 3e-2)
_FIT_SGD = (0.1, 0.3, 1.0)
_POISSON_SGD = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)

# the verdicts over seeds 0–9, in the order of the claims
_SHALLOW = (True, True, True, False, False, False, False, True)
_DEEP = (True, True, True, False, False, False, False, True)
_POISSON = (True, False, True, True, True, False, False, False, True, True, True, False)

# the Gram, the greedy vectors' share, the first thirty steps: no matter of many seeds
_SHORT = (0, 1, 2)
_POISSON_SHORT = (0, 1, 3)


def _grid() -> Step:
    return GridLineSearch(SETTINGS.grid)


def _make_paper_step() -> Step:
    return ArgMin(SETTINGS.grid)


def _cut() -> Step:
    return Clip(SETTINGS.largest_entry, GridLineSearch(SETTINGS.grid))


def _greedy(k: int) -> Callable[[], Solver]:
    return lambda: OrthogonalGreedy(k)


def _make_damped_solver() -> Solver:
    return Cholesky(Relative(SETTINGS.damping))


def _damped_greedy(k: int) -> Callable[[], Solver]:
    return lambda: OrthogonalGreedy(k, damping=Relative(SETTINGS.damping))


def _first_order(
    adam: float, sgd: float, tried: tuple[float, ...], steps: int
) -> list[tuple[DescentMethod, int]]:
    return [
        (FirstOrder("Adam", "torch's Adam", torch.optim.Adam, adam, _ADAM), steps),
        (FirstOrder("SGD", "gradient descent", torch.optim.SGD, sgd, tried), steps),
    ]


def _fit(
    name: str,
    figure: str,
    layers: tuple[int, ...],
    k: int,
    steps: int,
    adam: float,
    recorded: tuple[bool, ...],
) -> Comparison:
    """Least squares: the loss's own Gram is the L² Gram, so NGD and E-NGD are one method."""
    full = PseudoInverse
    greedy = _greedy(k)
    natural = [
        NaturalMethod("NGD", "minimum norm, grid search", full, _grid, greedy=k),
        NaturalMethod("NGD-OGA", f"{k} greedy vectors, grid search", greedy, _grid),
        NaturalMethod("NGD, arg-min", "grid search without accept test", full, _make_paper_step),
        NaturalMethod("NGD-OGA, backtracking", f"{k} greedy vectors, Armijo", greedy, Backtracking),
        NaturalMethod("NGD, damped", f"{_ADDED}, grid search", _make_damped_solver, _grid),
        NaturalMethod("NGD-OGA, damped", f"{k} greedy vectors, {_ADDED}", _damped_greedy(k), _grid),
        NaturalMethod("NGD, target ratio", "trust radius", full, TargetRatio, gram="rows"),
    ]
    return Comparison(
        name=f"yin-2024-{name}",
        figure=figure,
        claim=f"{k} greedily chosen tangent vectors do the work of the whole natural gradient",
        setting=FitSetting(problems.least_squares, layers, {"equation": 1000}),
        methods=[*((m, steps) for m in natural), *_first_order(adam, 0.3, _FIT_SGD, 2000)],
        groups={
            "The paper's methods": ["NGD", "NGD-OGA", "NGD, arg-min", "Adam", "SGD"],
            "Beyond the paper": ["NGD", "NGD-OGA", *(m.name for m in natural[3:])],
        },
        claims=least_squares_claims,
        expected_outcomes=recorded,
        short=_SHORT,
    )


def _poisson(steps: int = 100, k: int = 20, more: int = 100, pretrain: int = 200) -> Comparison:
    full = PseudoInverse
    greedy = _greedy(k)
    natural = [
        NaturalMethod("E-NGD", "cut to ±1000, grid search", full, _cut, greedy=k),
        NaturalMethod("E-NGD-OGA", f"{k} greedy vectors, cut", greedy, _cut),
        NaturalMethod("NGD", "L² Gram of u, cut", full, _cut, l2=True),
        NaturalMethod("NGD-OGA", f"L² Gram of u, {k} greedy vectors, cut", greedy, _cut, l2=True),
        NaturalMethod("E-NGD, not cut", "grid search alone", full, _grid),
        NaturalMethod("E-NGD-OGA, not cut", f"{k} greedy vectors", greedy, _grid),
        NaturalMethod(
            "E-NGD-OGA, 100 vectors", f"{more} greedy vectors, not cut", _greedy(more), _grid
        ),
        NaturalMethod("E-NGD, arg-min", "not cut, no accept test", full, _make_paper_step),
        NaturalMethod("E-NGD, backtracking", "not cut, Armijo", full, Backtracking),
        NaturalMethod("E-NGD, from rows", "not cut, SVD of A", full, _grid, gram="rows"),
        NaturalMethod("E-NGD, damped", f"not cut, {_ADDED}", _make_damped_solver, _grid),
        NaturalMethod(
            "E-NGD-OGA, damped", f"{k} greedy vectors, not cut, {_ADDED}", _damped_greedy(k), _grid
        ),
        NaturalMethod("E-NGD, target ratio", "trust radius", full, TargetRatio, gram="rows"),
    ]
    first = NaturalMethod(
        "E-NGD, pre-trained", f"{pretrain} Adam steps, not cut", full, _grid, pretrain=pretrain
    )
    return Comparison(
        name="yin-2024-poisson",
        figure="Figure 3",
        claim=f"E-NGD on {k} greedily chosen tangent vectors gets on where E-NGD sticks",
        setting=FitSetting(problems.poisson, (2, 20, 20, 1), {"equation": 600, "dirichlet": 120}),
        methods=[
            *((m, steps) for m in natural),
            (first, steps + pretrain),
            *_first_order(1e-2, 3e-3, _POISSON_SGD, 2000),
        ],
        groups={
            "The paper's methods": ["E-NGD", "E-NGD-OGA", "NGD", "NGD-OGA", "Adam", "SGD"],
            "The paper's remedies": [
                "E-NGD",
                "E-NGD, not cut",
                "E-NGD, arg-min",
                "E-NGD, backtracking",
                first.name,
            ],
            "Beyond the paper": [
                "E-NGD, not cut",
                "E-NGD-OGA, not cut",
                "E-NGD-OGA, 100 vectors",
                "E-NGD, from rows",
                "E-NGD, damped",
                "E-NGD-OGA, damped",
                "E-NGD, target ratio",
            ],
        },
        claims=poisson_claims,
        expected_outcomes=_POISSON,
        short=_POISSON_SHORT,
        quick_steps=10,
    )


EXPERIMENTS: tuple[Comparison, ...] = (
    _fit("shallow", "Figure 1", (2, 30, 1), 10, 150, 3e-2, _SHALLOW),
    _fit("deep", "Figure 2", (2, 20, 20, 1), 20, 100, 1e-2, _DEEP),
    _poisson(),
)
