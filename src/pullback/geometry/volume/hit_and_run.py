r"""The volume of a connected sublevel set in many dimensions, by hit-and-run.

In coordinates u that make the loss's curvature round, balls B₀ ⊂ B₁ ⊂ … of radii r_k = r₀ 2^{k/d}
grow until they hold the set S, and

    vol S = vol(S ∩ B₀) ∏_k vol(S ∩ B_k) / vol(S ∩ B_{k−1}).

The first volume is a ball's times the share of its points that lie in S; each ratio comes from
chains that are uniform in S ∩ B_k: from a point, along a random line, to a uniform point of the
*connected* segment inside. Instead of counting points, each segment gives the share of its
length inside B_{k−1}.
"""

from __future__ import annotations

from math import lgamma, log, pi

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from .grid import Volume
from .landscape import Landscape
from .rounding import Rounded, rounded

_PROBES, _BISECTIONS = 16, 14
_PHASES, _DOUBLINGS = 400, 20  # balls at most, and at least so many doublings of their radius
_SETTLING = 16  # moves after which a chain has filled a larger ball: fewer bias every ratio alike


class Sampler:
    """Chains in the part of a sublevel set that lies in a ball."""

    def __init__(
        self,
        landscape: Rounded,
        epsilon: float,
        chains: int,
        generator: torch.Generator,
    ) -> None:
        self.landscape, self.epsilon, self.chains = landscape, epsilon, chains
        self._generator, self._like = generator, landscape.map
        self.dimension = landscape.dimension

    def inside(self, u: Tensor) -> Tensor:
        """Whether points (..., d) lie below ε."""
        return (self.landscape.height(u.flatten(0, -2)) < self.epsilon).view(u.shape[:-1])

    def directions(self, count: int) -> Tensor:
        """Uniform on the sphere, (count, d)."""
        drawn = torch.randn(
            count, self.dimension, dtype=torch.float64, generator=self._generator
        ).to(self._like)
        return drawn / drawn.norm(dim=1, keepdim=True)

    def uniform(self, *shape: int) -> Tensor:
        """In [0, 1)."""
        return torch.rand(*shape, dtype=torch.float64, generator=self._generator).to(self._like)

    def reach(self, u: Tensor, d: Tensor, longest: Tensor) -> Tensor:
        """How far (n,) the connected segment from u along d goes, at most `longest`."""
        steps = torch.linspace(0, 1, _PROBES + 1, dtype=torch.float64, device=u.device)[1:]
        lengths = longest[:, None] * steps
        below = self.inside(u[:, None] + lengths[..., None] * d[:, None])
        first = torch.where(below.all(1), _PROBES, below.int().argmin(1))
        low = torch.where(first > 0, longest * first / _PROBES, 0.0)
        high = (longest * (first + 1) / _PROBES).minimum(longest)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            ok = self.inside((u + middle[:, None] * d)[:, None])[:, 0]
            low, high = torch.where(ok, middle, low), torch.where(ok, high, middle)
        return torch.where(below.all(1), longest, (low + high) / 2)

    def move(self, u: Tensor, radius: float, inner: float) -> tuple[Tensor, Tensor]:
        """One move of all chains inside the ball, and the segments' shares in the inner ball."""
        d = self.directions(len(u))
        behind, ahead = _chord(u, d, radius)
        back, front = self.reach(u, -d, -behind), self.reach(u, d, ahead)
        low, high = _chord(u, d, inner)
        held = (high.minimum(front) - low.maximum(-back)).clamp_min(0).nan_to_num(0.0)
        share = held / (front + back).clamp_min(torch.finfo(u.dtype).tiny)
        place = -back + self.uniform(len(u)) * (front + back)
        return u + place[:, None] * d, share


