"""A model with arguments as a function of its parameters, in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..._core.capture import Selector, select_output, unwrap_model
from ..._core.checks import require_finite_tensor
from ..._core.errors import PullbackError, reraise_fatal
from ..._core.graph import disable_fused_attention
from ...maps.module import fill_all_slots


class Inputs(NamedTuple):
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def parse(cls, example: Any) -> Inputs:
        """Read a tensor, a tuple of positional or a mapping of keyword arguments."""
        if isinstance(example, Mapping):
            return cls((), dict(example))
        if isinstance(example, tuple):
            return cls(example, {})
        return cls((example,), {})

    def list_tensors(self) -> list[Tensor]:
        """Return all tensors among the arguments."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def map_tensors(self, function: Any) -> Inputs:
        """Return the arguments with a function applied to each tensor."""
        args, kwargs = pytree.tree_map_only(Tensor, function, (self.args, self.kwargs))
        return Inputs(args, kwargs)


class Example:
    """A model with arguments: w ↦ every floating-point output as one matrix (1, n).

    Arithmetic is in float64 whatever the model's own is, since round-off decides what is a
    symmetry.

    Args:
        model: any module.
        args: a tensor, a tuple of positional or a dict of keyword arguments.
        output: which tensor of a structured output counts; by default all of them.

    Attributes:
        model: the module, without wrappers.
        inputs: the arguments, in float64.
        params: the parameters that may move, as they were, in float64.
        fixed: other parameters and buffers, in float64.
    """

    def __init__(self, model: nn.Module, args: Any, output: Selector = None) -> None:
        _refuse_model(model)
        self.model = unwrap_model(model)
        self._output = output
        inputs = Inputs.parse(args)
        if any(tensor.numel() == 0 for tensor in inputs.list_tensors()):
            raise PullbackError("The example is empty", "a tensor has no entries", "Pass samples")
        self.inputs = inputs.map_tensors(_to_double)
        self.params: dict[str, Tensor] = {}
        self.fixed: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self.params[name] = _to_double(parameter)
            else:
                self.fixed[name] = _to_double(parameter)
        for name, buffer in self.model.named_buffers():
            self.fixed[name] = _to_double(buffer)

    def call(self, tensors: Mapping[str, Tensor], inputs: Inputs) -> list[Tensor]:
        """Return the output tensors that count, of a call with these parameters and buffers."""
        slots = fill_all_slots(self.model, tensors)
        with _restored_attributes(self.model), _plain_functions():
            out = functional_call(self.model, slots, *inputs, tie_weights=False, strict=False)
        if self._output is not None:
            return [select_output(out, self._output)]
        return [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]

    def outputs(self, params: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the floating-point tensors that the model returns."""
        fixed = {name: tensor.clone() for name, tensor in self.fixed.items()}
        tensors = self.call({**fixed, **params}, self.inputs)
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        if not floating:
            raise PullbackError(
                "The model has no outputs to differentiate",
                "it returns no floating-point tensor",
                "Let it return logits or features, not classes",
            )
        return floating

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([output.flatten() for output in self.outputs(params)])[None]

    def inputs_of_two_samples(self) -> Inputs:
        """Return the arguments with two samples, where all have the same number of them."""
        tensors = self.inputs.list_tensors()
        if any(tensor.ndim == 0 for tensor in tensors):
            return self.inputs
        if len({len(tensor) for tensor in tensors}) != 1:
            return self.inputs
        return self.inputs.map_tensors(lambda tensor: tensor[:2])

    def refuse_failure(self) -> None:
        """Raise if the model does not run on the example."""
        try:
            with torch.no_grad(), disable_fused_attention():
                self.outputs(self.params)
        except Exception as error:
            reraise_fatal(error)
            raise PullbackError(
                "The model does not run on the example",
                str(error).split("\n")[0][:200],
                "Pass what the model takes: a tensor, a tuple of arguments or a dict of keywords",
            ) from error


def _to_double(t: Tensor) -> Tensor:
    """Return the tensor, in float64 if it is floating-point."""
    if t.is_floating_point():
        return t.detach().double()
    return t.detach()


def _refuse_model(model: Any) -> None:
    """Raise unless this is a module with real parameters that have values."""
    if not isinstance(model, nn.Module):
        raise PullbackError(
            "Symmetries are those of a network", f"got {type(model).__name__}", "Pass an nn.Module"
        )
    for name, p in model.named_parameters():
        if p.requires_grad:
            require_finite_tensor(f"Parameter {name!r}", p)


class _WideArithmetic(TorchFunctionMode):
    """Operations in float64 that torch refuses: grouped products, and products of mixed types.

    Grouped products have no kernel for it: each row is multiplied by its matrix. A model that makes
    a constant, such as the `torch.zeros(...)` that `baddbmm` adds to, makes it in its own type: the
    constant is converted.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            product = _multiply_groups(*args, **kwargs)
            if product is not None:
                return product
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if _writes_in_place(func, kwargs) or not _mixes_types((args, kwargs)):
                raise
            wide_args, wide_kwargs = pytree.tree_map_only(Tensor, _widen, (args, kwargs))
            return func(*wide_args, **wide_kwargs)


def _writes_in_place(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return True if a function writes to one of its arguments, of which no copy may be made."""
    name = getattr(func, "__name__", "_")
    return name.endswith("_") or "out" in kwargs


def _mixes_types(arguments: Any) -> bool:
    """Return True if some of the floating-point arguments are in float64, and others are not."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    types = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return torch.float64 in types and len(types) > 1


def _widen(tensor: Tensor) -> Tensor:
    """Return the tensor, in float64 if it is floating-point; derivatives pass through."""
    if tensor.is_floating_point():
        return tensor.double()
    return tensor


def _multiply_groups(
    x: Tensor, w: Tensor, offs: Tensor | None = None, *unused: Any, **options: Any
) -> Tensor | None:
    """Return x (n, i) times w (g, i, o), rows up to offs[k] by matrix k; None for other products.

    The argument names are those of `torch.nn.functional.grouped_mm`.
    """
    if x.dtype != torch.float64 or (x.ndim, w.ndim) != (2, 3) or offs is None:
        return None
    rows = torch.arange(len(x), device=x.device, dtype=offs.dtype)
    group = (rows[:, None] >= offs).sum(1).clamp(max=len(w) - 1)
    return torch.bmm(x[:, None], w[group])[:, 0]


class _IgnoredContext:
    """Stands for the context of an `autograd.Function` whose backward pass is not used."""

    needs_input_grad = ()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def _plain_functions() -> Iterator[None]:
    """Make an `autograd.Function` its forward pass, so that derivatives are those of its value."""

    def forward(cls: Any, *args: Any, **kwargs: Any) -> Any:
        has_setup = cls.setup_context is not Function.setup_context
        if has_setup:
            return cls.forward(*args, **kwargs)
        return cls.forward(_IgnoredContext(), *args, **kwargs)

    function_class: Any = Function
    original_apply = function_class.__dict__["apply"]
    function_class.apply = classmethod(forward)
    try:
        with _WideArithmetic():
            yield
    finally:
        function_class.apply = original_apply


@contextlib.contextmanager
def _restored_attributes(model: nn.Module) -> Iterator[None]:
    """Restore tensors that modules leave on themselves, as a weight normalization's hook does."""
    before = {module: _tensor_attributes(module) for module in model.modules()}
    try:
        yield
    finally:
        for module, attributes in before.items():
            for name in _tensor_attributes(module):
                if name not in attributes:
                    delattr(module, name)
            for name, value in attributes.items():
                object.__setattr__(module, name, value)


def _tensor_attributes(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
