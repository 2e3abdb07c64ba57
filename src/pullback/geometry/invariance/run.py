"""One run of an optimizer from a twin's starting point, and the states that it reached."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from ..._core.capture import select_output
from ..._core.errors import PullbackError
from ...maps import FunctionLinearization
from ..charts.diffeomorphism import Params
from ..charts.transformations import Twin

Make = Callable[[nn.Module], Any]
Loss = Callable[[Tensor, Tensor], Tensor]


class DivergedError(PullbackError):
    """The loss of a run is not finite."""


@dataclass(frozen=True)
class AuditData:
    """The data and settings that every run shares.

    Attributes:
        x, y: the batch.
        loss: (outputs, targets) ↦ a scalar.
        points: inputs at which functions are compared, those of the "batch" and other "probes".
        seed: of torch's generators, at the start of each run.
    """

    x: Tensor
    y: Tensor
    loss: Loss
    points: Mapping[str, Tensor]
    seed: int


@dataclass(frozen=True)
class RunState:
    """A state of a run, or a tangent vector there.

    Attributes:
        values: that are compared: z at the setting's points, and w = f(θ) as "parameters".
        theta: θ by name.
    """

    values: dict[str, Tensor]
    theta: Params


def list_trained(model: nn.Module) -> Params:
    """Return the parameters that require gradients, by name."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def run(
    make: Make, start: Twin, setting: AuditData, *, size: float, steps: int, lenient: bool = False
) -> list[RunState]:
    """The states after 0, 1, …, `steps` steps of `size` times the optimizer's lr, on a copy.

    A run that is `lenient` may diverge: its remaining states are NaN.
    """
    with seed_generators(setting.seed, setting.x.device):
        model = duplicate(start.model)
        optimizers = _make_optimizers(make, model)
        for optimizer in optimizers:
            _scale_rates(optimizer, size)
        states = [observe(start, model, setting)]
        for _ in range(steps):
            try:
                _take_step(optimizers, model, setting)
            except DivergedError:
                if not lenient:
                    raise
                states += [_make_nan_state(states[0])] * (steps + 1 - len(states))
                break
            states.append(observe(start, model, setting))
        for optimizer in optimizers:
            if callable(close := getattr(optimizer, "close", None)):
                close()
    return states


def _scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiply all learning rates."""
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise PullbackError(
                "The optimizer has no lr",
                f"a param group of {type(optimizer).__name__} has none to scale",
                "Keep the step size in param_groups as 'lr'",
            )
        group["lr"] = group["lr"] * factor


@contextlib.contextmanager
def seed_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators, and restore them afterwards."""
    cuda_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda_devices):
        torch.manual_seed(seed)
        yield


def duplicate(model: nn.Module) -> nn.Module:
    """A copy without gradients."""
    try:
        model_copy = copy.deepcopy(model)
    except RuntimeError as error:
        remedy = "Keep no tensors with a graph in the model"
        raise PullbackError("The model cannot be copied", str(error), remedy) from error
    model_copy.zero_grad(set_to_none=True)
    return model_copy


@torch.no_grad()
def observe(start: Twin, model: nn.Module, setting: AuditData) -> RunState:
    """The present function values, and the original's weights."""
    values: dict[str, Tensor] = {}
    for name, x in setting.points.items():
        values[name] = select_output(model(x), None).to(torch.float64)
    values["parameters"] = _flatten(start.weights(model))
    theta = {name: p.detach().clone() for name, p in list_trained(model).items()}
    return RunState(values, theta)


def push(start: Twin, setting: AuditData, state: RunState, following: RunState) -> RunState:
    """Return the step Δθ between two states as a tangent vector: dψ Δθ, and df Δθ."""
    if not all(bool(torch.isfinite(t).all()) for t in following.theta.values()):
        return _make_nan_state(state)
    step = {name: following.theta[name] - t for name, t in state.theta.items()}

    def push_values(x: Tensor) -> Tensor:
        model = duplicate(start.model)

        def evaluate(theta: Params) -> Tensor:
            # A norm may count calls in its buffers.
            buffers = {name: b.clone() for name, b in model.named_buffers()}
            return select_output(functional_call(model, {**buffers, **theta}, (x,)), None)

        linearization = FunctionLinearization(evaluate, state.theta)
        return linearization.jvp(linearization.space.flatten(step)).to(torch.float64)

    values = {name: push_values(x) for name, x in setting.points.items()}
    if start.push is None:
        values["parameters"] = following.values["parameters"] - state.values["parameters"]
    else:
        values["parameters"] = _flatten(start.push(state.theta, step))
    return RunState(values, step)


def _flatten(params: Params) -> Tensor:
    return torch.cat([p.detach().flatten().to(torch.float64) for p in params.values()])


def _make_nan_state(state: RunState) -> RunState:
    """Return a state of the same shapes that is not a number anywhere."""
    values = {name: torch.full_like(t, torch.nan) for name, t in state.values.items()}
    theta = {name: torch.full_like(t, torch.nan) for name, t in state.theta.items()}
    return RunState(values, theta)


@contextlib.contextmanager
def _name_failures(who: str) -> Iterator[None]:
    """Name the optimizer in errors that are not ours."""
    try:
        yield
    except PullbackError:
        raise
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise PullbackError(
            f"{who} failed during the audit",
            f"{type(error).__name__}: {lines[0]}",
            "See the error above; it must run on the model, and on copies of it",
        ) from error


def _make_optimizers(make: Make, model: nn.Module) -> list[Optimizer]:
    """Return the optimizers that a user's function makes for a model."""
    with _name_failures("make_optimizer"):
        result = make(model)
    optimizers = list(result) if isinstance(result, Sequence) else [result]
    if not optimizers or not all(isinstance(o, Optimizer) for o in optimizers):
        raise PullbackError(
            "make_optimizer made no optimizer",
            f"it returned {type(result).__name__}",
            "Return a torch.optim.Optimizer on the given model, or a list of them",
        )
    return optimizers


def _take_step(optimizers: Sequence[Optimizer], model: nn.Module, setting: AuditData) -> None:
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        with torch.enable_grad():
            model.zero_grad(set_to_none=True)
            loss = setting.loss(select_output(model(setting.x), None), setting.y)
            if not calls:  # trial points of a line search may be anywhere
                refuse_infinite(loss)
            loss.backward()
        calls += 1
        return loss

    with _name_failures(type(optimizers[0]).__name__):
        if len(optimizers) == 1:
            optimizers[0].step(closure)  # pyright: ignore[reportArgumentType, reportCallIssue]
            return
        closure()  # each sees the gradient at the same point
        for optimizer in optimizers:
            optimizer.step()


def refuse_infinite(loss: Tensor) -> None:
    """Raise for a loss that is not finite."""
    if not bool(torch.isfinite(loss)):
        raise DivergedError(
            "The loss is not finite",
            f"it is {float(loss.detach())}",
            "Check model and batch, or audit with a smaller lr",
        )


def perturb_start(start: Twin, setting: AuditData, eps: float) -> tuple[Twin, AuditData]:
    """The same start with weights and inputs off by round-off: ±ε of their own size."""
    generator = torch.Generator().manual_seed(setting.seed)

    def perturb(t: Tensor) -> Tensor:
        if not t.is_floating_point() or not t.numel():
            return t
        sign = torch.randint(0, 2, t.shape, generator=generator).to(t) * 2 - 1
        size = torch.maximum(t.detach().abs(), t.detach().square().mean().sqrt())
        return t.detach() + eps * size * sign

    model = duplicate(start.model)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(perturb(p))
    return replace(start, model=model), replace(setting, x=perturb(setting.x))
