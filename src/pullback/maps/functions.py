"""Uses of parameters by functions, written down as the module that torch has for them.

`F.linear(x, w)` is a use of a linear layer whoever calls it, and so are `x @ w.T`, an `einsum` or a
`bmm` with a stack of experts. A `FunctionMode` sees the calls of a forward pass, recognizes views
and copies of parameters by where their entries lie, and gives every use to a listener with a
module that stands for it. What is done for each function is in `uses.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .layers.contraction import Letters, read_product
from .layers.entries import ParameterEntries
from .layers.product import MatrixProduct, ProductUse, TransposedProductUse
from .layers.weight_norm import WeightNormUse

#: what is done after a call, by the function's name: (mode, result, *arguments) -> result or None
USES: dict[str, Callable[..., Tensor | None]] = {}


def use(*names: str) -> Callable[[Any], Any]:
    """Decorator: call this function after each call of the functions of these names.

    It receives (mode, result, *arguments) and returns the tensor to go on with instead of the
    result, or None.
    """

    def enter(function: Any) -> Any:
        for name in names:
            USES[name] = function
        return function

    return enter


class UseListener(Protocol):
    """Who is told of uses: a recorder."""

    def is_parameter(self, t: Tensor) -> bool:
        """Whether a tensor is a parameter that takes part."""
        ...

    def add_function_use(
        self, key: Any, make: Callable[[], nn.Module], x: Tensor, output: Tensor
    ) -> Tensor:
        """Write down a use by a function; return the output to go on with."""
        ...


@dataclass(frozen=True)
class NormalizedWeight:
    """A weight g v/‖v‖ that weight normalization made, with a length per slice along `dim`."""

    direction: Tensor
    length: Tensor
    dim: int


@dataclass(frozen=True)
class _Derived:
    """A tensor that was made from a parameter."""

    #: held, so that no other tensor gets its `id`
    tensor: Tensor
    version: int
    source: ParameterEntries | NormalizedWeight


class FunctionMode(TorchFunctionMode):
    """Gives the uses of parameters by functions to a listener."""

    def __init__(self, listener: UseListener) -> None:
        super().__init__()
        self.listener = listener
        self._derived: dict[int, _Derived] = {}

    def __exit__(self, *exc: Any) -> None:
        self._derived.clear()
        super().__exit__(*exc)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        note_use = USES.get(getattr(func, "__name__", ""))
        if note_use is None or not isinstance(result, Tensor) or not result.requires_grad:
            return result
        replacement = note_use(self, result, *args, **kwargs)
        if replacement is None:
            return result
        return replacement

    # --- parameters -------------------------------------------------------------------------

    def find_entries(self, t: Any) -> ParameterEntries | None:
        """Return which entries of a parameter a tensor holds; None if it holds none."""
        if not isinstance(t, Tensor) or not t.requires_grad:
            return None
        if self.listener.is_parameter(t):
            return ParameterEntries.of_all(t)
        source = self._source_of(t)
        if isinstance(source, ParameterEntries):
            return source
        if source is not None or t._base is None or not t._base.is_contiguous():
            return None
        return self._find_viewed_entries(t)

    def _find_viewed_entries(self, t: Tensor) -> ParameterEntries | None:
        """Return the entries of a view of a contiguous tensor; None if that holds none."""
        assert t._base is not None
        base = self.find_entries(t._base)
        if base is None or not base.is_dense or base.index is not None:
            return None
        offset = base.offset + int(t.storage_offset() - t._base.storage_offset())
        return ParameterEntries(base.parameter, tuple(t.shape), t.stride(), offset)

    def find_parameter(self, t: Any) -> Tensor | None:
        """Return the parameter that a tensor is, perhaps in another shape; None if it is none."""
        entries = self.find_entries(t)
        if entries is None or not entries.is_whole:
            return None
        return entries.parameter

    def find_weight(self, t: Any) -> Tensor | NormalizedWeight | None:
        """Return the parameter that a tensor is, or what weight normalization made it of."""
        source = self._source_of(t)
        if isinstance(source, NormalizedWeight):
            return source
        return self.find_parameter(t)

    def derive(self, result: Tensor, source: ParameterEntries | NormalizedWeight) -> None:
        """Note a tensor that holds these entries, or was made by weight normalization."""
        self._derived[id(result)] = _Derived(result, result._version, source)

    def _source_of(self, t: Any) -> ParameterEntries | NormalizedWeight | None:
        """What a tensor was derived from, unless it was changed since."""
        derived = self._derived.get(id(t))
        if derived is None or derived.version != t._version:
            return None
        return derived.source

    # --- uses -------------------------------------------------------------------------------

    def note(
        self,
        module_type: type[nn.Module],
        x: Tensor,
        output: Tensor,
        parameters: Mapping[str, Any],
        **settings: Any,
    ) -> Tensor:
        """Write down a use of a module of torch's own with these parameters and settings."""
        weight = parameters.get("weight")
        tensors = dict(parameters)
        normalized = None
        if isinstance(weight, NormalizedWeight):
            normalized = weight
            tensors["weight"] = weight.direction

        def make() -> nn.Module:
            module = module_type.__new__(module_type)
            nn.Module.__init__(module)
            module.__dict__.update(settings, _parameters=tensors)
            if normalized is None:
                return module
            return WeightNormUse(module, normalized.length, normalized.dim)

        key = (module_type, *map(id, tensors.values()), normalized is None, *settings.values())
        try:
            hash(key)
        except TypeError:  # settings with tensors
            key = None
        return self.listener.add_function_use(key, make, x, output)

    def note_product(
        self,
        output: Tensor,
        weight: Any,
        x: Any,
        letters: Letters,
        bias: Any = None,
        index: Tensor | None = None,
    ) -> Tensor | None:
        """Note output = Σ weight · x (+ bias), by the letters of their axes as in `einsum`."""
        entries = self.find_entries(weight)
        if entries is None or not isinstance(x, Tensor) or self.find_entries(x) is not None:
            return None
        product = read_product(entries, letters, index)
        if product is None:
            return None
        parameters: dict[str, Tensor | None] = {
            "weight": entries.parameter,
            "bias": self._find_bias(bias, product),
        }
        if entries.is_whole and _is_linear(entries.parameter, product):
            return self.note(nn.Linear, x, output, parameters)
        use_type = ProductUse
        if product.is_transposed:
            use_type = TransposedProductUse
        key = None
        if product.index is None:
            key = (use_type, *map(id, parameters.values()), product)
        inputs = product.arrange_inputs(x).detach()
        return self.listener.add_function_use(
            key, lambda: use_type(parameters, product), inputs, output
        )

    def _find_bias(self, bias: Any, product: MatrixProduct) -> Tensor | None:
        """The parameter whose entries are added to the rows of the matrices in use."""
        entries = self.find_entries(bias)
        if entries is None or product.index is not None or not entries.is_dense:
            return None
        matrices, rows, _ = product.form
        has_all = entries.parameter.numel() == matrices * rows
        has_used = prod(entries.size) == product.used * rows
        if has_all and has_used and entries.offset == product.first * rows:
            return entries.parameter
        return None


def _is_linear(parameter: Tensor, product: MatrixProduct) -> bool:
    """Whether a product with all of a parameter is what `nn.Linear` computes with it."""
    if not product.is_linear or parameter.ndim != 2:
        return False
    return len(parameter) == product.form[1]
