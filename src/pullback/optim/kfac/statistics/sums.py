"""What one statistics step adds up, block by block, and the means of it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...._core.space import compute_dtype
from ....grams.kronecker.packed import Packed, Side, memory, packed, whole
from ....maps.layers import Layer
from ....maps.layers.moments import Moments
from ..factors.factor import DIAGONAL, SPECTRUM, UNITS, BlockKey, Factor


def _sum(one: Side, two: Side) -> Side:
    """The sum; what is packed stays so."""
    if isinstance(one, Packed) and isinstance(two, Packed):
        return one + two
    return whole(one) + whole(two)


class Role(NamedTuple):
    """The kind of layer that uses a weight, and whether the weight's rows belong to its input."""

    name: str
    input_first: bool = False

    @classmethod
    def of(cls, layer: Layer) -> Role:
        """The role in which this layer uses its weight."""
        return cls(type(layer).__name__, layer.input_first)

    @property
    def factors(self) -> tuple[Factor, Factor]:
        """The factors of inputs and outputs."""
        one, two = ("left", "right") if self.input_first else ("right", "left")
        return Factor(self.name, one), Factor(self.name, two)


BIAS = Role("bias")


@dataclass
class Sums:
    """Sums over the places and samples of all forward calls since the last step.

    `inputs` and `outputs` are the two sides of each role; `squares` serves units and diagonals;
    `spectrum` are second moments in a block's eigenbases.
    """

    inputs: dict[Role, Moments] = field(default_factory=dict)
    outputs: dict[Role, Side] = field(default_factory=dict)
    squares: Tensor | None = None
    spectrum: Tensor | None = None

    def add_inputs(self, role: Role, moments: Moments) -> None:
        """One more use in this role; a bias by itself has the input 1, however often."""
        known = role in self.inputs and role != BIAS
        self.inputs[role] = self.inputs[role] + moments if known else moments

    def add_outputs(self, role: Role, second: Side) -> None:
        """The cotangents of one covector at one more use."""
        held = self.outputs.get(role)
        self.outputs[role] = second if held is None else _sum(held, second)

    def add_bias(self, second: Tensor) -> None:
        """The cotangents at a bias by itself: its input is 1 everywhere."""
        ones = torch.ones_like(second[:, :1] if second.ndim == 2 else second[:, 0, :1])
        self.add_inputs(BIAS, Moments(ones, ones, 1.0))
        self.add_outputs(BIAS, second)

    def add_squares(self, squares: Tensor) -> None:
        """Outer products of gains and shifts, or squares of single entries."""
        self.squares = squares if self.squares is None else self.squares + squares

    def add_spectrum(self, values: Tensor) -> None:
        """Squares of the gradient's entries in the block's eigenbases."""
        self.spectrum = values if self.spectrum is None else self.spectrum + values

    def add(self, other: Sums) -> None:
        """The sums of another pass."""
        for role, moments in other.inputs.items():
            self.add_inputs(role, moments)
        for role, second in other.outputs.items():
            self.add_outputs(role, second)
        if other.squares is not None:
            self.add_squares(other.squares)
        if other.spectrum is not None:
            self.add_spectrum(other.spectrum)


#: why a forward pass gave no statistics; of several passes, the one that came farthest tells
MISSED = (
    "the model was not called",
    "the model was called inside a transform of torch.func, or held other parameters than the "
    "optimizer's",
    "the model was called without gradients",
    "the model was in evaluation mode",
    "the model's output does not depend on its parameters",
    "no gradient reached the model's output",
    "the gradient passed the model's output, but not to its parameters",
    "the loss was made of derivatives of the model's output by its inputs, and the metric is that "
    "of the output itself; step(objective=...) takes such terms",
)
UNREACHED, DERIVED = MISSED[6], MISSED[7]


@dataclass
class Pool:
    """Everything gathered since the last step: sums, and the count of samples beside them."""

    sums: dict[BlockKey, Sums] = field(default_factory=dict)
    samples: Tensor | float = 0.0
    calls: int = 0
    missed: str = MISSED[0]

    def of(self, key: BlockKey) -> Sums:
        """A block's sums, empty ones at first."""
        return self.sums.setdefault(key, Sums())

    def add(self, sums: Mapping[BlockKey, Sums], samples: Tensor | float) -> None:
        """The sums of one more forward pass."""
        for key, own in sums.items():
            if key in self.sums:
                self.sums[key].add(own)
            else:
                self.sums[key] = own
        self.samples = self.samples + samples

    def miss(self, reason: str) -> None:
        """Note a pass that gave nothing."""
        self.missed = max(self.missed, reason, key=MISSED.index)

    def warn_derivatives(self) -> None:
        """Warn where the statistics that were taken do not cover all terms of the loss."""
        if self.missed == DERIVED:
            warnings.warn(
                "The loss has terms in derivatives of the model's output by its inputs. The metric "
                "is that of the output itself; step(objective=...) covers all terms.",
                RuntimeWarning,
                stacklevel=2,
            )


def means(pool: Pool, scale: Tensor | float) -> dict[BlockKey, dict[Factor, Side]]:
    """Means over samples (cotangents) and places (inputs); outputs are multiplied by `scale`."""
    out: dict[BlockKey, dict[Factor, Side]] = {}
    factor = scale / pool.samples
    scaled: list[Tensor] = []
    for key, held in pool.sums.items():
        own = out[key] = {}
        if held.squares is not None:
            own[UNITS if key.kind == "units" else DIAGONAL] = held.squares
            scaled.append(held.squares)
        for role, second in held.outputs.items():
            inputs, outputs = role.factors
            own[outputs], m = packed(second), held.inputs[role]
            scaled.append(memory(own[outputs]))
            own[inputs] = _mean(m, key.joint)
            if key.joint and len(m.second.shape) == 3:
                own[Factor(role.name, "mean")] = m.first / _counts(m, 2)
        if held.spectrum is not None:
            own[SPECTRUM] = held.spectrum
            scaled.append(held.spectrum)
    _multiply(scaled, factor)
    return out


def _multiply(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """All by one number, in place."""
    kinds: dict[object, list[Tensor]] = {}
    for t in tensors:
        kinds.setdefault((t.device, t.dtype), []).append(t)
    for some in kinds.values():
        by = factor.to(some[0]) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(some, by)


def _mean(m: Moments, joint: bool) -> Side:
    """mean aaᵀ, or of a joint block's diagonal that of (a, 1); groups may count apart."""
    counts = _counts(m, len(m.second.shape))
    if isinstance(m.second, Packed):
        return Packed(m.second.memory / counts)
    mean = packed(m.second / counts)
    if joint and len(mean.shape) == 2:
        return torch.cat([memory(mean), torch.ones_like(memory(mean)[:, :1])], 1)
    return mean


def _counts(m: Moments, ndim: int) -> Tensor | float:
    """The number of places, or one per group before `ndim` − 1 other axes."""
    if isinstance(m.places, Tensor):
        return m.places.view(-1, *[1] * (ndim - 1))
    return m.places if m.places else torch.nan


def square_gradients(gradients: Mapping[str, Tensor | None], pool: Pool) -> None:
    """Add the squares of parameters that are held as diagonals."""
    for name, gradient in gradients.items():
        if gradient is not None:
            flat = gradient.flatten().to(compute_dtype(gradient.dtype))
            pool.of(BlockKey("diagonal", (name,))).add_squares(flat.square()[:, None, None])
