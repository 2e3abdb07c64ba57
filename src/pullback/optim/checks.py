"""What cannot be optimized is refused at once, with the reason and the remedy."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .._core.capture import unwrap_model
from .._core.errors import PullbackError, require
from .._core.shards import is_sharded
from ..likelihoods import MSE, Gaussian, Likelihood
from ..metrics import Euclidean, Fisher, Metric, as_metric

_WRAPPERS = ("FullyShardedDataParallel", "DataParallel")
#: steps of a loss above ten times the first before a warning: fewer may be a passing rise
_GROWTH_STEPS = 20
#: folders whose frames are not the user's
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


def find_user_stacklevel() -> int:
    """Return the `stacklevel` that the caller needs for a warning at the user's line.

    It is that of the first frame outside this package and torch.
    """
    frame = sys._getframe(1)
    level = 1
    while frame.f_code.co_filename.startswith(_LIBRARIES) and frame.f_back is not None:
        frame = frame.f_back
        level += 1
    return level


def refuse_model(model: nn.Module, optimizer: str = "NaturalGradient") -> None:
    """Raise for objects that are no module, and for wrappers that hide its layers."""
    if not isinstance(model, nn.Module):
        raise PullbackError(
            f"{optimizer} needs the model itself",
            f"got {type(model).__name__}; it differentiates the model's outputs, not only its loss",
            "Pass an nn.Module (and params=... for a subset of its parameters)",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise PullbackError(
            "The model is a ScriptModule",
            "its layers cannot be watched",
            "Pass the module it was made from, or one behind torch.compile",
        )
    for base in type(unwrap_model(model)).__mro__:
        if base.__name__ in _WRAPPERS:
            raise PullbackError(
                f"The model is wrapped in {base.__name__}",
                "it hides the layers' own parameters and samples",
                "Wrap it in DistributedDataParallel instead, one process per device",
            )


def refuse_sharded(model: nn.Module, reason: str) -> None:
    """Raise for a model whose parameters are spread over several processes."""
    base_names = [base.__name__ for base in type(unwrap_model(model)).__mro__]
    if "FSDPModule" in base_names:
        raise PullbackError(
            "The model is wrapped in FSDPModule",
            f"its parameters are sharded over several processes, and {reason}",
            "Wrap it in DistributedDataParallel instead, or train an unsharded copy on one process",
        )


def refuse_parameter(name: str, p: Tensor, *, sharded: bool = False) -> None:
    """Raise for parameters that have no real, dense, initialized coordinates.

    Those that are `sharded` may be allowed.
    """
    fault = _find_fault(p, sharded=sharded)
    if fault is not None:
        why, remedy = fault
        raise PullbackError(f"Parameter {name!r} cannot be optimized", why, remedy)


def _find_fault(p: Tensor, *, sharded: bool) -> tuple[str, str] | None:
    """Return why a parameter cannot be optimized, and the remedy; None where it can."""
    if isinstance(p, UninitializedParameter | UninitializedBuffer):
        return "it is lazy: its shape is not known yet", "Run one forward pass first"
    if p.device.type == "meta":
        return "it is on the meta device and has no values", "Materialize the model with to_empty"
    if p.is_complex():
        return "it is complex", "Store real and imaginary parts (torch.view_as_real)"
    if not p.is_floating_point():
        return f"its dtype {p.dtype} has no gradient", "Make it a buffer, or use a float dtype"
    if p.layout != torch.strided:
        return f"its layout is {p.layout}", "Use a dense tensor"
    if p.is_inference():
        return "it was created in inference mode", "Build the model outside inference_mode"
    if is_sharded(p) and not sharded:
        return "it is sharded over several processes", "Train an unsharded copy on one process"
    return None


def refuse_uncallable(closure: object) -> None:
    """Raise for a closure that cannot be called."""
    if closure is not None and not callable(closure):
        raise PullbackError(
            "The closure cannot be called",
            f"got {type(closure).__name__}",
            "Give step() a function that runs backward() and returns the loss",
        )


def refuse_context(closure: object, objective: object) -> None:
    """Raise unless a step got a closure or an objective, and a graph can be built."""
    refuse_uncallable(closure)
    if (closure is None) == (objective is None):
        raise PullbackError(
            "step() needs a closure or an objective",
            "neither was given" if closure is None else "both were given",
            "Call step(closure) with a closure that runs backward(), or step(objective=f)",
        )
    refuse_inference("no graph can be built there, so there is no Jacobian")


def refuse_inference(why: str, called: str = "step()") -> None:
    """Raise in inference mode, for this reason."""
    if torch.is_inference_mode_enabled():
        raise PullbackError(
            f"{called} was called in inference mode",
            why,
            "Leave torch.inference_mode() before; torch.no_grad() does no harm",
        )


def choose_metric(
    likelihood: Likelihood | Callable[..., Tensor] | None,
    metric: Metric | Callable[[Tensor], Tensor] | None,
) -> Metric:
    """Return the Fisher metric of a likelihood, or the metric, by default that of ½‖·‖²."""
    if likelihood is None:
        return as_metric(Euclidean() if metric is None else metric)
    if metric is not None:
        raise PullbackError(
            "Both a likelihood and a metric were given",
            "the likelihood's Fisher information is itself a metric",
            "Give one of them",
        )
    return Fisher(likelihood)


def refuse_metric_of_objective(metric: Metric) -> None:
    """Raise for a metric that an objective cannot use: it measures residuals by ½‖·‖²."""
    likelihood = metric.likelihood if isinstance(metric, Fisher) else None
    if not isinstance(metric, Euclidean) and not isinstance(likelihood, (Gaussian, MSE)):
        raise PullbackError(
            "The metric does not go with an objective",
            f"an objective's loss is half the square of its residuals, and {metric!r} is no metric "
            "of theirs",
            "Put weights into the residuals, or give metric_batch= a function of the parameters "
            "whose values the metric measures",
        )


def warn_derivatives(stacklevel: int) -> None:
    """Warn of a loss with terms that the metric of the output does not know."""
    warnings.warn(
        "The loss has terms in derivatives of the model's output by its inputs. The metric is that "
        "of the output itself; step(objective=...) or pde.solve covers all terms.",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )


@dataclass
class GrowthWatch:
    """The first loss of a training, and how many losses in a row were above ten times it."""

    first_loss: float | None = None
    count: int = 0

    def has_grown(self, loss: float) -> bool:
        """Count the loss of a step; return True once, when enough in a row were far too large."""
        if self.first_loss is None:
            self.first_loss = loss
        if self.count == _GROWTH_STEPS:
            return False
        is_large = self.first_loss > 0 and not loss <= 10 * self.first_loss
        self.count = self.count + 1 if is_large else 0
        return self.count == _GROWTH_STEPS

    def warn(self, loss: float, remedy: str, stacklevel: int) -> None:
        """Warn that the loss stays above ten times the first."""
        warnings.warn(
            f"The loss was {self.first_loss:.3g} at first, and above ten times that for the last "
            f"{_GROWTH_STEPS} steps: it is {loss:.3g}. {remedy}.",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def refuse_sparse(name: str, gradient: Tensor | None) -> None:
    """Raise for a gradient that is not dense."""
    if gradient is not None and gradient.layout != torch.strided:
        raise PullbackError(
            f"Parameter {name!r} has a sparse gradient",
            "the Gram couples all entries",
            "Use Embedding(sparse=False)",
        )


def collect_gradients(
    groups: Iterable[Mapping[str, Any]], names: Mapping[int, str], shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """Return the gradients of the groups' parameters, by name, of those that have one.

    Args:
        groups: of an optimizer.
        names: of the model's parameters, by their id.
        shapes: that the parameters had when the optimizer was built.
    """
    gradients: dict[str, Tensor] = {}
    for group in groups:
        for p in group["params"]:
            gradient = p.grad
            if gradient is None or not p.requires_grad or not p.numel():
                continue
            name = names[id(p)]
            if gradient.layout != torch.strided:
                refuse_sparse(name, gradient)
            if p.shape != shapes[name]:
                raise PullbackError(
                    f"Parameter {name!r} changed its shape",
                    f"it was {tuple(shapes[name])}, and is {tuple(p.shape)} now",
                    "Build the optimizer again after changing the model",
                )
            gradients[name] = gradient
    if not gradients:
        raise PullbackError(
            "There is no gradient to follow",
            "every parameter's gradient is None",
            "Call loss.backward() before step(). If you did, the loss was made by another model "
            "than the one given to the optimizer: a copy of it, or one built again",
        )
    return gradients


def prepare_param_group(
    param_group: dict[str, Any],
    model: nn.Module,
    names: Mapping[int, str],
    grouped: Collection[int] = (),
    *,
    sharded: bool = False,
) -> dict[str, Any]:
    """Return a copy of a param group, whose parameters are all usable and the model's.

    Args:
        param_group: what the user gave.
        model: whose parameters they must be.
        names: of the parameters that it had when the optimizer was built, by their id.
        grouped: ids of those that are in another group already.
        sharded: whether parameters may lie on several processes.
    """
    if isinstance(param_group, dict):
        params = param_group.get("params")
    else:
        params = None
    remedy = 'Give a dict with "params" and, if you like, options of their own'
    require(isinstance(params, Iterable), "A param group", param_group, remedy)
    if isinstance(params, Tensor):
        params = [params]
    params = list(params or ())
    ids = {*grouped}
    for entry in params:
        if isinstance(entry, tuple):
            p = entry[1]
        else:
            p = entry
        name = names.get(id(p))
        if name is None:
            _refuse_stranger(p, model)
        refuse_parameter(str(name), p, sharded=sharded)
        if id(p) in ids:
            raise PullbackError(
                f"Parameter {name!r} is given twice",
                "it is in another param group, or in this one before",
                "Give each parameter once",
            )
        ids.add(id(p))
    return {**param_group, "params": params}


def _refuse_stranger(p: object, model: nn.Module) -> None:
    """Raise for a parameter that was not the model's when the optimizer was built."""
    for name, current in unwrap_model(model).named_parameters():
        if current is p:
            raise PullbackError(
                f"Parameter {name!r} is new in the model",
                "its layer was added after the optimizer was built, which watches the layers that "
                "were there",
                "Build the optimizer again after changing the model; load_state_dict does not "
                "carry over to other layers",
            )
    if isinstance(p, Tensor):
        what = f"a tensor of shape {tuple(p.shape)}"
    else:
        what = f"{p!r}"
    raise PullbackError(
        "A parameter does not belong to the model",
        f"{what} is not among its parameters",
        "Pass parameters of the module given to the optimizer",
    )
