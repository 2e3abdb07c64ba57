r"""Is it a symmetry? ‖J Z‖ at round-off, in float64.

Random covectors u ~ N(0, 1) are pulled back once, g = Jᵀu, and serve all generators:
E⟨g, Z⟩² = ‖J Z‖².

The residual of a generator is ‖J Z‖ over the larger of √Σ‖J Z_w‖², the parts of Z in single
parameters w, which must cancel, and ‖Z‖·‖J‖_F/√n over the n entries of the same parameters (or
a small share of that over all entries: what does nothing at all has no other measure). Each
parameter is measured in units of its own size, so that rescaled layers are verified like others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.graph import disable_fused_attention
from .actions.action import Action
from .actions.scaling import Scaling
from .graph.example import Example


@dataclass(frozen=True)
class VerificationThresholds:
    """Numbers that decide what is a symmetry.

    Attributes:
        tolerance: the largest residual of a symmetry. Round-off of float64 leaves up to 1e-12 in
            deep networks; candidates that are no symmetries have 1e-6 and more.
        narrow_tolerance: the same where the model itself computes in a narrower type than float64,
            whose round-off is about 1e-7.
        covectors: how many are pulled back. Four miss a factor 1000 in ‖J Z‖ with probability
            2e-12.
        typical_share: of ‖J‖_F/√n over all entries, by which generators are measured at least.
            One percent keeps round-off of parameters without any effect below the tolerance.
    """

    tolerance: float = 1e-10
    narrow_tolerance: float = 1e-5
    covectors: int = 4
    typical_share: float = 1e-2


THRESHOLDS = VerificationThresholds()


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
    """Covectors pulled back to the parameters of an example.

    Attributes:
        params: of the example.
        tolerance: the largest residual of a symmetry.
    """

    def __init__(self, example: Example) -> None:
        self.params = example.params
        self._sizes = {name: _measure_size(w) for name, w in self.params.items()}
        pullback = _pull_back_covectors(example)
        self.tolerance = THRESHOLDS.tolerance
        if pullback.output_dtype != torch.float64:
            self.tolerance = THRESHOLDS.narrow_tolerance
        #: by name, (covectors, *shape), times the size of the parameter
        self._gradients = {n: g * self._sizes[n] for n, g in pullback.gradients.items()}
        if not all(bool(torch.isfinite(g).all()) for g in self._gradients.values()):
            raise PullbackError(
                "Symmetries cannot be verified",
                "the outputs or their derivatives are not finite on the example",
                "Pass a finite example, and check the parameters for NaN",
            )
        #: ‖J_w‖_F² by name
        self._squared_norms = {
            name: float(g.square().sum()) / len(g) for name, g in self._gradients.items()
        }
        self._typical_gain = self._find_gain(self.params)

    def _find_gain(self, names: Iterable[str]) -> float:
        """‖J‖_F/√n over the entries of these parameters: ‖J v‖ for a random unit vector v."""
        names = list(names)
        count = sum(self.params[name].numel() for name in names)
        if not count:
            return 0.0
        return (sum(self._squared_norms[name] for name in names) / count) ** 0.5

    def _relate_residuals(self, pairs: Tensor, lengths: Tensor, names: Iterable[str]) -> Tensor:
        """‖J Z‖, relative, of generators (k,), 0 for Z = 0.

        Args:
            pairs: ⟨g, Z_w⟩, (k, covectors, parameters).
            lengths: ‖Z‖, (k,).
            names: of the parameters.
        """
        root = THRESHOLDS.covectors**0.5
        image_norms = pairs.sum(2).norm(dim=1) / root
        part_norms = pairs.flatten(1).norm(dim=1) / root
        gain = max(self._find_gain(names), THRESHOLDS.typical_share * self._typical_gain)
        scale = torch.maximum(part_norms, lengths * gain)
        ratio = image_norms / torch.where(scale > 0, scale, 1.0)
        return torch.where(torch.isfinite(lengths) & torch.isfinite(ratio), ratio, torch.inf)

    def residual(self, tangent: Mapping[str, Tensor]) -> float:
        """‖J Z‖, relative, of one tangent Z by name."""
        tangent = {name: t / self._sizes[name] for name, t in tangent.items()}
        pairs = [(self._gradients[n] * t).flatten(1).sum(1) for n, t in tangent.items()]
        length = torch.stack([t.norm() for t in tangent.values()]).norm()
        return float(self._relate_residuals(torch.stack(pairs, 1)[None], length[None], tangent))

    def unit_residuals(self, action: Scaling) -> Tensor:
        """‖J Z‖, relative, of every unit's generator: (units,)."""
        first = self.params[action.names[0]]
        covectors = THRESHOLDS.covectors
        pairs = {name: first.new_zeros(covectors, action.units) for name in action.names}
        squares = first.new_zeros(action.units)
        for leg in action.legs:
            w = self.params[leg.name] / self._sizes[leg.name]
            shape = w.shape if w.ndim else leg.unit.shape
            products = (self._gradients[leg.name] * w).view(covectors, *shape)
            pairs[leg.name] += leg.power * leg.sums(products, action.units)
            squares += leg.power**2 * leg.sums(w.square().view(shape), action.units)
        all_pairs = torch.stack(list(pairs.values()), 2).transpose(0, 1)
        return self._relate_residuals(all_pairs, squares.sqrt(), action.names)

    def check(self, action: Action) -> Iterator[Verified | Rejected]:
        """Yield the action, or the units of a scaling whose generators are in the kernel."""
        if isinstance(action, Scaling):
            yield from self._check_units(action)
            return
        first = self.params[action.names[0]]
        element = torch.randn(action.dimension, generator=_make_generator(), dtype=torch.float64)
        residual = self.residual(action.tangent(self.params, element.to(first)))
        if residual <= self.tolerance:
            yield Verified(action, residual)
        else:
            yield Rejected(action.about, residual, _explain_rejection(action, residual))

    def _check_units(self, action: Scaling) -> Iterator[Verified | Rejected]:
        """Yield the scaling of those units of which it is a symmetry, and why not of the others."""
        residuals = self.unit_residuals(action).cpu()
        if not len(residuals):
            yield Verified(action, 0.0)
            return
        is_symmetry = residuals <= self.tolerance
        worst = float(residuals.amax())
        if bool(is_symmetry.all()):
            yield Verified(action, worst)
            return
        reason = _explain_rejection(action, worst)
        if not bool(is_symmetry.any()) or _is_one_sided(action):
            yield Rejected(action.about, worst, reason)
            return
        yield Verified(action.only(is_symmetry), float(residuals[is_symmetry].amax()))
        about = f"{action.about}, {int((~is_symmetry).sum())} of {action.units} units"
        yield Rejected(about, worst, reason)


