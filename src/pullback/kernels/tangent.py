r"""The tangent space T_fΦ of a model at its parameters: J(x) = dφ_w at any inputs x."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._core.capture import Selector, plain
from .._core.errors import PullbackError, reraise_fatal
from .._core.space import ParameterSpace, tolerance
from .._core.state import RandomState
from ..maps import Call, FunctionLinearization, Linearization, ModuleMap, shared_plans

Function = Callable[..., Tensor]  # of a parameter dict and inputs
Model = nn.Module | Function

_PROBE = 4  # samples of a batch that are also run by themselves


@dataclass(frozen=True)
class Probe:
    """Values (few, *event), and the entries that one covector of one sample holds."""

    value: Tensor
    entries: int

    @property
    def event(self) -> torch.Size:
        """The shape of one output."""
        return self.value.shape[1:]


class Tangent:
    """φ(w) with dφ_w, at inputs that come later.

    w is kept as it is now: a step of an optimizer does not move the tangent space.

    Args:
        model: a module, or a function of (parameter dict, inputs).
        params: the parameters by name, and their values; by default the module's own that require
            gradients. For a module, those not named keep their values and are not differentiated.
        output: which tensor of a structured output is the function's value.
        copy: without, the parameters are not copied, and a step of an optimizer does move them.
    """

    def __init__(
        self,
        model: Model,
        params: Mapping[str, Tensor] | None = None,
        *,
        output: Selector = None,
        copy: bool = True,
    ) -> None:
        self.model = plain(model) if isinstance(model, nn.Module) else model
        self.params = _parameters(self.model, params, copy)
        self.space = ParameterSpace(self.params)
        self.output, self._plans = output, {}

    def at(self, x: Any) -> Linearization:
        """J at inputs x: one tensor, or a tuple of the model's arguments, samples first."""
        args = arguments(x)
        _refuse_inference()
        random = RandomState(self.space.device)
        try:
            linear = self._linearize(args)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reraise_fatal(error)
            raise PullbackError(
                "The model cannot be run on these inputs",
                f"for shapes {[tuple(a.shape) for a in args]} it says: {_first_line(error)}",
                "Pass what the model takes, samples first, in its own dtype and on its device",
            ) from error
        if not random.unchanged():
            random.restore()
            raise PullbackError(
                "The model draws random numbers",
                "every call is another function, so that two batches have no common tangent space",
                "Call .eval() on it",
            )
        _refuse_broken(linear, args[0])
        return linear

    def _linearize(self, args: tuple[Tensor, ...]) -> Linearization:
        model = self.model
        if isinstance(model, nn.Module):
            source = ModuleMap(model, Call.of(*args), output=self.output, plans=self._plans)
            linear = source.linearize(self.params)
            if (plans := shared_plans(linear)) is not None:
                source.plans = plans
            return linear

        def function(params: dict[str, Tensor]) -> Tensor:
            z = model(params, *args)
            return z.unsqueeze(-1) if z.ndim == 1 else z

        return FunctionLinearization(function, self.params)

    def probe(self, x: Any) -> Probe:
        """What a few samples show when they are run by themselves."""
        args = arguments(x)
        few = max(1, min(_PROBE, len(args[0]) // 2))
        linear = self.at(part(args, 0, few))
        held = getattr(linear, "footprint", 0) if isinstance(self.model, nn.Module) else 0
        return Probe(linear.value, held // few or self.space.size)

    def chunk(self, args: tuple[Tensor, ...], start: int, stop: int, probe: Probe) -> Linearization:
        """J at the samples in [start, stop); the first chunk must have the values of the probe.

        Where they differ the model couples the samples of a batch.
        """
        linear, few = self.at(part(args, start, stop)), len(probe.value)
        if start == 0 and len(args[0]) > few:
            whole = linear if stop > few else self.at(part(args, 0, min(len(args[0]), 2 * _PROBE)))
            _refuse_coupled(whole.value[:few], probe.value, getattr(whole, "graph", whole.value))
        return linear

    def moved(self, v: Tensor) -> dict[str, Tensor]:
        """The parameters w + v for a flat v, (p,)."""
        pieces = self.space.split(v)
        return {n: p.detach() + pieces[n].to(p.dtype) for n, p in self.params.items()}


def as_tangent(
    model: Model | Tangent, params: Mapping[str, Tensor] | None = None, *, copy: bool = True
) -> Tangent:
    """The tangent space itself, or that of a model."""
    return model if isinstance(model, Tangent) else Tangent(model, params, copy=copy)


def arguments(x: Any) -> tuple[Tensor, ...]:
    """The model's arguments, each with one entry per sample on its first axis."""
    args = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    if not args or not all(isinstance(a, Tensor) and a.ndim for a in args):
        raise PullbackError(
            "The inputs are not usable",
            f"got {[type(a).__name__ for a in args]}",
            "Pass a tensor with one entry per sample on its first axis, or a tuple of such tensors",
        )
    if len({len(a) for a in args}) > 1 or not len(args[0]):
        raise PullbackError(
            "The inputs have no common samples",
            f"their first axes have sizes {[len(a) for a in args]}",
            "Pass at least one sample, and as many in every argument",
        )
    # a tensor made in inference mode cannot be part of a graph
    return tuple(a.clone() if a.is_inference() else a.detach() for a in args)


def part(args: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
    """The samples in [start, stop)."""
    return tuple(a[start:stop] for a in args)


def _parameters(model: Any, params: Mapping[str, Tensor] | None, copy: bool) -> dict[str, Tensor]:
    if not isinstance(model, nn.Module):
        if not callable(model) or params is None:
            raise PullbackError(
                "The model is not usable",
                f"got {type(model).__name__} {'without' if params is None else 'with'} parameters",
                "Pass a module, or a function of (parameter dict, inputs) with params=",
            )
        return _snapshot(params, copy)
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
    return _snapshot(params, copy)


def _snapshot(params: Mapping[str, Tensor], copy: bool) -> dict[str, Tensor]:
    wrong = [n for n, p in params.items() if not p.is_floating_point() or p.is_meta]
    if wrong:
        raise PullbackError(
            "The parameters are not usable",
            f"{wrong} hold no floating-point numbers",
            "Pass float tensors on a device that holds their values",
        )
    kept = {n: p.detach().clone() if copy else p.detach() for n, p in params.items()}
    if kept:
        _refuse_infinite("The parameters are", *kept.values())
    return kept


def _refuse_inference() -> None:
    if torch.is_inference_mode_enabled():
        raise PullbackError(
            "There are no derivatives here",
            "inference mode records no graph",
            "Use torch.no_grad() in place of torch.inference_mode()",
        )


def _refuse_broken(linear: Linearization, x: Tensor) -> None:
    if len(linear.value) != len(x):
        raise PullbackError(
            "The model's output does not count the samples of its input",
            f"{len(x)} went in, {len(linear.value)} came out",
            "Give input and output one entry per sample on their first axis",
        )
    _refuse_infinite("The model's inputs or outputs are", x, linear.value)


def _refuse_infinite(what: str, *tensors: Tensor) -> None:
    """An activation may hide an infinity from the output, but not from J."""
    # A sum is finite only if all of its terms are; one that overflows is looked at term by term.
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    sums = torch.stack([t.detach().sum().to(torch.float64) for t in parts])
    if bool(torch.isfinite(sums).all()):
        return
    if not bool(torch.stack([torch.isfinite(t).all() for t in tensors]).all()):
        raise PullbackError(
            f"{what} not finite",
            "they contain NaN or infinity, or the output overflows",
            "Check them with torch.isfinite",
        )


def _refuse_coupled(within: Tensor, alone: Tensor, computed: Tensor) -> None:
    same = within.shape == alone.shape
    limit = tolerance(computed.dtype, 10) * alone.norm()
    if not same or not bool((within - alone).norm() <= limit):
        raise PullbackError(
            "The model couples the samples of a batch",
            "its output for a sample depends on the others, so there is no kernel of two points",
            "Use GroupNorm or LayerNorm in place of statistics over the batch",
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
