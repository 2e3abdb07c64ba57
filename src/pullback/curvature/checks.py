"""What a model must be, and which changes of it make a fitted curvature wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError

_EVAL = "Call model.eval() first, and keep it there while the curvature is used"


@dataclass(frozen=True)
class Fingerprint:
    """Two numbers per parameter and buffer, which other values do not share."""

    sums: dict[str, tuple[float, float]]

    #: relative difference that rounding leaves where sums run in another order or on another device
    tolerance = 1e-9

    @classmethod
    def of(cls, model: nn.Module) -> Fingerprint:
        """Return the fingerprint of a model's parameters and floating-point buffers."""
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        tensors.update(model.named_buffers())
        _refuse_meta(tensors)
        return cls({name: _checksums(tensor) for name, tensor in tensors.items()})

    def list_differences(self, other: Fingerprint) -> list[str]:
        """Return the names that are not the same in both."""
        names = sorted(self.sums.keys() ^ other.sums.keys())
        for name in self.sums.keys() & other.sums.keys():
            if not self._is_close(self.sums[name], other.sums[name]):
                names.append(name)
        return names

    def _is_close(self, one: tuple[float, float], two: tuple[float, float]) -> bool:
        size = max(abs(one[0]), abs(two[0]))
        gaps = [abs(x - y) for x, y in zip(one, two, strict=True)]
        return all(gap <= self.tolerance * size for gap in gaps)


def _checksums(tensor: Tensor) -> tuple[float, float]:
    """Return Σ|x| and Σ x cos(i), which also sees entries that changed places.

    Attention masks hold −∞, and a sum of it could not be compared: it counts as −2.
    """
    values = tensor.detach().flatten().double()
    flat = values.nan_to_num(nan=0.5, posinf=2.0, neginf=-2.0)
    phases = torch.arange(len(flat), device=flat.device, dtype=torch.float64)
    return float(flat.abs().sum()), float((flat * phases.cos_()).sum())


def _refuse_meta(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise PullbackError(
                "The model has no values",
                f"{name} is on the device 'meta'",
                "Load its weights on a real device first",
            )


def refuse_inference_mode() -> None:
    """Raise inside `torch.inference_mode()`, where autograd records nothing."""
    if torch.is_inference_mode_enabled():
        raise PullbackError(
            "Gradients cannot be formed",
            "torch.inference_mode() is on",
            "Call this outside of it; torch.no_grad() is no obstacle",
        )


def refuse_changed(model: nn.Module, fitted: Fingerprint) -> None:
    """Raise if a parameter or buffer has changed since the fit."""
    refuse_differences(fitted, Fingerprint.of(model))


def refuse_differences(fitted: Fingerprint, present: Fingerprint) -> None:
    """Raise if two fingerprints of a model are not the same."""
    changed = fitted.list_differences(present)
    if changed:
        more = ""
        if len(changed) > 1:
            more = f" and {len(changed) - 1} others"
        raise PullbackError(
            "The model has changed since its curvature was fitted",
            f"{changed[0]}{more} has other values or another shape",
            "Fit again, or restore the parameters and buffers of the fit",
        )


def refuse_random_layers(model: nn.Module) -> None:
    """Raise if a dropout layer is in training mode: then no gradient belongs to one function."""
    for name, module in model.named_modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        has_dropout_inside = (
            isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0
        )
        if module.training and (is_dropout or has_dropout_inside):
            raise PullbackError(
                f"{type(module).__name__} {name!r} is random",
                "in training mode every forward pass is another function",
                _EVAL,
            )


def refuse_other_outputs(first: Tensor, second: Tensor) -> None:
    """Raise if two forward passes of one batch gave different outputs."""
    tolerance = torch.finfo(first.dtype).eps ** 0.5
    has_same_shape = first.shape == second.shape
    if has_same_shape and bool(
        (first - second).norm() <= tolerance * first.norm().clamp(min=1e-30)
    ):
        return
    raise PullbackError(
        "The model is not deterministic",
        "two forward passes of the first batch gave different outputs",
        f"{_EVAL}; remove noise that forward adds and states that it changes",
    )


def refuse_nonfinite(what: str, values: Tensor) -> None:
    """Raise if there is a NaN or an infinity."""
    if not bool(torch.isfinite(values).all()):
        raise PullbackError(
            f"{what} are not finite",
            "NaN or infinity would spread to every factor",
            "Check the inputs, the targets and the model's parameters",
        )


def select_parameters(model: nn.Module, names: list[str] | None) -> dict[str, Tensor]:
    """Return the trainable parameters, or those of these names."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if names is None:
        return _refuse_none(trainable)
    unknown = [name for name in names if name not in trainable]
    if unknown:
        raise PullbackError(
            f"There is no trainable parameter {unknown[0]!r}",
            f"the model has {len(trainable)}, the first is {next(iter(trainable), 'none')!r}",
            "Give names of model.named_parameters() that require gradients",
        )
    return _refuse_none({name: trainable[name] for name in trainable if name in names})


def _refuse_none(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not parameters:
        raise PullbackError(
            "There is no curvature to fit",
            "no parameter requires a gradient",
            "Unfreeze at least one parameter",
        )
    return dict(parameters)


def find_last_layer(model: nn.Module, call: object) -> list[str]:
    """Return the parameters of the module that runs last among those that hold some."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    holders = [m for m in model.modules() if any(id(p) in names for p in m.parameters(False))]
    visited = _list_visits(model, holders, call)
    if not visited:
        raise PullbackError(
            "There is no last layer",
            "no module with trainable parameters was called",
            "Give parameters= the names of the parameters",
        )
    parameters = visited[-1].parameters(recurse=False)
    return [names[id(p)] for p in parameters if id(p) in names]


def _list_visits(model: nn.Module, modules: list[nn.Module], call: object) -> list[nn.Module]:
    """Return which of the modules a call of the model runs, in the order in which they end."""
    visited: list[nn.Module] = []

    def note(module: nn.Module, args: object, output: object) -> None:
        visited.append(module)

    handles = [module.register_forward_hook(note) for module in modules]
    try:
        with torch.no_grad():
            model(*call.args, **call.kwargs)  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        for handle in handles:
            handle.remove()
    return visited