def _measure_size(w: Tensor) -> Tensor:
    """The root mean square of the entries, 1 for zeros; without overflow."""
    if not w.numel():
        return w.new_ones(())
    largest = w.abs().amax()
    largest = torch.where(largest > 0, largest, 1.0)
    size = largest * (w / largest).square().mean().sqrt()
    return torch.where(size > 0, size, 1.0)


@dataclass(frozen=True)
class _Pullback:
    """Covectors pulled back to parameters.

    Attributes:
        gradients: Jᵀu by name, (covectors, *shape).
        output_dtype: the type of the model's outputs.
    """

    gradients: dict[str, Tensor]
    output_dtype: torch.dtype


def _pull_back_covectors(example: Example) -> _Pullback:
    """Return Jᵀu for random u."""
    leaves = {name: w.clone().requires_grad_() for name, w in example.params.items()}
    with torch.enable_grad(), disable_fused_attention():
        value = example(leaves)
    count = THRESHOLDS.covectors
    if not value.requires_grad:
        zeros = {name: w.new_zeros(count, *w.shape) for name, w in example.params.items()}
        return _Pullback(zeros, value.dtype)
    gradients: dict[str, list[Tensor]] = {name: [] for name in leaves}
    generator = _make_generator()
    for _ in range(count):
        u = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        pulled = torch.autograd.grad(
            value, tuple(leaves.values()), u, retain_graph=True, materialize_grads=True
        )
        for name, gradient in zip(leaves, pulled, strict=True):
            gradients[name].append(gradient)
    return _Pullback({name: torch.stack(g) for name, g in gradients.items()}, value.dtype)


def verify_actions(
    example: Example, actions: Sequence[Action]
) -> tuple[list[Verified], list[Rejected]]:
    """Return the candidates that are symmetries, and the others with reasons."""
    verifier = Verifier(example)
    accepted: list[Verified] = []
    rejected: list[Rejected] = []
    for action in actions:
        for result in verifier.check(action):
            if isinstance(result, Verified):
                accepted.append(result)
            else:
                rejected.append(result)
    return accepted, rejected


def summarize_rejections(rejected: Sequence[Rejected]) -> Iterator[str]:
    """Yield one line for each reason, with the largest residual."""
    for reason in dict.fromkeys(r.reason for r in rejected):
        rejections = [r for r in rejected if r.reason == reason]
        line = str(max(rejections, key=lambda r: r.residual))
        if len(rejections) > 1:
            line += f"; and {len(rejections) - 1} more like it"
        yield line


def _is_one_sided(action: Action) -> bool:
    """Return True if a scaling divides nothing, so that a norm would have to remove it."""
    return isinstance(action, Scaling) and not any(leg.power < 0 for leg in action.legs)


def _explain_rejection(action: Action, residual: float) -> str:
    if not residual < float("inf"):
        return "the generators are not finite"
    if _is_one_sided(action):
        return "a norm takes it away only up to its eps"
    return "not in the kernel of J on the example"


def _make_generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)
