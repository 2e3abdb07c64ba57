"""The rank of dφ: a spectrum, a tolerance, and how clear the decision is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...grams import Gram
from ...solvers import PseudoInverse


@dataclass(frozen=True)
class Rank:
    """How many directions of Z the parameters can move in; `int(rank)` is the number.

    Attributes:
        rank: the number of singular values above the tolerance.
        spectrum: singular values of A = SᵀJ, decreasing, min(n, p) of them.
        tolerance: the absolute size that counts as zero, rcond·σ_max.
        gap: σ_rank/σ_{rank+1}, infinite where nothing follows: near 1 the rank is a matter of
            taste.
        parameters: p; p − rank directions of Ξ do not move the function.
    """

    rank: int
    spectrum: Tensor
    tolerance: float
    gap: float
    parameters: int

    @classmethod
    def of(cls, gram: Gram, rcond: float) -> Rank:
        """From the form in which G is held."""
        sigma = PseudoInverse(rcond=0.0).init(gram).sigma.sort(descending=True).values
        full = min(gram.count, gram.size)
        spectrum = sigma.new_zeros(max(full, len(sigma)))
        spectrum[: len(sigma)] = sigma
        spectrum = spectrum[:full]
        tolerance = rcond * float(spectrum[0]) if full else 0.0
        rank = int((spectrum > tolerance).sum())
        last = float(spectrum[rank - 1]) if rank else 0.0
        following = float(spectrum[rank]) if rank < full else 0.0
        gap = last / following if following > 0 else float("inf")
        return cls(rank, spectrum, tolerance, gap, gram.size)

    @property
    def deficiency(self) -> int:
        """How many directions of Ξ leave the function where it is, to first order."""
        return self.parameters - self.rank

    def __int__(self) -> int:
        return self.rank

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.parameters} parameters "
            f"(tolerance {self.tolerance:.2g}, gap {self.gap:.2g})"
        )


def default_rcond(gram: Gram) -> float:
    """10·max(n, p, 10)·ε, at most √ε, where A is held; √(10·side·ε) where it was squared."""
    eps = torch.finfo(gram.dtype).eps
    if gram.structure.holds == "rows":
        return min(10 * max(gram.count, gram.size, 10) * eps, eps**0.5)
    return (10 * min(gram.count, gram.size) * eps) ** 0.5
