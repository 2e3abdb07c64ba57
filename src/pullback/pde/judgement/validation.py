"""The residuals of a network at fresh points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.processes import Processes
from ...maps import Scheme
from ...maps.jets import Index
from ..discretization.residual import LocalResidual, derivatives
from ..discretization.sites import Sites, draw_sites, take_share
from ..discretization.term import build_term
from ..discretization.trial import Trial, select_unknowns
from ..domains import PointSet
from ..problem.conditions import Condition, Data, Energy, Integral, Prior
from ..problem.problem import Problem

_FEWEST, _MOST = 500, 4000  # fresh points of a condition


_SIZED = 500  # points at which the fields' derivatives are sized


_AXES = 8  # of a Laplacian, whose second derivatives are sized


_SMALL = 1e-4  # a field counts at least this share of the largest mean square


_FLAT = 1e-4  # so do derivatives, of the mean square of a wave with the domain's own lengths


_OFFSET = 15_485_863  # between the seeds of a run's own points and those of fresh ones


@dataclass(frozen=True)
class Residual:
    """One condition at fresh points.

    Attributes:
        rms: root of its mean square, all components together.
        largest: the largest absolute value at a point.
        size: root mean square of the terms that should cancel.
        affine: whether it is linear in the fields.
    """

    rms: float
    largest: float
    size: float
    affine: bool

    @property
    def relative(self) -> float:
        """rms/size: 1 where nothing cancels, 0 where the condition holds."""
        return self.rms / self.size if self.size else 0.0


class Validation:
    """Fresh Sobol points for every condition; measured points are taken as they are.

    Args:
        problem, trial: what must hold, and of what.
        counts, weights, seed: the run's own, by condition.
        processes: among which the points are shared; this one alone by default.
    """

    def __init__(
        self,
        problem: Problem,
        trial: Trial,
        counts: Mapping[str, int],
        weights: Mapping[str, float],
        seed: int,
        processes: Processes | None = None,
    ) -> None:
        self._processes = processes or Processes()
        self._problem, self._trial, self._seed = problem, trial, seed
        self._counts = {n: min(max(count, _FEWEST), _MOST) for n, count in counts.items()}
        # a quadrature has no seed: one with twice the points is another
        integrals = [c.name for c in problem.conditions if isinstance(c, Integral)]
        self._counts |= {n: 2 * counts[n] for n in integrals}
        self.weights = dict(weights)

    def points(self, condition: Condition, number: int, count: int | None = None) -> Sites:
        """The fresh points of this number, in the trial's precision."""
        region = condition.region(self._problem.domain)
        count = self._counts[condition.name] if count is None else count
        count = len(region) if isinstance(region, PointSet) else count
        seed = self._seed + _OFFSET * (number + 1) + self._problem.conditions.index(condition)
        found = draw_sites(self._problem, condition, count, "sobol", seed)
        like = next(self._trial.parameters())
        return tuple(p.to(like.dtype, like.device) for p in found)

    @torch.no_grad()
    def loss(self, number: int) -> float:
        """The loss at the fresh points of this number."""
        params = {n: p.detach() for n, p in self._trial.named_parameters()}
        processes, own = self._processes, 0.0
        with processes.raise_together():
            for c in self._problem.conditions:
                sites = self.points(c, number)
                total, weight = sites[0].weights.sum(), self.weights[c.name]
                sites = take_share(c, sites, processes)
                if len(sites[0]):
                    item = build_term(self._problem, c, self._trial, sites, weight, total)
                    own += float(item.loss(item.map(params)))
        return processes.sum_numbers([own])[0]

    def residuals(self, number: int = 0) -> dict[str, Residual]:
        """Every condition that should vanish, by name; an energy and a prior should not."""
        unknowns = select_unknowns({n: p.detach() for n, p in self._trial.named_parameters()})
        found = {
            c.name: LocalResidual(self._problem, c, self.points(c, number), unknowns)
            for c in self._problem.conditions
            if not isinstance(c, (Energy, Prior))
        }
        sizes = self._sizes({index for x in found.values() for _, _, index in x.keys})
        out = {}
        for c in self._problem.conditions:
            if isinstance(c, Integral):
                q = self.points(c, number)[0].weights
                out[c.name] = _integral_residual(found[c.name], self._trial, q, c.value)
            elif c.name in found:
                out[c.name] = _local_residual(found[c.name], self._trial, sizes)
        return out

    def relative(self, number: int = 0) -> float:
        """The largest relative residual; measurements have noise, and are left out."""
        noisy = {c.name for c in self._problem.conditions if isinstance(c, Data)}
        found = {}
        with self._processes.raise_together():
            if self._processes.rank == 0:
                found = self.residuals(number)
        relative = [r.relative for n, r in found.items() if n not in noisy]
        return self._processes.broadcast_object(max(relative, default=float("nan")))

    def _sizes(self, wanted: set[Index | None]) -> dict[tuple[str, Index | None], float]:
        """Mean squares over the domain of derivatives, by field; the Laplacian's is that of its
        terms, which may cancel. Where these vanish, the field's own variation is their scale.
        """
        space = self._problem.coordinates.space
        pairs = [(i, i) for i in space[:_AXES]] if None in wanted else []
        scheme = Scheme.of({index for index in wanted if index is not None} | set(pairs))
        like = next(self._trial.parameters())
        x = self._problem.domain.sample(_SIZED, "sobol", seed=self._seed).x.to(like)
        found = derivatives(self._trial, x[None], scheme).double()  # (T, 1, N, m)
        squares, varied = found.square().mean((1, 2)), found[scheme.position[()], 0].var(0)
        waves = (math.pi / (self._problem.domain.high - self._problem.domain.low)).tolist()

        def square(index: Index) -> Tensor:
            flat = _FLAT * math.prod(waves[i] ** 2 for i in index) * varied
            return torch.maximum(squares[scheme.position[index]], flat)

        def mean(index: Index | None) -> Tensor:
            if index is not None:
                return square(index)
            return len(space) / len(pairs) * torch.stack([square(i) for i in pairs]).sum(0)

        out = {}
        for index in wanted:
            each = mean(index)
            floored = each.clamp(min=_SMALL * float(each.max()))
            out |= {
                (n, index): float(v) for n, v in zip(self._problem.fields, floored, strict=True)
            }
        return out


def _integral_residual(local: LocalResidual, trial: Trial, q: Tensor, value: float) -> Residual:
    """∫f − value, beside ∫|f| and the value."""
    c = local.fields(trial)
    f = local(c)
    off = abs(float((q @ f).sum()) - value)
    size = float((q @ f.abs()).sum().square() + value**2) ** 0.5
    return Residual(off, off, size, local.affine(c))


def _local_residual(
    local: LocalResidual, trial: Trial, sizes: Mapping[tuple[str, Index | None], float]
) -> Residual:
    c = local.fields(trial)
    values, slopes = local.slopes(c)
    source, size = values.clone(), 0.0
    for key, slope in slopes.items():
        source -= slope * c[key][:, None]
        size += float(slope.square().mean(0).sum()) * sizes[key[1:]]
    size += float(source.square().mean(0).sum())
    rms = float(values.square().mean(0).sum().sqrt())
    return Residual(rms, float(values.abs().max()), size**0.5, local.affine(c))
