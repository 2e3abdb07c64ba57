"""The one registry of layers: how each kind turns (input, output cotangent) into a block.

A *block* is the share of one layer's parameters in A = SᵀJ, kept in factored form. It holds, for N
samples and R covectors per sample, what the chain rule gives at one layer: its input a and the
cotangents δ at its output. For a linear layer the row of J is Σ_t δ_t ā_tᵀ, so rows, Gram, products
and Kronecker factors all follow from (a, δ), where t runs over the positions that share the weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..._core.products import add_cross_gram
from .moments import Moments, Sharing, find_kept_or_reached_positions


class CotangentStructure(Enum):
    """A property of a layer's cotangents that makes its Gram cheaper."""

    #: all positions of a sample have the same cotangent
    EQUAL_POSITIONS = "equal positions"
    #: covectors and positions separate, δ_rto = v_ro g_to
    SEPARATED = "separated"


class Block(ABC):
    """One group of parameters: `rows`, their Gram, and products with A and Aᵀ."""

    #: names of the parameters, in the map's parameter space
    names: tuple[str, ...]
    #: whether the cotangents had a structure when it was last tested. Failed tests are not
    #: repeated. A structure that was there is verified again for each block.
    structure_tests: dict[CotangentStructure, bool]

    @property
    def route(self) -> str:
        """Name of the formula by which the Gram will be computed, for reports."""
        return "rows"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are held."""
        return sum(rows.nbytes for rows in self.rows().values())

    @abstractmethod
    def rows(self) -> dict[str, Tensor]:
        """Per name, the rows (N, R, numel) of J."""

    @abstractmethod
    def narrow(self, start: int, stop: int) -> Block:
        """Return the block of the samples in [start, stop)."""

    def to(self, dtype: torch.dtype) -> Block:
        """Return the block with its rows in another dtype, for `add_gram`."""
        return RowsBlock({name: rows.to(dtype) for name, rows in self.rows().items()})

    def trace_covectors(self) -> Block:
        """Return a block with one covector whose Gram is the trace over all R covectors.

        The result serves `add_gram` alone: its rows are no rows of J.
        """
        return RowsBlock({n: rows.flatten(1)[:, None] for n, rows in self.rows().items()})

    def add_gram(self, out: Tensor, other: Block, budget: int) -> None:
        """Add A A'ᵀ to `out`, (N·R, N'·R'), for another block of the same parameters.

        If `other` is this block, only entries on and below the diagonal are added.
        """
        rows = {name: value.flatten(0, 1) for name, value in self.rows().items()}
        other_rows = rows
        if other is not self:
            other_rows = {name: value.flatten(0, 1) for name, value in other.rows().items()}
        for name in self.names:
            add_cross_gram(out, rows[name], other_rows[name])

    def row_panels(self, budget: int) -> Iterator[Tensor] | None:
        """The rows (N·R, k), some parameters at a time; None if `add_gram` is not by rows.

        A panel takes about a quarter of `budget` bytes.
        """
        del budget
        return None

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        """A v: (N, R)."""
        rows = self.rows()
        return torch.stack([rows[n] @ v[n].flatten() for n in self.names]).sum(0)

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        """Aᵀ c for c of shape (N, R), flat per name."""
        return {n: torch.einsum("nrp,nr->p", rows, c) for n, rows in self.rows().items()}


class RowsBlock(Block):
    """Rows as a matrix: small layers, tied weights, layers without known structure."""

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self.names = tuple(rows)
        self._rows = dict(rows)

    def rows(self) -> dict[str, Tensor]:
        return self._rows

    def narrow(self, start: int, stop: int) -> Block:
        return RowsBlock({n: r[start:stop] for n, r in self._rows.items()})

    def row_panels(self, budget: int) -> Iterator[Tensor]:
        del budget
        return (rows.flatten(0, 1) for rows in self._rows.values())


class JointBlock(Block):
    """Blocks of one layer's parameters, side by side."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        names: list[str] = []
        for block in blocks:
            names.extend(block.names)
        self.names = tuple(names)

    @property
    def route(self) -> str:
        return self._blocks[0].route

    def narrow(self, start: int, stop: int) -> Block:
        return JointBlock([block.narrow(start, stop) for block in self._blocks])

    def to(self, dtype: torch.dtype) -> Block:
        return JointBlock([block.to(dtype) for block in self._blocks])

    def rows(self) -> dict[str, Tensor]:
        rows: dict[str, Tensor] = {}
        for block in self._blocks:
            rows.update(block.rows())
        return rows

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([block.project(v) for block in self._blocks]).sum(0)

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        lifted: dict[str, Tensor] = {}
        for block in self._blocks:
            lifted.update(block.lift(c))
        return lifted

    def add_gram(self, out: Tensor, other: Block, budget: int) -> None:
        assert isinstance(other, JointBlock)
        for block, other_block in zip(self._blocks, other._blocks, strict=True):
            block.add_gram(out, other_block, budget)


