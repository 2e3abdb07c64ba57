"""What the ways to the Gram of an affine layer cost, in multiply-adds."""

from __future__ import annotations

from torch import Tensor


class Costs:
    """For inputs (N, G, T, I) and cotangents (N, R, G, T, O) of both sides."""

    def __init__(
        self,
        one: tuple[int, int, int, int],
        d1: Tensor,
        two: tuple[int, int, int, int],
        d2: Tensor,
    ) -> None:
        (n, g, t, i), (n2, _, t2, _) = one, two
        r, r2, o = d1.shape[1], d2.shape[1], d1.shape[-1]
        pairs = n * r * n2 * r2
        sweep = 40 if t * t2 > 1 else 4  # multiply-adds in the time of passing over an entry
        passing = 400 if d1.is_cuda else 8  # the same for one pass out and back
        looking = 16 * (n * r * t + n2 * r2 * t2)  # the same for the proof of separation
        self._ways = {
            "hadamard": g * t * t2 * (n * n2 * i + pairs * (o + sweep)),
            "materialized": g * o * i * (pairs + t * (n * r + n2 * r2)),
            "contracted": g * t * (n * n2 * (t2 * i + r2 * o * (2 * t2 + passing)) + 2 * pairs * o),
        }
        apart = g * o * (i * (n * t + n2 * t2) + n * n2 * i + 4 * pairs + looking)
        self._separated = apart if r * r2 > 1 else float("inf")

    def cheapest(self) -> str:
        """Of the ways that are open to all cotangents."""
        return min(self._ways, key=lambda way: self._ways[way])

    def separation_may_pay(self) -> bool:
        """Whether it is worth the look, which may be in vain."""
        return 2 * self._separated < self._ways[self.cheapest()]
