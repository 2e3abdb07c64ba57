from __future__ import annotations
from dataclasses import dataclass
@dataclass(frozen=True)
class Check:
    """A claim, whether it holds, and the numbers that say so."""

    holds: bool
    text: str
def least_squares_claims(found): return []
def poisson_claims(found): return []
