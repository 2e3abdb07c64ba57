r"""The tangent space T_fΦ of a model at its parameters: J(x) = dφ_w at any inputs x."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .._core.capture import Selector, unwrap_model
from .._core.errors import PullbackError, require, reraise_fatal
from .._core.space import ParameterSpace, relative_tolerance
from .._core.state import RandomState
from ..maps import Call, Linearization, ModuleMap, shared_plans
from ..maps.module import ModuleLinearization
from ..optim.checks import refuse_inference
from ..optim.closure import as_call

#: samples of a batch that are also run by themselves, to see whether the model couples samples
_PROBE_SAMPLES = 4


@dataclass(frozen=True)
class Probe:
    """The output of a few samples, run by themselves, and the cost of a covector.

    Attributes:
        value: (few, *event).
        entries: the numbers that are stored to pull one covector of one sample back.
        largest_layer_cost: multiply-adds of the largest layer for it.
    """

    value: Tensor
    entries: int
    largest_layer_cost: float

    @property
    def event(self) -> torch.Size:
        """The shape of one output."""
        return self.value.shape[1:]


class Tangent:
    """φ(w) with dφ_w, at inputs that come later.

    w is kept as it is now: a step of an optimizer does not move the tangent space.

    Args:
        model: a module.
        params: the parameters by name, and their values; by default the module's own that require
            gradients. Those not named keep their values and are not differentiated.
        output: which tensor of a structured output is the function's value.
        copy: without, the parameters are not copied, and a step of an optimizer does move them.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor] | None = None,
        *,
        output: Selector = None,
        copy: bool = True,
    ) -> None:
        require(isinstance(model, nn.Module), "The model", model, "Pass an nn.Module")
        self.model = unwrap_model(model)
        self.params = _select_parameters(self.model, params, copy)
        #: parameters that are checked with the first values; copies were checked already
        self._unchecked: list[Tensor] = [] if copy else list(self.params.values())
        self.space = ParameterSpace(self.params)
        self.output = output
        self._plans = {}

    def at(self, x: Any) -> Linearization:
        """Return J at inputs x, samples first: a tensor, or a tuple or dict of arguments."""
        return self._at(as_arguments(x), None)

    def _at(self, args: Call, separate: Tensor | None) -> ModuleLinearization:
        """Return J at the arguments, whose first values must be `separate`, (few, *event)."""
        refuse_inference("it records no graph, so there are no derivatives", "The model")
        random = RandomState(self.space.device)
        try:
            linear = self._linearize(args)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reraise_fatal(error)
            shapes = [tuple(a.shape) for a in args.tensors]
            message = (str(error).splitlines() or [type(error).__name__])[0]
            raise PullbackError(
                "The model cannot be run on these inputs",
                f"for shapes {shapes} it says: {message}",
                "Pass what the model takes, samples first, in its own dtype and on its device",
            ) from error
        if not random.is_unchanged():
            repeated = self._linearize(args)  # with other random numbers
            random.restore()
            if not torch.equal(linear.value, repeated.value):
                raise PullbackError(
                    "The model draws random numbers",
                    "every call is another function, so that two batches have no common tangent "
                    "space",
                    "Call .eval() on it",
                )
        self._check_values(linear, args.tensors[0], separate)
        return linear

    def _check_values(self, linear: Linearization, x: Tensor, separate: Tensor | None) -> None:
        """Raise if the values cannot be a function of each sample and of the parameters.

        An activation may hide an infinity of the inputs or parameters from the output, but not
        from J. `separate` are the first values of these samples, run by themselves.
        """
        z = linear.value
        if len(z) != len(x):
            raise PullbackError(
                "The model's output does not count the samples of its input",
                f"{len(x)} went in, {len(z)} came out",
                "Give input and output one entry per sample on their first axis",
            )
        refuse_infinite("The parameters are", *self._unchecked)
        self._unchecked = []
        refuse_infinite("The model's inputs or outputs are", x, z)
        if separate is None:
            return
        limit = relative_tolerance(getattr(linear, "graph", z).dtype, 10) * separate.norm()
        in_batch = z[: len(separate)]
        if in_batch.shape != separate.shape or not bool((in_batch - separate).norm() <= limit):
            raise PullbackError(
                "The model couples the samples of a batch",
                "its output for a sample depends on the others, so there is no kernel of two "
                "points",
                "Use GroupNorm or LayerNorm in place of statistics over the batch",
            )

    def _linearize(self, args: Call) -> ModuleLinearization:
        source = ModuleMap(self.model, args, output=self.output, plans=self._plans)
        linear = source.linearize(self.params)
        if (plans := shared_plans(linear)) is not None:
            source.plans = plans
        return linear

    def probe(self, x: Any) -> Probe:
        """Run a few samples by themselves, and return their values and the cost of a covector."""
        args = as_arguments(x)
        count = max(1, min(_PROBE_SAMPLES, count_samples(args) // 2))
        linear = self._at(take_samples(args, 0, count), None)
        entries = linear.footprint // count or self.space.size
        return Probe(linear.value, entries, linear.largest_layer_cost / count)

    def chunk(self, args: Call, start: int, stop: int, probe: Probe) -> Linearization:
        """Return J at the samples in [start, stop).

        The first chunk is compared with the probe: where values differ, the model couples the
        samples of a batch, which is an error.
        """
        count = count_samples(args)
        probed = len(probe.value)
        chunk = take_samples(args, start, stop)
        if start > 0 or count <= probed:
            return self._at(chunk, None)
        if stop > probed:
            return self._at(chunk, probe.value)
        self._at(take_samples(args, 0, min(count, 2 * _PROBE_SAMPLES)), probe.value)
        return self._at(chunk, None)

    def move_parameters(self, v: Tensor) -> dict[str, Tensor]:
        """Return the parameters w + v for a flat v, (p,)."""
        pieces = self.space.split(v)
        return {n: p.detach() + pieces[n].to(p.dtype) for n, p in self.params.items()}


def as_tangent(
    model: nn.Module | Tangent,
    params: Mapping[str, Tensor] | None = None,
    *,
    copy: bool = True,
    output: Selector = None,
) -> Tangent:
    """Return the tangent space itself, or that of a model."""
    if isinstance(model, Tangent):
        return model
    return Tangent(model, params, copy=copy, output=output)


def as_arguments(x: Any) -> Call:
    """Return the model's arguments, each tensor with one entry per sample on its first axis.

    A dict gives them by name; a value that is no tensor is a constant.
    """
    if isinstance(x, list):
        x = tuple(x)
    call = as_call(x)
    tensors = call.tensors
    if not tensors or not all(tensor.ndim for tensor in tensors):
        types = [type(argument).__name__ for argument in (*call.args, *call.kwargs.values())]
        raise PullbackError(
            "The inputs are not usable",
            f"got {types}",
            "Pass a tensor with one entry per sample on its first axis, or a tuple of such tensors",
        )
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1 or lengths[0] == 0:
        raise PullbackError(
            "The inputs have no common samples",
            f"their first axes have sizes {lengths}",
            "Pass at least one sample, and as many in every argument",
        )
    return _map_tensors(call, _detach)


def _detach(tensor: Tensor) -> Tensor:
    if tensor.is_inference():  # such a tensor cannot be part of a graph
        return tensor.clone()
    return tensor.detach()


def _map_tensors(call: Call, function: Callable[[Tensor], Tensor]) -> Call:
    args, kwargs = tree_map_only(Tensor, function, (call.args, call.kwargs))
    return Call.of(*args, **kwargs)


def count_samples(call: Call) -> int:
    """Return the number of samples in a call's arguments."""
    return len(call.tensors[0])


def take_samples(call: Call, start: int, stop: int) -> Call:
    """Return the call with the samples in [start, stop) alone."""
    return _map_tensors(call, lambda a: a[start:stop])


def split_samples(call: Call, size: int) -> list[Call]:
    """Return calls with all samples, at most `size` in each."""
    return [take_samples(call, a, a + size) for a in range(0, count_samples(call), size)]


def _select_parameters(
    model: nn.Module, params: Mapping[str, Tensor] | None, copy: bool
) -> dict[str, Tensor]:
    """Return the parameters to differentiate by, copied if asked for; raise if unusable."""
    of_model = dict(model.named_parameters())
    if params is None:
        params = {name: p for name, p in of_model.items() if p.requires_grad}
    _check_parameters(params, of_model)
    if not copy:
        return {name: p.detach() for name, p in params.items()}
    copies = {name: p.detach().clone() for name, p in params.items()}
    refuse_infinite("The parameters are", *copies.values())
    return copies


def _check_parameters(params: Mapping[str, Tensor], of_model: Mapping[str, Tensor]) -> None:
    """Raise unless there are parameters, all of them the model's and of a float type."""
    shapes = {name: p.shape for name, p in of_model.items()}
    unknown = [name for name, p in params.items() if shapes.get(name) != p.shape]
    if unknown or not params:
        why = "there is no parameter to move"
        if unknown:
            why = f"unknown or of another shape: {unknown}"
        raise PullbackError(
            "The model has no tangent space over these parameters",
            why,
            "Unfreeze a parameter of the module, or name its own in params=",
        )
    unusable = [n for n, p in params.items() if not p.is_floating_point() or p.is_meta]
    if unusable:
        raise PullbackError(
            "The parameters are not usable",
            f"{unusable} hold no floating-point numbers, or none at all",
            "Pass float tensors on a device that holds their values",
        )


def refuse_infinite(what: str, *tensors: Tensor) -> None:
    """Raise if one of the tensors is not finite, with one synchronization."""
    if tensors and not bool(torch.stack([torch.isfinite(t).all() for t in tensors]).all()):
        raise PullbackError(
            f"{what} not finite",
            "they contain NaN or infinity, or the output overflows",
            "Check them with torch.isfinite",
        )