def by_hit_and_run(
    landscape: Landscape,
    epsilon: float,
    *,
    chains: int,
    moves: int,
    generator: torch.Generator,
) -> Volume:
    """∫_S √det G dθ with its standard error, from `moves` moves of every chain per ball."""
    around = rounded(landscape, epsilon)
    if around is None:
        return Volume(float("inf"), float("nan"), float("inf"), bounded=False)
    sampler = Sampler(around, epsilon, chains, generator)
    d, settling = sampler.dimension, max(_SETTLING, moves // 4)
    radius = _first_radius(sampler)
    u, share, spread = _start(sampler, radius)
    logarithm = log(share) + d * log(radius) + 0.5 * d * log(pi) - lgamma(d / 2 + 1)
    variance = spread**2
    for _ in range(max(_PHASES, _DOUBLINGS * d)):
        inner, radius = radius, radius * 2 ** (1 / d)
        shares = []
        for move in range(settling + moves):
            u, held = sampler.move(u, radius, inner)
            if move >= settling:
                shares.append(held)
        landscape.refuse_lower(around.height(u), epsilon)
        per_chain = torch.stack(shares).mean(0)
        ratio = float(per_chain.mean())
        error = float(per_chain.std()) / len(per_chain) ** 0.5
        logarithm -= log(ratio)
        variance += (error / ratio) ** 2
        if ratio > 1 - 1e-9 and float(u.norm(dim=1).max()) < inner:
            break
    else:
        return Volume(float("inf"), float("nan"), float("inf"), bounded=False)
    euclidean = float(torch.tensor(logarithm + around.log_unit, dtype=torch.float64).exp())
    mean, error = _mean_density(sampler, u, radius, moves)
    pulled = euclidean * mean
    relative = (variance + (error / mean) ** 2) ** 0.5 if mean > 0 else float("nan")
    return Volume(pulled, pulled * relative, euclidean, bounded=True)


def _mean_density(sampler: Sampler, u: Tensor, radius: float, moves: int) -> tuple[float, float]:
    """The mean of √det G over the set, and its error, from points some moves apart."""
    every, found = max(1, moves // 16), []
    for move in range(moves):
        u, _ = sampler.move(u, radius, radius)
        if move % every == every - 1:
            found.append(sampler.landscape.density(u))
    per_chain = torch.stack(found).mean(0)
    return float(per_chain.mean()), float(per_chain.std()) / len(per_chain) ** 0.5


def _first_radius(sampler: Sampler) -> float:
    """A ball whose points are mostly in the set: half the way to the nearest end seen."""
    d = sampler.directions(max(64, 4 * sampler.dimension))
    zero = torch.zeros_like(d)
    longest = torch.full((len(d),), 4.0, dtype=torch.float64, device=d.device)
    nearest = float(sampler.reach(zero, d, longest).min())
    if not nearest > 0:
        raise PullbackError(
            "The point is no minimum",
            "the loss rises above ε at once in some direction, or is lower elsewhere",
            "Descend further, or raise epsilon",
        )
    return 0.5 * nearest


def _start(sampler: Sampler, radius: float) -> tuple[Tensor, float, float]:
    """Chains uniform in S ∩ B₀, the share of B₀ that lies in S, and its relative error."""
    wanted, found, tried, hits = sampler.chains, [], 0, 0
    while hits < wanted:
        d = sampler.directions(4 * wanted)
        u = radius * sampler.uniform(len(d))[:, None] ** (1 / sampler.dimension) * d
        ok = sampler.inside(u[:, None])[:, 0]
        tried, hits = tried + len(u), hits + int(ok.sum())
        found.append(u[ok])
        if tried > 1000 * wanted:
            raise PullbackError(
                "The sublevel set is too thin to sample",
                f"{hits} of {tried} points near the minimum are below epsilon",
                "Raise epsilon, or start from a better minimum",
            )
    share = hits / tried
    return torch.cat(found)[:wanted], share, ((1 - share) / hits) ** 0.5


def _chord(u: Tensor, d: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Where the line u + t·d enters and leaves the ball; not a number where it misses it."""
    along = (u * d).sum(1)
    root = (along**2 - (u * u).sum(1) + radius**2).sqrt()
    return -along - root, -along + root
