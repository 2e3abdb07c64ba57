r"""The balanced point of an orbit: log-scales t with Σ_in w² = Σ_out w² for every unit.

It is the minimum of Φ(t) = ½ Σ_e w_e² exp(2(Mt)_e) over the orbit, which is convex in t. The
gradient of Φ is the imbalance of each unit, and its Hessian twice the Gram K = ZZᵀ of the
generators. Cyclic closed-form updates t_u += ¼ log(out_u/in_u) come near from anywhere, Newton's
method then ends at round-off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .energies import Energies
from .orbit_gram import OrbitGram
from .units import Units

_NEAR = 0.5
_SWEEPS, _NEWTON = 300, 60


def balance(units: Units, params: Mapping[str, Tensor]) -> tuple[Tensor, Energies]:
    r"""The balanced point of the orbit: t (U,), 0 for dead units.

    Where the parameters are balanced to their own round-off, t is 0 exactly.
    """
    energies = Energies(units, params)
    eps = max(torch.finfo(params[name].dtype).eps for name in units.names)
    t = energies.zeros()
    worst = _worst(energies, t)
    if worst <= 16 * eps:
        return t, energies
    for _ in range(_SWEEPS):
        if worst <= _NEAR:
            break
        t = _sweep(energies, t)
        worst = _worst(energies, t)
    # half precisions and float32 keep no more than this of it
    enough = eps / 16 if eps > torch.finfo(torch.float64).eps else 0.0
    return _newton(energies, t, worst, enough), energies


def _worst(energies: Energies, t: Tensor) -> float:
    return float(energies.imbalance(t).abs().amax())


def _sweep(energies: Energies, t: Tensor) -> Tensor:
    """t_u += ¼ log(out/in), color after color; half of it where units of a color are coupled."""
    units = energies.units
    power = max(abs(leg.power) for part in units.parts for leg in part.legs)
    for color in colors(units):
        chosen = torch.zeros_like(energies.dead)
        damped = torch.full_like(t, 0.25 / power)
        for i, piece in enumerate(units.split(torch.arange(units.total, device=t.device))):
            if i in color:
                chosen[piece] = True
                damped[piece] *= 0.5 if coupled(units, i) else 1.0
        t = t + torch.where(chosen, damped * energies.imbalance(t), 0.0)
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
