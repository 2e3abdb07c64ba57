r"""The balanced point of an orbit: log-scales t with Σ_in w² = Σ_out w² for every unit.

It is the minimum of Φ(t) = ½ Σ_e w_e² exp(2(Mt)_e) over the orbit, which is convex in t. The
gradient of Φ is the imbalance of each unit, and its Hessian twice the Gram K = ZZᵀ of the
generators. Cyclic closed-form updates t_u += ¼ log(out_u/in_u) come near from anywhere, Newton's
method then ends at round-off. Where the entries of a parameter differ by many powers of ten, the
same updates with the largest entries instead of sums of squares come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .energies import Energies
from .orbit_gram import OrbitGram
from .tops import Tops
from .units import Units

_NEAR, _WIDE = 0.5, 100.0
_SWEEPS, _NEWTON = 300, 60


def balance(units: Units, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    r"""The balanced point of the orbit: t (U,), and which units (U,) are dead; t is 0 for these.

    Where the parameters are balanced to their own round-off, t is 0 exactly.
    """
    eps = max(torch.finfo(params[name].dtype).eps for name in units.names)
    tops = Tops(units, params)
    start = tops.zeros()
    if tops.spread() > _WIDE:  # squares of the small ones would vanish beside the large ones
        start = _swept(tops, start, _WIDE)
        given = {name: params[name].detach().to(start.dtype) for name in units.names}
        params = units.scaled(given, start)
    energies = Energies(units, params)
    t = energies.zeros()
    if _worst(energies, t) > 16 * eps:
        t = _swept(energies, t, _NEAR)
        # half precisions and float32 keep no more than this of it
        enough = eps / 16 if eps > torch.finfo(torch.float64).eps else 0.0
        t = _newton(energies, t, _worst(energies, t), enough)
    return start + t, energies.dead


def _worst(norms: Energies | Tops, t: Tensor) -> float:
    return float(norms.imbalance(t).abs().amax())


def _swept(norms: Energies | Tops, t: Tensor, near: float) -> Tensor:
    """Closed-form updates of all units, until no imbalance is larger than `near`."""
    for _ in range(_SWEEPS):
        if _worst(norms, t) <= near:
            break
        t = _sweep(norms, t)
    return t


def _sweep(norms: Energies | Tops, t: Tensor) -> Tensor:
    """t_u += ¼ log(out/in), color after color; half of it where units of a color are coupled."""
    units = norms.units
    power = max(abs(leg.power) for part in units.parts for leg in part.legs)
    for color in colors(units):
        chosen = torch.zeros_like(t, dtype=torch.bool)
        damped = torch.full_like(t, 0.25 / power)
        for i, piece in enumerate(units.split(torch.arange(units.total, device=t.device))):
            if i in color:
                chosen[piece] = True
                damped[piece] *= 0.5 if coupled(units, i) else 1.0
        t = t + torch.where(chosen, damped * norms.imbalance(t), 0.0)
    return t


def colors(units: Units) -> list[tuple[int, ...]]:
    """Scalings that share no parameter, in as few classes as a greedy choice finds."""
    names = [set(s.names) for s in units.scalings]
    out: list[list[int]] = []
    for i, mine in enumerate(names):
        for color in out:
            if all(mine.isdisjoint(names[j]) for j in color):
                color.append(i)
                break
        else:
            out.append([i])
    return [tuple(color) for color in out]


def coupled(units: Units, index: int) -> bool:
    """Whether two units of one scaling share entries: both sides of one parameter, as on a skip."""
    legs: Sequence[str] = [leg.name for leg in units.scalings[index].legs]
    return len(set(legs)) < len(legs)


def _newton(energies: Energies, t: Tensor, worst: float, enough: float) -> Tensor:
    """Newton's method with the step cut where Φ would not fall; ends when nothing improves."""
    phi = energies.total(t)
    for _ in range(_NEWTON):
        gram = OrbitGram(energies, t)
        # the next error is of the order of this one's square: no need to solve more precisely
        step = -0.5 * gram.solve(gram.slope, tolerance=min(0.1, worst))
        step = step / step.abs().amax().clamp(min=1.0)
        trial = t + step
        small = float(step.abs().amax()) < 1e-3  # where Φ no longer tells
        for _ in range(30):
            if small or bool(energies.total(trial) <= phi):
                break
            step = step / 2
            trial = t + step
        now = _worst(energies, trial)
        if now <= enough or (small and now >= 0.5 * worst):
            return trial if now < worst else t
        t, worst, phi = trial, now, energies.total(trial)
    return t
