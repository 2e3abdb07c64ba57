r"""Is it a symmetry? ‖J Z‖ at round-off, in float64.

The residual of a generator is ‖J Z‖ over the larger of √Σ‖J Z_w‖², the parts of Z in single
parameters w, which must cancel, and ‖Z‖·‖J r‖/‖r‖ for a random r in the same parameters (or
1 % of that for an r in all of them: what does nothing at all has no other measure).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.attention import unfused_attention
from ..._core.errors import PullbackError
from ...maps import FunctionLinearization
from ..actions.action import Action
from ..actions.scaling import Scaling
from ..graph.tracing import Example

#: what round-off may leave of J Z
TOLERANCE = 1e-10
#: parameters above which actions are first checked together
_LARGE = 2**17


@dataclass(frozen=True)
class Verified:
    """An action, with the largest residual of its generators that was seen."""

    action: Action
    residual: float


@dataclass(frozen=True)
class Rejected:
    """A candidate that is not a symmetry at these parameters and inputs."""

    about: str
    residual: float
    reason: str

    def __str__(self) -> str:
        return f"{self.about}: ‖JZ‖ = {self.residual:.1e}, {self.reason}"


class Verifier:
    """Products with J at the parameters of an example."""

    def __init__(self, example: Example) -> None:
        self.example = example
        everywhere = {n: _random(w) for n, w in example.params.items()}
        push = self._pusher(everywhere)
        pushed = push(everywhere)
        if not bool(torch.isfinite(pushed).all()):
            raise PullbackError(
                "Symmetries cannot be verified",
                "the outputs or their derivatives are not finite on the example",
                "Pass a finite example, and check the parameters for NaN",
            )
        self.tolerance = TOLERANCE if pushed.dtype == torch.float64 else 1e-4
        self._typical = float(pushed.norm() / _norm(everywhere.values()))

    def _pusher(self, names: Iterable[str]) -> Callable[[Mapping[str, Tensor]], Tensor]:
        """v ↦ J v for tangents of these parameters, by name; the others are constants."""
        params = self.example.params
        some = {n: params[n] for n in names}
        with unfused_attention():
            at = FunctionLinearization(lambda w: self.example({**params, **w}), some)

        def push(tangent: Mapping[str, Tensor]) -> Tensor:
            flat = at.space.flatten({n: tangent.get(n) for n in at.space.names})
            with unfused_attention():
                return at.jvp(flat)

        return push

    def residual(self, tangent: Mapping[str, Tensor]) -> float:
        """‖J Z‖, relative; 0 for Z = 0."""
        length = float(_norm(tangent.values()))
        if length == 0 or not length < float("inf"):
            return 0.0 if length == 0 else float("inf")
        push = self._pusher(tangent)
        whole = float(push(tangent).norm())
        parts = sum(float(push({n: t}).norm()) ** 2 for n, t in tangent.items()) ** 0.5
        random = {n: _random(t) for n, t in tangent.items()}
        typical = float(push(random).norm() / _norm(random.values()))
        scale = max(parts, length * typical, 1e-2 * length * self._typical)
        return whole / scale if scale > 0 else 0.0 if whole == 0 else float("inf")

    def together(self, actions: Sequence[Action]) -> float:
        """The residual of a random combination of the generators of all actions, each of length 1.

        Without the parts of single parameters, which would cost a product with J each.
        """
        total: dict[str, Tensor] = {}
        for action in actions:
            tangent = self._random_tangent(action)
            length = float(_norm(tangent.values()))
            for n, t in tangent.items() if length > 0 else ():
                total[n] = total[n] + t / length if n in total else t / length
        length = float(_norm(total.values())) if total else 0.0
        if not 0 < length < float("inf"):
            return 0.0 if length == 0 else float("inf")
        push = self._pusher(total)
        random = {n: _random(t) for n, t in total.items()}
        typical = float(push(random).norm() / _norm(random.values()))
        whole = float(push(total).norm())
        return whole / (length * typical) if typical > 0 else 0.0 if whole == 0 else float("inf")

    def _random_tangent(self, action: Action) -> dict[str, Tensor]:
        params = self.example.params
        one = params[action.names[0]]
        element = torch.zeros(action.dimension, dtype=one.dtype, device=one.device)
        return action.tangent(params, _random(element))

    def check(self, action: Action) -> Iterator[Verified | Rejected]:
        """The action if a random combination of its generators is in the kernel; else its part."""
        found = self.residual(self._random_tangent(action))
        if found <= self.tolerance:
            yield Verified(action, found)
        elif not found < float("inf"):
            yield Rejected(action.about, found, "the generators are not finite")
        elif isinstance(action, Scaling) and action.units > 1 and not _before_norm(action):
            yield from self._apart(action)
        else:
            yield Rejected(action.about, found, _why(action))

    def _apart(self, action: Scaling) -> Iterator[Verified | Rejected]:
        """Unit by unit, halving while a half fails and patience lasts."""
        keep = torch.zeros(action.units, dtype=torch.bool)
        best, worst, bad = 0.0, 0.0, 0
        stack, patience = [torch.arange(action.units)], 64
        while stack:
            units, patience = stack.pop(), patience - 1
            element = torch.zeros(action.units, dtype=torch.float64)
            element[units] = _random(element[units])
            found = self.residual(action.tangent(self.example.params, element))
            if found <= self.tolerance:
                keep[units], best = True, max(best, found)
            elif len(units) == 1 or (len(units) > 64 and found > 1e-2):
                bad, worst = bad + len(units), max(worst, found)
            else:
                stack.extend(units.chunk(2))
        if bool(keep.any()):
            yield Verified(action.only(keep), best)
        about = f"{action.about}, {bad} of {action.units} units"
        yield Rejected(about, worst, _why(action))


def verified(example: Example, actions: Sequence[Action]) -> tuple[list[Verified], list[Rejected]]:
    """Which of the candidates are symmetries."""
    verifier = Verifier(example)
    results: list[Verified | Rejected] = []
    if sum(w.numel() for w in example.params.values()) <= _LARGE:
        groups = [[a] for a in reversed(actions)]
    else:
        groups = [list(actions)] if actions else []
    while groups:  # halves of what fails, as long as there are several
        group = groups.pop()
        found = verifier.together(group) if len(group) > 1 else float("inf")
        if found <= verifier.tolerance:
            results.extend(Verified(a, found) for a in group)
        elif len(group) == 1:
            results.extend(verifier.check(group[0]))
        else:
            half = len(group) // 2
            groups.extend((group[half:], group[:half]))
    accepted = [r for r in results if isinstance(r, Verified)]
    return accepted, [r for r in results if isinstance(r, Rejected)]


def _before_norm(action: Action) -> bool:
    """Whether nothing undoes the scaling: a norm is to swallow it."""
    return isinstance(action, Scaling) and not any(leg.power < 0 for leg in action.legs)


def _why(action: Action) -> str:
    if _before_norm(action):
        return "a norm takes it away only up to its eps"
    return "not in the kernel of J on the example"


def _norm(tensors: object) -> Tensor:
    return torch.stack([t.double().norm() for t in tensors]).norm()  # pyright: ignore


def _random(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
