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

_PROBE = 4  # samples of a batch that are also run by themselves


@dataclass(frozen=True)
class Probe:
    """What a few samples show that are run by themselves.

    Attributes:
        value: (few, *event).
        entries: numbers that are held to pull one covector of one sample back.
        widest: multiply-adds of the largest layer for it.
    """

    value: Tensor
    entries: int
    widest: float

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
        self.params = _parameters(self.model, params, copy)
        self._unchecked = [] if copy else list(self.params.values())  # seen with the first values
        self.space = ParameterSpace(self.params)
        self.output, self._plans = output, {}

    def at(self, x: Any) -> Linearization:
        """J at inputs x: one tensor, a tuple or a dict of the model's arguments, samples first."""
        return self._at(arguments(x), None)

    def _at(self, args: Call, alone: Tensor | None) -> ModuleLinearization:
        """The same, whose first values must be `alone`, (few, *event)."""
        refuse_inference("it records no graph, so there are no derivatives", "The model")
        random = RandomState(self.space.device)
        try:
            linear = self._linearize(args)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reraise_fatal(error)
            shapes = [tuple(a.shape) for a in args.tensors]
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise PullbackError(
                "The model cannot be run on these inputs",
                f"for shapes {shapes} it says: {first}",
                "Pass what the model takes, samples first, in its own dtype and on its device",
            ) from error
        if not random.is_unchanged():
            again = self._linearize(args)  # with other numbers
            random.restore()
            if not torch.equal(linear.value, again.value):
                raise PullbackError(
                    "The model draws random numbers",
                    "every call is another function, so that two batches have no common tangent "
                    "space",
                    "Call .eval() on it",
                )
        self._refuse_broken(linear, args.tensors[0], alone)
        return linear

    def _refuse_broken(self, linear: Linearization, x: Tensor, alone: Tensor | None) -> None:
        """Raise where values cannot be a function of each sample and of the parameters.

        An activation may hide an infinity of the inputs or parameters from the output, but not
        from J. The first values are `alone` where these samples were run by themselves.
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
        if alone is None:
            return
        limit = relative_tolerance(getattr(linear, "graph", z).dtype, 10) * alone.norm()
        few = z[: len(alone)]
        if few.shape != alone.shape or not bool((few - alone).norm() <= limit):
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
        """What a few samples show when they are run by themselves."""
        args = arguments(x)
        count = max(1, min(_PROBE, samples(args) // 2))
        linear = self._at(part(args, 0, count), None)
        entries = linear.footprint // count or self.space.size
        return Probe(linear.value, entries, linear.widest / count)

    def chunk(self, args: Call, start: int, stop: int, probe: Probe) -> Linearization:
        """J at the samples in [start, stop); the first chunk must have the values of the probe.

        Where they differ the model couples the samples of a batch.
        """
        few = len(probe.value)
        compared = start == 0 and samples(args) > few
        if compared and stop <= few:
            self._at(part(args, 0, min(samples(args), 2 * _PROBE)), probe.value)
            compared = False
        return self._at(part(args, start, stop), probe.value if compared else None)

    def moved(self, v: Tensor) -> dict[str, Tensor]:
        """The parameters w + v for a flat v, (p,)."""
        pieces = self.space.split(v)
        return {n: p.detach() + pieces[n].to(p.dtype) for n, p in self.params.items()}


def as_tangent(
    model: nn.Module | Tangent,
    params: Mapping[str, Tensor] | None = None,
    *,
    copy: bool = True,
    output: Selector = None,
) -> Tangent:
    """The tangent space itself, or that of a model."""
    if isinstance(model, Tangent):
        return model
    return Tangent(model, params, copy=copy, output=output)


def arguments(x: Any) -> Call:
    """The model's arguments, each tensor with one entry per sample on its first axis.

    A dict gives them by name; what is no tensor is a constant.
    """
    call = as_call(tuple(x) if isinstance(x, list) else x)
    tensors = call.tensors
    if not tensors or not all(a.ndim for a in tensors):
        raise PullbackError(
            "The inputs are not usable",
            f"got {[type(a).__name__ for a in (*call.args, *call.kwargs.values())]}",
            "Pass a tensor with one entry per sample on its first axis, or a tuple of such tensors",
        )
    if len({len(a) for a in tensors}) > 1 or not len(tensors[0]):
        raise PullbackError(
            "The inputs have no common samples",
            f"their first axes have sizes {[len(a) for a in tensors]}",
            "Pass at least one sample, and as many in every argument",
        )
    # a tensor made in inference mode cannot be part of a graph
    return _map_tensors(call, lambda a: a.clone() if a.is_inference() else a.detach())


def _map_tensors(call: Call, function: Callable[[Tensor], Tensor]) -> Call:
    args, kwargs = tree_map_only(Tensor, function, (call.args, call.kwargs))
    return Call.of(*args, **kwargs)


def samples(call: Call) -> int:
    """How many there are."""
    return len(call.tensors[0])


def part(call: Call, start: int, stop: int) -> Call:
    """The samples in [start, stop)."""
    return _map_tensors(call, lambda a: a[start:stop])


def parts(call: Call, size: int) -> list[Call]:
    """All samples, at most this many at a time."""
    return [part(call, a, a + size) for a in range(0, samples(call), size)]


def _parameters(
    model: nn.Module, params: Mapping[str, Tensor] | None, copy: bool
) -> dict[str, Tensor]:
    own = dict(model.named_parameters())
    if params is None:
        params = {n: p for n, p in own.items() if p.requires_grad}
    unknown = [n for n in params if n not in own or params[n].shape != own[n].shape]
    if unknown or not params:
        raise PullbackError(
            "The model has no tangent space over these parameters",
            f"unknown or of another shape: {unknown}" if unknown else "there is none to move",
            "Unfreeze a parameter of the module, or name its own in params=",
        )
    wrong = [n for n, p in params.items() if not p.is_floating_point() or p.is_meta]
    if wrong:
        raise PullbackError(
            "The parameters are not usable",
            f"{wrong} hold no floating-point numbers",
            "Pass float tensors on a device that holds their values",
        )
    kept = {n: p.detach().clone() if copy else p.detach() for n, p in params.items()}
    if copy and kept:
        refuse_infinite("The parameters are", *kept.values())
    return kept


def refuse_infinite(what: str, *tensors: Tensor) -> None:
    """Raise where one of these is not finite, with one synchronization."""
    if tensors and not bool(torch.stack([torch.isfinite(t).all() for t in tensors]).all()):
        raise PullbackError(
            f"{what} not finite",
            "they contain NaN or infinity, or the output overflows",
            "Check them with torch.isfinite",
        )
