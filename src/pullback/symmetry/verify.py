r"""Is it a symmetry? ‖J Z‖ at round-off, in float64.

Random covectors u ~ N(0, 1) are pulled back once, g = Jᵀu, and serve all generators:
E⟨g, Z⟩² = ‖J Z‖². Four of them miss a factor 1000 in ‖J Z‖ with probability 2e-12.

The residual of a generator is ‖J Z‖ over the larger of √Σ‖J Z_w‖², the parts of Z in single
parameters w, which must cancel, and ‖Z‖·‖J‖_F/√n over the n entries of the same parameters (or
1 % of that over all entries: what does nothing at all has no other measure). Each parameter is
measured in units of its own size, so that rescaled layers are verified like others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.graph import disable_fused_attention
from .actions.scaling import Action, Scaling
from .graph.tracing import Example

#: what round-off may leave of J Z, and where the model itself computes in a narrower type
TOLERANCE, _NARROW = 1e-10, 1e-5
_COVECTORS = 4


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
    """Covectors pulled back to the parameters of an example."""

    def __init__(self, example: Example) -> None:
        self.params = example.params
        self._size = {n: _size(w) for n, w in self.params.items()}
        pulled, dtype = _pulled(example)
        self.tolerance = TOLERANCE if dtype == torch.float64 else _NARROW
        #: by name, (covectors, *shape), per size of the parameter
        self._pulled = {n: torch.stack(g) * self._size[n] for n, g in pulled.items()}
        if not all(bool(torch.isfinite(g).all()) for g in self._pulled.values()):
            raise PullbackError(
                "Symmetries cannot be verified",
                "the outputs or their derivatives are not finite on the example",
                "Pass a finite example, and check the parameters for NaN",
            )
        #: ‖J_w‖_F² by name
        self._squares = {n: float(g.square().sum()) / len(g) for n, g in self._pulled.items()}
        self._typical = self._gain(self.params)

    def _gain(self, names: Iterable[str]) -> float:
        """‖J‖_F/√n over the entries of these parameters: what J makes of a random unit vector."""
        names = list(names)
        n = sum(self.params[name].numel() for name in names)
        return (sum(self._squares[name] for name in names) / n) ** 0.5 if n else 0.0

    def _residuals(self, pairs: Tensor, lengths: Tensor, names: Iterable[str]) -> Tensor:
        """‖J Z‖, relative, of generators (k,), 0 for Z = 0.

        Args:
            pairs: ⟨g, Z_w⟩, (k, covectors, parameters).
            lengths: ‖Z‖, (k,).
            names: of the parameters.
        """
        whole = pairs.sum(2).norm(dim=1) / _COVECTORS**0.5
        parts = pairs.flatten(1).norm(dim=1) / _COVECTORS**0.5
        usual = max(self._gain(names), 1e-2 * self._typical)
        scale = torch.maximum(parts, lengths * usual)
        ratio = whole / torch.where(scale > 0, scale, 1.0)
        return torch.where(torch.isfinite(lengths) & torch.isfinite(ratio), ratio, torch.inf)

    def residual(self, tangent: Mapping[str, Tensor]) -> float:
        """‖J Z‖, relative, of one tangent Z by name."""
        tangent = {n: t / self._size[n] for n, t in tangent.items()}
        pairs = [(self._pulled[n] * t).flatten(1).sum(1) for n, t in tangent.items()]
        length = torch.stack([t.norm() for t in tangent.values()]).norm()
        return float(self._residuals(torch.stack(pairs, 1)[None], length[None], tangent))

    def unit_residuals(self, action: Scaling) -> Tensor:
        """‖J Z‖, relative, of every unit's generator: (units,)."""
        one = self.params[action.names[0]]
        pairs = {n: one.new_zeros(_COVECTORS, action.units) for n in action.names}
        squares = one.new_zeros(action.units)
        for leg in action.legs:
            w = self.params[leg.name] / self._size[leg.name]
            tail = w.shape if w.ndim else leg.unit.shape
            products = (self._pulled[leg.name] * w).view(_COVECTORS, *tail)
            pairs[leg.name] += leg.power * leg.sums(products, action.units)
            squares += leg.power**2 * leg.sums(w.square().view(tail), action.units)
        together = torch.stack(list(pairs.values()), 2).transpose(0, 1)
        return self._residuals(together, squares.sqrt(), action.names)

    def check(self, action: Action) -> Iterator[Verified | Rejected]:
        """The action, or the units of a scaling whose generators are in the kernel."""
        if isinstance(action, Scaling):
            yield from self._check_units(action)
            return
        one = self.params[action.names[0]]
        element = torch.randn(action.dimension, generator=_generator(), dtype=torch.float64)
        found = self.residual(action.tangent(self.params, element.to(one)))
        if found <= self.tolerance:
            yield Verified(action, found)
        else:
            yield Rejected(action.about, found, _why(action, found))

    def _check_units(self, action: Scaling) -> Iterator[Verified | Rejected]:
        found = self.unit_residuals(action)
        good = (found <= self.tolerance).cpu()
        if bool(good.all()):
            yield Verified(action, float(found.amax()) if len(found) else 0.0)
            return
        worst = float(found.amax())
        if not bool(good.any()) or _before_norm(action):
            yield Rejected(action.about, worst, _why(action, worst))
            return
        yield Verified(action.only(good), float(found.cpu()[good].amax()))
        about = f"{action.about}, {int((~good).sum())} of {action.units} units"
        yield Rejected(about, worst, _why(action, worst))


