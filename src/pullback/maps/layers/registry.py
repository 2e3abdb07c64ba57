"""The one registry of layers: how each kind turns (input, output cotangent) into a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .base import Block
from .moments import Moments, Sharing, counted

#: a module, what it saw, and which of its places count
Seen = tuple[Any, Tensor, Tensor | None]


@dataclass(frozen=True)
class Use:
    """One use of a layer.

    Its input has shape (N, *places, *features), the cotangents at its output (N, R, *places,
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

    #: what K-FAC holds for the parameters: "kronecker" (from `inputs` and `outputs`), "units" for
    #: elementwise gains, or "rows": the layer has but `block`, and its parameters are diagonals
    curvature: str = "rows"
    #: whether the weight's rows belong to the layer's input, as an embedding's do
    input_first: bool = False
    #: whether the weight is the transpose of an affine layer's, to be held like one where it can
    turned: bool = False
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

    def groups(self, module: Any) -> int:
        """How many groups of channels have a weight of their own."""
        return getattr(module, "groups", 1)

    def form(self, module: Any) -> tuple[int, int, int]:
        """Groups, rows and columns of the weight's matrices, as the parameter holds them."""
        weight, groups = self.parameters(module)["weight"], self.groups(module)
        if weight is None or not weight.numel() or not weight.ndim:
            return groups, 0, 0
        return groups, len(weight) // groups, weight.numel() // len(weight)

    @abstractmethod
    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        """The block of these parameters, from every use of them in one forward pass."""

    def counted(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        """Which of the places that share the weight count, given the output's in `keep`."""
        return counted(delta.reshape(*x.shape[:-1], delta.shape[-1]), keep)

    def inputs(self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
        """Second moments of the inputs at the places that count: `keep` is from `counted`."""
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
            return found if same and isinstance(found, kind) else None
    return None
