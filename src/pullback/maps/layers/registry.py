"""The one registry of layers: how each kind turns (input, output cotangent) into a block.

A *block* is the share of one layer's parameters in A = SᵀJ, kept in factored form. It holds, for N
samples and R covectors per sample, what the chain rule gives at one layer: its input a and the
cotangents δ at its output. For a linear layer the row of J is Σ_t δ_t ā_tᵀ, so rows, Gram, products
and Kronecker factors all follow from (a, δ), where t runs over the positions that share the weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..._core.products import add_cross_gram
from .moments import Moments, Sharing, counted


class Block(ABC):
    """One group of parameters: `rows`, their Gram, and products with A and Aᵀ."""

    #: names of the parameters, in the map's parameter space
    names: tuple[str, ...]
    #: shapes that cotangents may have, and whether they had them when last looked at: what they
    #: did not have is not looked for again, what they had is proved anew
    looks: dict[str, bool]

    @property
    def route(self) -> str:
        """How the Gram will be computed, for reports."""
        return "rows"

    @abstractmethod
    def rows(self) -> dict[str, Tensor]:
        """Per name, the rows (N, R, numel) of J."""

    @abstractmethod
    def narrow(self, start: int, stop: int) -> Block:
        """The same block for the samples in [start, stop)."""

    def traced(self) -> Block:
        """For `add_gram` alone, one covector whose products are Σ_r of those of all R."""
        return RowsBlock({n: rows.flatten(1)[:, None] for n, rows in self.rows().items()})

    def add_gram(self, out: Tensor, other: Block, budget: int) -> None:
        """out += A A'ᵀ against `other` of the same parameters, (N·R, N'·R').

        Where `other` is this block, on and below the diagonal.
        """
        mine = self.rows()
        if other is self:
            theirs = mine
        else:
            theirs = other.rows()
        for name in self.names:
            x = mine[name].flatten(0, 1)
            add_cross_gram(out, x, x if other is self else theirs[name].flatten(0, 1))

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        """A v: (N, R)."""
        rows = self.rows()
        return torch.stack([rows[n] @ v[n].flatten() for n in self.names]).sum(0)

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        """Aᵀ c for c of shape (N, R), flat per name."""
        return {n: torch.einsum("nrp,nr->p", rows, c) for n, rows in self.rows().items()}


class RowsBlock(Block):
    """Rows held as they are: small layers, tied weights, layers without known structure."""

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self.names = tuple(rows)
        self._rows = dict(rows)

    def rows(self) -> dict[str, Tensor]:
        return self._rows

    def narrow(self, start: int, stop: int) -> Block:
        return RowsBlock({n: r[start:stop] for n, r in self._rows.items()})


class JointBlock(Block):
    """Blocks of one layer's parameters, side by side."""

    def __init__(self, parts: Sequence[Block]) -> None:
        self._parts = parts
        self.names = tuple(name for part in parts for name in part.names)

    @property
    def route(self) -> str:
        return self._parts[0].route

    def narrow(self, start: int, stop: int) -> Block:
        return JointBlock([part.narrow(start, stop) for part in self._parts])

    def rows(self) -> dict[str, Tensor]:
        return {n: rows for part in self._parts for n, rows in part.rows().items()}

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([part.project(v) for part in self._parts]).sum(0)

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        return {n: share for part in self._parts for n, share in part.lift(c).items()}

    def add_gram(self, out: Tensor, other: Block, budget: int) -> None:
        assert isinstance(other, JointBlock)
        for one, two in zip(self._parts, other._parts, strict=True):
            one.add_gram(out, two, budget)


def joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """The uses of one layer along their sharing axis; a single use is not copied."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(list(tensors), dim)


#: a module, what it saw, and which of its positions count
Seen = tuple[Any, Tensor, Tensor | None]


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
    belong to one place, and `block` assembles the uses of the same parameters. For K-FAC, `inputs`
    and `outputs` give the second moments of one use.
    """

    #: the kind of use, by which saved statistics name it: never change it for a layer that exists
    use: ClassVar[str] = "layer"
    #: what K-FAC holds for the parameters: "kronecker" (from `inputs` and `outputs`), "units" for
    #: elementwise gains, or "rows": the layer has but `block`, and its parameters are diagonals
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
        """The tensors that take part, by role; a parametrized one is no parameter of the module."""
        held = module._parameters
        return {"weight": held.get("weight"), "bias": held.get("bias")}

    def features(self, module: Any, ndim: int) -> int:
        """How many trailing axes of an output with `ndim` axes are features of one place."""
        return 1

    def form(self, module: Any) -> tuple[int, int, int]:
        """Groups, rows and columns of the weight's matrices, as the parameter holds them."""
        weight = self.parameters(module)["weight"]
        groups = getattr(module, "groups", 1)
        if weight is None or not weight.numel() or not weight.ndim:
            return groups, 0, 0
        return groups, len(weight) // groups, weight.numel() // len(weight)

    @abstractmethod
    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        """The block of these parameters, from every use of them in one forward pass."""

    def counted(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        """Which of the positions that share the weight count, given the output's in `keep`."""
        return counted(delta.reshape(*x.shape[:-1], delta.shape[-1]), keep)

    def inputs(self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
        """Second moments of the inputs at the positions that count: `keep` is from `counted`."""
        raise NotImplementedError(type(self).__name__)

    def inputs_of(self, uses: Sequence[Seen], sharing: Sharing) -> list[Moments]:
        """The same for several uses, some of which may be cheaper at once."""
        return [self.inputs(module, x, sharing, keep) for module, x, keep in uses]

    def outputs(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        """Second moments Σ δδᵀ of one covector's cotangents, (G, O, O) or (G, O)."""
        raise NotImplementedError(type(self).__name__)

    def shifts(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        """The same for a bias alone; where `joint`, it meets the weight's cotangents."""
        return self.outputs(module, x, delta, sharing)


REGISTRY: dict[type[nn.Module], Any] = {}


def register(*kinds: type[nn.Module]):
    """Class decorator: `@register(nn.Linear)` enters a `Layer` or `Compound` for these types."""

    def enter(layer: Any) -> Any:
        for kind in kinds:
            REGISTRY[kind] = layer()
        return layer

    return enter


def find(module: Any, kind: Any = Layer) -> Any:
    """The layer of a module (or its compound, for `kind`), or None.

    A subclass of a registered type counts while it keeps `forward`.
    """
    for base in type(module).__mro__:
        if base in REGISTRY:
            found = REGISTRY[base]
            same = type(module).forward is base.forward
            if same and isinstance(found, kind):
                return found
            return None
    return None
