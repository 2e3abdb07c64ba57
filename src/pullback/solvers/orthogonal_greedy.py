"""The natural gradient on a few tangent vectors, chosen greedily."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import isfinite

import torch
from torch import Tensor

from .._core.checks import require_number
from .._core.errors import Status, refuse_unknown
from ..grams import FactoredGram, Gram
from .base import Damping, Solution, Solver, resolve
from .pinv import keeps_digits
from .tangents import Columns, Pivots, SelectedTangents

RULES = ("correlation", "decrease")


class GreedyStop(Enum):
    """Why no more vectors were taken; the value is the sentence a user reads."""

    ALL_TAKEN = "all k = {k} tangent vectors were taken"
    ALL_DIRECTIONS = "{k} tangent vectors span all directions there are"
    CAPTURED = "nothing but round-off is left of the gradient"
    DEPENDENT = "the tangent vectors that are left depend on those taken"
    FADED = "the largest score fell to tol of the first"
    SMALL_GAIN = "the last pass added less than tol of the energy"
    BROKEN = "the Gram is zero, or it or the gradient is not finite"


@dataclass(frozen=True)
class GreedySolution(Solution):
    """A solution on few coordinates; `rank` is their number.

    Attributes:
        selected: the coordinates taken, in order. They count the entries of the flat vector: of
            an optimizer, the parameters in the order of its groups, each flattened.
        energy: ∇Lᵀh after each of them; it never falls.
        stopped: why there are no more, as a sentence.
    """

    selected: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    energy: Tensor = field(default_factory=lambda: torch.empty(0))
    stopped: str = ""


class OrthogonalGreedy(Solver):
    r"""h on k coordinates I with G[I, I] h_I = ∇L_I: an orthogonal greedy algorithm.

    Each round takes the tangent vector ∂_i u that fits best what is left, ρ = ∇L − G h,

        "correlation":  i = argmax |ρ_i|/√G_ii
        "decrease":     i = argmax ρ_i²/(G_ii − G_iI G[I, I]⁻¹ G_Ii)

    and solves on I ∪ {i} anew. The first is the usual rule: the vector that alone fits the residual
    best. The second is the vector that lowers the residual most once all coefficients are fitted
    again. (The paper prints I ∩ {i}; with it nothing would ever be taken.) h is exact after at
    most rank G rounds; before that it is a projection of the natural gradient.

    One round costs one product with A and one with Aᵀ (one with Aᵀ from rows, one column from a
    dense Gram), and O(n·|I|) or O(p·|I|) for the new row of the triangular factor. From a factored
    Gram it works on the columns of A and so keeps the condition of A; r is used where it is known.
    The host waits twice per vector for the device: for the index, and for the pivot's test.

    Args:
        k: how many vectors to take: exactly so many, unless the gradient is captured before or
            vectors are rejected.
        rule: "correlation" or "decrease".
        tol: stop as soon as a round added at most tol·∇Lᵀh, or the largest |ρ_i|/√(·) is at most
            tol times the first. Both are heuristic: without the smallest eigenvalue nothing bounds
            from above what is left.
        damping: absolute, or `Relative(c)`; all of the above is then about G + λ.
        block: how many vectors to take per round, the best by score. With a matrix-free Gram and
            "correlation" the products with Aᵀ fall by this factor.
        rcond: a vector is rejected if less than this fraction of its length is independent of
            those taken. By default max(n, p)·ε (at most √ε) where r is known, else its square
            root: from g alone, the coefficient of a vector nearer to the others would be
            round-off. From a dense Gram never less than what round-off in G allows.

    >>> from pullback.grams import Dense
    >>> g = Dense(torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 1.0], [0.0, 1.0, 2.0]]))
    >>> solver = OrthogonalGreedy(2)
    >>> found = solver.solve(solver.init(g), torch.tensor([3.0, 1.0, -2.0]))
    >>> found.selected, found.x.round(decimals=3), found.energy.round(decimals=3)
    (tensor([0, 2]), tensor([ 1.5000,  0.0000, -1.0000]), tensor([4.5000, 6.5000]))
    """

    prefers = "rows"
    linear = False

    def __init__(
        self,
        k: int,
        rule: str = "correlation",
        tol: float | None = None,
        *,
        damping: Damping = 0.0,
        block: int = 1,
        rcond: float | None = None,
    ) -> None:
        for name, count in (("k", k), ("block", block)):
            require_number(f"OrthogonalGreedy({name}=...)", count, least=1, whole=True)
        for name, share in (("tol", tol), ("rcond", rcond)):
            if share is not None:
                require_number(f"OrthogonalGreedy({name}=...)", share, below=1)
        refuse_unknown("rule", rule, RULES)
        self.k = k
        self.rule = rule
        self.tol = tol
        self.damping = damping
        self.block = block
        self.rcond = rcond

    def init(self, gram: Gram) -> tuple[Gram, Tensor]:
        """Return the Gram, and the squared lengths G_ii of its tangent vectors."""
        return gram, gram.diagonal()

    def solve(
        self,
        state: tuple[Gram, Tensor],
        rhs: Tensor,
        damping: Damping | None = None,
        *,
        whitened: Tensor | None = None,
    ) -> GreedySolution:
        if damping is None:
            damping = self.damping
        value = resolve(damping, state[0])
        basis = self._make_tangents(*state, rhs, value, whitened)
        stop = GreedyStop.BROKEN
        is_usable = torch.isfinite(basis.diagonal).all() & basis.open.any()
        if bool(is_usable & torch.isfinite(rhs).all()):
            stop = self._grow(basis)
        x = basis.solution()
        is_finite = bool((torch.isfinite(x) & torch.isfinite(basis.rho)).all())
        if stop is GreedyStop.BROKEN or not is_finite:
            zero = torch.zeros_like(rhs)
            sentence = GreedyStop.BROKEN.value
            return GreedySolution(zero, value, 0, status=Status.SINGULAR, stopped=sentence)
        sentence = stop.value.format(k=len(basis.y))
        chosen = torch.tensor(basis.selected, dtype=torch.long, device=rhs.device)
        left = basis.rho.index_fill(0, chosen, 0.0).norm() / rhs.norm()
        residual = float(left.nan_to_num(0.0))
        energy = basis.y[: basis.count].square().cumsum(0)
        return GreedySolution(
            x, value, basis.count, residual, selected=chosen, energy=energy, stopped=sentence
        )

    def _make_tangents(
        self, gram: Gram, diagonal: Tensor, g: Tensor, damping: float, r: Tensor | None
    ) -> SelectedTangents:
        """Return the tangents to select from: columns of A if it is at hand, else pivots of G."""
        k = min(self.k, gram.size)
        follow = self.rule == "decrease"
        eps = torch.finfo(g.dtype).eps
        if not isinstance(gram, FactoredGram):
            rcond = self.rcond or 0.0  # Pivots has a floor of its own
            return Pivots(gram, diagonal, g, damping, k, rcond, follow)
        if damping == 0:
            k = min(k, gram.count)
        if r is not None and not keeps_digits(gram, diagonal.max().sqrt(), r):
            r = None
        rcond = self.rcond
        if rcond is None:
            round_off = max(gram.count, gram.size) * eps
            if r is None:
                rcond = round_off**0.5
            else:
                rcond = min(round_off, eps**0.5)
        return Columns(gram, diagonal, g, damping, k, rcond, follow, r)

    def _grow(self, basis: SelectedTangents) -> GreedyStop:
        """Select vectors until there is a reason to stop, and return it."""
        first_score = 0.0
        rejected = 0
        limit = len(basis.y)
        while basis.count < limit:
            width = min(self.block, limit - basis.count)
            scores, indices = _find_best(basis.scores(), width)
            first_score = first_score or scores[0]
            stop = _judge_score(scores[0], has_room=rejected <= limit)
            if stop is not None:
                return stop
            if basis.count and self._has_faded(scores[0], first_score):
                return GreedyStop.FADED
            since = basis.count
            rejected += _add_all(basis, scores, indices)
            if self._is_small_gain(basis, since):
                return GreedyStop.SMALL_GAIN
        if limit == self.k:
            return GreedyStop.ALL_TAKEN
        return GreedyStop.ALL_DIRECTIONS

    def _has_faded(self, score: float, first_score: float) -> bool:
        return self.tol is not None and score <= self.tol * first_score

    def _is_small_gain(self, basis: SelectedTangents, since: int) -> bool:
        """Return True if vectors were added after the first `since`, and add at most tol each."""
        if self.tol is None or basis.count == since:
            return False
        return _gain(basis, since) <= self.tol


def _add_all(basis: SelectedTangents, scores: list[float], indices: list[int]) -> int:
    """Add the vectors of positive score to the basis; return how many it rejected."""
    since = basis.count
    candidates = [i for score, i in zip(scores, indices, strict=True) if score > 0]
    for index in candidates:
        basis.add(index)
    added = basis.count - since
    if added:
        basis.refresh(since)
    return len(candidates) - added


def _judge_score(best_score: float, *, has_room: bool) -> GreedyStop | None:
    """Return why no vector can be added, or None.

    Closed coordinates have the score −1; there is no room after too many rejections.
    """
    if not isfinite(best_score):
        return GreedyStop.BROKEN
    if best_score == 0:
        return GreedyStop.CAPTURED
    if best_score < 0 or not has_room:
        return GreedyStop.DEPENDENT
    return None


def _find_best(scores: Tensor, width: int) -> tuple[list[float], list[int]]:
    """Return the largest scores and their indices, with one wait for the device."""
    if width == 1:
        best, index = scores.max(0, keepdim=True)
    else:
        best, index = scores.topk(width)
    numbers = torch.cat([best.double(), index.double()]).tolist()
    return numbers[:width], [int(i) for i in numbers[width:]]


def _gain(basis: SelectedTangents, since: int) -> float:
    """Return the largest fraction of ∇Lᵀh that one of the last vectors added."""
    gains = basis.y[: basis.count].square()
    return float(gains[since:].max() / gains.sum())
