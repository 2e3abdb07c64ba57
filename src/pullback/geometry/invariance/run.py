"""One run of an optimizer from a twin's starting point, and what it reached."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
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


class Diverged(PullbackError):
    """The loss of a run is not finite."""


@dataclass(frozen=True)
class AuditData:
    """What every run shares.

    Attributes:
        x, y: the batch.
        loss: (outputs, targets) ↦ a scalar.
        probes: other inputs at which functions are compared too, or None.
        seed: of torch's generators, at the start of each run.
    """

    x: Tensor
    y: Tensor
    loss: Loss
    probes: Tensor | None
    seed: int

    @property
    def points(self) -> dict[str, Tensor]:
        """Return the inputs at which functions are compared: the "batch", and "probes"."""
        if self.probes is None:
            return {"batch": self.x}
        return {"batch": self.x, "probes": self.probes}


@dataclass(frozen=True)
class RunState:
    """Where a run has arrived, or a tangent vector there.

    Attributes:
        values: by quantity, z at the setting's points, and w = f(θ) as "parameters".
        theta: θ by name.
    """

    values: dict[str, Tensor]
    theta: Params

    def measure_theta(self) -> float:
        """Return ‖θ‖."""
        return float(sum(t.double().square().sum() for t in self.theta.values())) ** 0.5


def trainable_parameters(model: nn.Module) -> Params:
    """Return the parameters that require gradients."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def run(
    make: Make,
    start: Twin,
    setting: AuditData,
    *,
    size: float,
    steps: int,
    may_diverge: bool = False,
) -> list[RunState]:
    """Return the states after 0, 1, …, `steps` steps of `size` times the optimizer's lr.

    The run is on a copy. If it may diverge, its remaining states are NaN; otherwise it raises.
    """
    with seed_generators(setting.seed, setting.x.device):
        model = duplicate(start.model)
        optimizers = _make_optimizers(make, model)
        for optimizer in optimizers:
            _scale_lr(optimizer, size)
        states = [observe(start, model, setting)]
        for _ in range(steps):
            try:
                _take_step(optimizers, model, setting)
            except Diverged:
                if not may_diverge:
                    raise
                states += [_make_nan_state(states[0])] * (steps + 1 - len(states))
                break
            states.append(observe(start, model, setting))
        for optimizer in optimizers:
            if callable(close := getattr(optimizer, "close", None)):
                close()
    return states


def _scale_lr(optimizer: Optimizer, size: float) -> None:
    """Multiply the lr of every param group."""
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise PullbackError(
                "The optimizer has no lr",
                f"a param group of {type(optimizer).__name__} has none to scale",
                "Keep the step size in param_groups as 'lr'",
            )
        group["lr"] = group["lr"] * size


@contextlib.contextmanager
def seed_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators, and restore them afterwards."""
    cuda_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda_devices):
        torch.manual_seed(seed)
        yield


def duplicate(model: nn.Module) -> nn.Module:
    """Return a copy without gradients."""
    try:
        duplicated = copy.deepcopy(model)
    except RuntimeError as error:
        remedy = "Keep no tensors with a graph in the model"
        raise PullbackError("The model cannot be copied", str(error), remedy) from error
    duplicated.zero_grad(set_to_none=True)
    return duplicated


@torch.no_grad()
def observe(start: Twin, model: nn.Module, setting: AuditData) -> RunState:
    """Return the present function values, and the original's weights."""
    values: dict[str, Tensor] = {}
    for quantity, x in setting.points.items():
        values[quantity] = select_output(model(x), None).to(torch.float64)
    values["parameters"] = _flatten(start.weights(model))
    theta = {n: p.detach().clone() for n, p in trainable_parameters(model).items()}
    return RunState(values, theta)


def find_tangent(start: Twin, setting: AuditData, before: RunState, after: RunState) -> RunState:
    """Return the step Δθ between two states as a tangent vector: dψ Δθ, and df Δθ."""
    if not all(bool(torch.isfinite(t).all()) for t in after.theta.values()):
        return _make_nan_state(before)
    step = {n: after.theta[n] - t for n, t in before.theta.items()}
    values: dict[str, Tensor] = {}
    for quantity, x in setting.points.items():
        values[quantity] = _push_forward(start.model, before.theta, step, x)
    if start.push is None:  # where f is affine
        values["parameters"] = after.values["parameters"] - before.values["parameters"]
    else:
        values["parameters"] = _flatten(start.push(before.theta, step))
    return RunState(values, step)


def _push_forward(model: nn.Module, theta: Params, step: Params, x: Tensor) -> Tensor:
    """Return dψ Δθ, the derivative of the model's outputs on x along a step, in float64."""
    model = duplicate(model)

    def evaluate(theta: Params) -> Tensor:
        buffers = {n: b.clone() for n, b in model.named_buffers()}  # which a norm may count in
        return select_output(functional_call(model, {**buffers, **theta}, (x,)), None)

    linearization = FunctionLinearization(evaluate, theta)
    return linearization.jvp(linearization.space.flatten(step)).to(torch.float64)


def _flatten(params: Params) -> Tensor:
    return torch.cat([p.detach().flatten().to(torch.float64) for p in params.values()])


def _make_nan_state(template: RunState) -> RunState:
    """Return a state of the same shapes that is NaN everywhere."""
    values = {quantity: torch.full_like(t, torch.nan) for quantity, t in template.values.items()}
    theta = {name: torch.full_like(t, torch.nan) for name, t in template.theta.items()}
    return RunState(values, theta)


@contextlib.contextmanager
def _name_in_errors(caller: str) -> Iterator[None]:
    """Context that raises errors of other libraries again, with the optimizer's name."""
    try:
        yield
    except PullbackError:
        raise
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise PullbackError(
            f"{caller} failed during the audit",
            f"{type(error).__name__}: {lines[0]}",
            "See the error above; it must run on the model, and on copies of it",
        ) from error


def _make_optimizers(make: Make, model: nn.Module) -> list[Optimizer]:
    """Return the optimizers that `make` builds on the model, as a list."""
    with _name_in_errors("make_optimizer"):
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
    """Take one step of all optimizers at the same gradient.

    Raises `Diverged` if the loss there is not finite.
    """
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

    with _name_in_errors(type(optimizers[0]).__name__):
        if len(optimizers) == 1:
            optimizers[0].step(closure)  # pyright: ignore[reportArgumentType, reportCallIssue]
            return
        closure()  # each sees the gradient at the same point
        for optimizer in optimizers:
            optimizer.step()


def refuse_infinite(loss: Tensor) -> None:
    """Raise for a loss that is not finite."""
    if not bool(torch.isfinite(loss)):
        raise Diverged(
            "The loss is not finite",
            f"it is {float(loss.detach())}",
            "Check model and batch, or audit with a smaller lr",
        )


def perturb_start(start: Twin, setting: AuditData, eps: float) -> tuple[Twin, AuditData]:
    """Return the same start with weights and inputs off by round-off: ±ε of their own size."""
    generator = torch.Generator().manual_seed(setting.seed)

    def add_roundoff(t: Tensor) -> Tensor:
        if not t.is_floating_point() or not t.numel():
            return t
        sign = torch.randint(0, 2, t.shape, generator=generator).to(t) * 2 - 1
        size = torch.maximum(t.detach().abs(), t.detach().square().mean().sqrt())
        return t.detach() + eps * size * sign

    model = duplicate(start.model)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(add_roundoff(p))
    return replace(start, model=model), replace(setting, x=add_roundoff(setting.x))
