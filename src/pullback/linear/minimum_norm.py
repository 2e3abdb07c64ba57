r"""J⁺r for the tangent J of a product of matrices: by its spectrum, by an SVD, or by iteration."""

from __future__ import annotations

from torch import Tensor

from .._core.errors import PullbackError
from ..grams import FactoredGram
from ..solvers import PseudoInverse
from .checks import refuse_zero_tangent
from .grams import Sides, TangentGram, tangent_gram
from .iterative import iterated
from .spectra import Commuting
from .tangents import Grid, Tangent

_LARGEST = 2**27  # entries of the tangent that may be decomposed where the iteration fails


def minimum_norm(
    tangent: Tangent,
    spectrum: Commuting | None,
    r: Tensor,
    *,
    damping: float = 0.0,
    rcond: float | None = None,
) -> Tensor:
    """Jᵀ(JJᵀ + λ)⁺r, (p,).

    An SVD of J in reduced coordinates is the most robust way and takes about a second for a
    thousand rows; beyond, conjugate gradients are tens of times faster and as accurate wherever
    they converge.
    """
    refuse_zero_tangent(tangent.squares().sum())
    if spectrum is not None:
        return _solved(TangentGram(tangent, Sides(), spectrum), r, damping, rcond)
    gram = tangent_gram(tangent, Sides())
    if gram.structure.holds == "operator" and isinstance(tangent, Grid) and gram.spectrum() is None:
        try:
            return iterated(tangent, r, damping, rcond)
        except PullbackError:
            if tangent.count * tangent.width > _LARGEST:
                raise
        gram = tangent_gram(tangent, Sides(), side=tangent.count, entries=_LARGEST)
    return _solved(gram, r, damping, rcond)


def _solved(gram: FactoredGram, r: Tensor, damping: float, rcond: float | None) -> Tensor:
    solver = PseudoInverse(rcond)
    return solver.solve(solver.init(gram), gram.lift(r), damping or None, whitened=r).x
