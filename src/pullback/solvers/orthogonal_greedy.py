"""The natural gradient on a few tangent vectors, chosen greedily."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from .._core.checks import refuse_number
from .._core.errors import Status, refuse_unknown
from ..grams import FactoredGram, Gram
from .base import Damping, Solution, Solver, resolve
from .pinv import keeps_digits
from .tangents import Columns, Pivots, SelectedTangents

RULES = ("correlation", "decrease")

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
            refuse_number(f"OrthogonalGreedy({name}=...)", count, least=1, whole=True)
        for name, share in (("tol", tol), ("rcond", rcond)):
            if share is not None:
                refuse_number(f"OrthogonalGreedy({name}=...)", share, below=1)
        refuse_unknown("rule", rule, RULES)
        self.k, self.rule, self.tol = k, rule, tol
        self.damping, self.block, self.rcond = damping, block, rcond

    def init(self, gram: Gram) -> tuple[Gram, Tensor]:
        """The Gram, and the squared lengths G_ii of its tangent vectors."""
        return gram, gram.diagonal()

    def solve(
        self,
        state: tuple[Gram, Tensor],
        rhs: Tensor,
        damping: Damping | None = None,
        *,
        whitened: Tensor | None = None,
    ) -> GreedySolution:
        value = resolve(self.damping if damping is None else damping, state[0])
        basis = self._basis(*state, rhs, value, whitened)
        usable = torch.isfinite(basis.diagonal).all() & basis.open.any()
        stopped = self._grow(basis) if bool(usable & torch.isfinite(rhs).all()) else BROKEN
        x = basis.solution()
        if stopped == BROKEN or not bool((torch.isfinite(x) & torch.isfinite(basis.rho)).all()):
            zero = torch.zeros_like(rhs)
            return GreedySolution(zero, value, 0, status=Status.SINGULAR, stopped=BROKEN)
        chosen = torch.tensor(basis.selected, dtype=torch.long, device=rhs.device)
        left = basis.rho.index_fill(0, chosen, 0.0).norm() / rhs.norm()
        residual = float(left.nan_to_num(0.0))
        energy = basis.y[: basis.count].square().cumsum(0)
        return GreedySolution(
            x, value, basis.count, residual, selected=chosen, energy=energy, stopped=stopped
        )

    def _basis(
        self, gram: Gram, diagonal: Tensor, g: Tensor, damping: float, r: Tensor | None
    ) -> SelectedTangents:
        k, follow = min(self.k, gram.size), self.rule == "decrease"
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
            relative = max(gram.count, gram.size) * eps
            rcond = relative**0.5 if r is None else min(relative, eps**0.5)
        return Columns(gram, diagonal, g, damping, k, rcond, follow, r)

    def _grow(self, basis: SelectedTangents) -> str:
        """Select until there is a reason to stop; that reason."""
        first, rejected, limit = 0.0, 0, len(basis.y)
        while basis.count < limit:
            width = min(self.block, limit - basis.count)
            tops, indices = _best(basis.scores(), width)
            first = first or tops[0]
            if not isfinite(tops[0]):
                return BROKEN
            if tops[0] == 0:
                return CAPTURED
            if tops[0] < 0 or rejected > limit:
                return DEPENDENT
            if self.tol is not None and tops[0] <= self.tol * first and basis.count:
                return FADED
            since = basis.count
            for top, i in zip(tops, indices, strict=True):
                rejected += top > 0 and not basis.add(i)
            if basis.count == since:
                continue
            basis.refresh(since)
            if self.tol is not None and _gain(basis, since) <= self.tol:
                return SMALL_GAIN
        if limit == self.k:
            return f"all k = {self.k} tangent vectors were taken"
        return f"{limit} tangent vectors span all directions there are"


def _best(scores: Tensor, width: int) -> tuple[list[float], list[int]]:
    """The largest scores and where they are, with one wait for the device."""
    if width == 1:
        top, index = scores.max(0, keepdim=True)
    else:
        top, index = scores.topk(width)
    packed = torch.cat([top.double(), index.double()]).tolist()
    return packed[:width], [int(i) for i in packed[width:]]


def _gain(basis: SelectedTangents, since: int) -> float:
    """The largest share of ∇Lᵀh that one of the last vectors brought."""
    gains = basis.y[: basis.count].square()
    return float(gains[since:].max() / gains.sum())