def join_uses(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Return the tensors of a layer's uses, concatenated along `dim`; one alone is not copied."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(list(tensors), dim)


class LayerInput(NamedTuple):
    """A module with the input that it received."""

    module: Any
    input: Tensor
    #: which positions count, from `Layer.counted_positions`; all of them where it is None
    keep: Tensor | None


@dataclass(frozen=True)
class Use:
    """One use of a layer.

    Its input has shape (N, *positions, *features), the cotangents at its output (N, R, *positions,
    *features); `features` counts the trailing feature axes of the output.
    """

    module: Any
    input: Tensor
    delta: Tensor
    features: int


class Layer(ABC):
    """A kind of layer.

    `parameters` gives the tensors by role, `features` how many trailing axes of the output
    belong to one position, and `block` assembles the uses of the same parameters. For K-FAC,
    `input_moments` and `output_moment` give the second moments of one use.
    """

    #: the kind of use, by which saved statistics name it: never change it for a layer that exists
    use: ClassVar[str] = "layer"
    #: what K-FAC holds for the parameters: "kronecker" (from the moments), "units" for
    #: elementwise gains, or "rows": the layer has only `block`, and its parameters are diagonals
    curvature: str = "rows"
    #: whether the weight's rows belong to the layer's input, as an embedding's do
    input_first: bool = False
    #: whether the weight is the transpose of an affine layer's, to be held like one where it can
    is_transposed: bool = False
    #: whether weight and bias meet the same cotangents, so that they may share a block
    joint: bool = True
    #: whether inputs are indices, whose second moment is a diagonal
    one_hot: bool = False

    def parameters(self, module: Any) -> dict[str, Tensor | None]:
        """Return the trained tensors by role, None for a role that the module lacks.

        A parametrized weight is computed from others, and so it is no parameter of the module.
        """
        parameters = module._parameters
        return {"weight": parameters.get("weight"), "bias": parameters.get("bias")}

    def count_feature_axes(self, module: Any, ndim: int) -> int:
        """Return how many trailing axes of an output (`ndim` axes) are features of a position."""
        return 1

    def form(self, module: Any) -> tuple[int, int, int]:
        """Return groups, rows and columns of the weight's matrices, as the parameter holds them."""
        weight = self.parameters(module)["weight"]
        groups = getattr(module, "groups", 1)
        if weight is None or not weight.numel() or not weight.ndim:
            return groups, 0, 0
        return groups, len(weight) // groups, weight.numel() // len(weight)

    @abstractmethod
    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        """Return the block of these parameters, from all of their uses in one forward pass."""

    def counted_positions(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        """Return which positions enter the moments, from the model outputs that the loss counts."""
        return find_kept_or_reached_positions(delta.reshape(*x.shape[:-1], delta.shape[-1]), keep)

    def input_moments(
        self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None
    ) -> Moments:
        """Return the moments of the inputs at the positions that count.

        `keep` comes from `counted_positions`; all positions count where it is None.
        """
        raise NotImplementedError(type(self).__name__)

    def input_moments_of_uses(self, uses: Sequence[LayerInput], sharing: Sharing) -> list[Moments]:
        """Return `input_moments` of several uses; layers override it to form some together."""
        return [self.input_moments(module, x, sharing, keep) for module, x, keep in uses]

    def output_moment(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        """Return Σ δδᵀ of one covector's cotangents, (G, O, O), or its diagonal (G, O)."""
        raise NotImplementedError(type(self).__name__)

    def bias_moment(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        """Return Σ δδᵀ at the bias, which is `output_moment` where the layer is `joint`."""
        return self.output_moment(module, x, delta, sharing)


REGISTRY: dict[type[nn.Module], Any] = {}


def describe_layer(module: Any) -> str:
    """Return what users know a layer as: its class, or words where it stands for a function.

    Such a module has the words as `description`, in the place of a name that users never wrote.
    """
    return getattr(module, "description", type(module).__name__)


def register(*module_types: type[nn.Module]):
    """Class decorator: `@register(nn.Linear)` enters a `Layer` or `Compound` for these types."""

    def enter(layer: Any) -> Any:
        for module_type in module_types:
            REGISTRY[module_type] = layer()
        return layer

    return enter


def find_layer(module: Any, layer_type: Any = Layer) -> Any:
    """Return the `Layer` (or other `layer_type`) that is registered for a module, or None.

    A subclass of a registered type counts if it does not override `forward`.
    """
    for base in type(module).__mro__:
        if base in REGISTRY:
            layer = REGISTRY[base]
            has_own_forward = type(module).forward is not base.forward
            if has_own_forward or not isinstance(layer, layer_type):
                return None
            return layer
    return None