def _size(w: Tensor) -> Tensor:
    """The root mean square of the entries, 1 for zeros; without overflow."""
    top = w.abs().amax() if w.numel() else w.new_zeros(())
    top = torch.where(top > 0, top, 1.0)
    size = top * (w / top).square().mean().sqrt()
    return torch.where(size > 0, size, 1.0)


def _pulled(example: Example) -> tuple[dict[str, list[Tensor]], torch.dtype]:
    """Jᵀu for random u, by name; and the type of the outputs."""
    leaves = {n: w.clone().requires_grad_() for n, w in example.params.items()}
    with torch.enable_grad(), disable_fused_attention():
        value = example(leaves)
    if not value.requires_grad:
        still = {n: [torch.zeros_like(w)] * _COVECTORS for n, w in example.params.items()}
        return still, value.dtype
    out: dict[str, list[Tensor]] = {n: [] for n in leaves}
    generator = _generator()
    for _ in range(_COVECTORS):
        u = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        pulled = torch.autograd.grad(
            value, tuple(leaves.values()), u, retain_graph=True, materialize_grads=True
        )
        for found, g in zip(out.values(), pulled, strict=True):
            found.append(g)
    return out, value.dtype


def verify_actions(
    example: Example, actions: Sequence[Action]
) -> tuple[list[Verified], list[Rejected]]:
    """Which of the candidates are symmetries."""
    verifier = Verifier(example)
    results = [result for action in actions for result in verifier.check(action)]
    accepted = [r for r in results if isinstance(r, Verified)]
    return accepted, [r for r in results if isinstance(r, Rejected)]


def summarize_rejections(rejected: Sequence[Rejected]) -> Iterator[str]:
    """One line for each reason, with the largest residual."""
    for reason in dict.fromkeys(r.reason for r in rejected):
        alike = [r for r in rejected if r.reason == reason]
        worst = max(alike, key=lambda r: r.residual)
        yield f"{worst}" + (f"; and {len(alike) - 1} more like it" if len(alike) > 1 else "")


def _before_norm(action: Action) -> bool:
    """Whether the scaling has one side only, so that a norm would have to remove it."""
    return isinstance(action, Scaling) and not any(leg.power < 0 for leg in action.legs)


def _why(action: Action, residual: float) -> str:
    if not residual < float("inf"):
        return "the generators are not finite"
    if _before_norm(action):
        return "a norm takes it away only up to its eps"
    return "not in the kernel of J on the example"


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)
