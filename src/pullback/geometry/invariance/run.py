"""One run of an optimizer from a twin's starting point, and what it reached."""

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


class Diverged(PullbackError):
    """The loss of a run is not finite."""


@dataclass(frozen=True)
class AuditData:
    """What every run shares.

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
    """Where a run has arrived, or a tangent vector there.

    Attributes:
        places: what is compared: z at the setting's points, and w = f(θ) as "parameters".
        theta: θ by name.
    """

    places: dict[str, Tensor]
    theta: Params


def trainable_parameters(model: nn.Module) -> Params:
    """The parameters that require gradients."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def run(
    make: Make, start: Twin, setting: AuditData, *, size: float, steps: int, lenient: bool = False
) -> list[RunState]:
    """The states after 0, 1, …, `steps` steps of `size` times the optimizer's lr, on a copy.

    A run that is `lenient` may diverge: its remaining states are NaN.
    """
    with seed_generators(setting.seed, setting.x.device):
        model = duplicate(start.model)
        optimizers = _optimizers(make, model)
        for group in (g for o in optimizers for g in o.param_groups):
            if "lr" not in group:
                raise PullbackError(
                    "The optimizer has no lr",
                    f"a param group of {type(optimizers[0]).__name__} has none to scale",
                    "Keep the step size in param_groups as 'lr'",
                )
            group["lr"] = group["lr"] * size
        states = [observe(start, model, setting)]
        for _ in range(steps):
            try:
                _step(optimizers, model, setting)
            except Diverged:
                if not lenient:
                    raise
                states += [_nan_state(states[0])] * (steps + 1 - len(states))
                break
            states.append(observe(start, model, setting))
        for optimizer in optimizers:
            if callable(close := getattr(optimizer, "close", None)):
                close()
    return states


@contextlib.contextmanager
def seed_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators, and restore them afterwards."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        torch.manual_seed(seed)
        yield


def duplicate(model: nn.Module) -> nn.Module:
    """A copy without gradients."""
    try:
        out = copy.deepcopy(model)
    except RuntimeError as error:
        remedy = "Keep no tensors with a graph in the model"
        raise PullbackError("The model cannot be copied", str(error), remedy) from error
    out.zero_grad(set_to_none=True)
    return out


@torch.no_grad()
def observe(start: Twin, model: nn.Module, setting: AuditData) -> RunState:
    """The present function values, and the original's weights."""
    values = {n: select_output(model(x), None).to(torch.float64) for n, x in setting.points.items()}
    return RunState(
        {**values, "parameters": _flat(start.weights(model))},
        {n: p.detach().clone() for n, p in trainable_parameters(model).items()},
    )


def push(start: Twin, setting: AuditData, one: RunState, two: RunState) -> RunState:
    """The step Δθ from one state to the next as a tangent vector: dψ Δθ, and df Δθ."""
    if not all(bool(torch.isfinite(t).all()) for t in two.theta.values()):
        return _nan_state(one)
    step = {n: two.theta[n] - t for n, t in one.theta.items()}

    def along(x: Tensor) -> Tensor:
        model = duplicate(start.model)

        def function(theta: Params) -> Tensor:
            buffers = {n: b.clone() for n, b in model.named_buffers()}  # which a norm may count in
            return select_output(functional_call(model, {**buffers, **theta}, (x,)), None)

        found = FunctionLinearization(function, one.theta)
        return found.jvp(found.space.flatten(step)).to(torch.float64)

    moved = two.places["parameters"] - one.places["parameters"]
    if start.push is not None:
        moved = _flat(start.push(one.theta, step))
    values = {name: along(x) for name, x in setting.points.items()}
    return RunState({**values, "parameters": moved}, step)


def _flat(params: Params) -> Tensor:
    return torch.cat([p.detach().flatten().to(torch.float64) for p in params.values()])


def _nan_state(state: RunState) -> RunState:
    both = (
        {n: torch.full_like(t, torch.nan) for n, t in each.items()}
        for each in (state.places, state.theta)
    )
    return RunState(*both)


@contextlib.contextmanager
def _named_failures(who: str) -> Iterator[None]:
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


def _optimizers(make: Make, model: nn.Module) -> list[Optimizer]:
    with _named_failures("make_optimizer"):
        made = make(model)
    found = list(made) if isinstance(made, Sequence) else [made]
    if not found or not all(isinstance(o, Optimizer) for o in found):
        raise PullbackError(
            "make_optimizer made no optimizer",
            f"it returned {type(made).__name__}",
            "Return a torch.optim.Optimizer on the given model, or a list of them",
        )
    return found


def _step(optimizers: Sequence[Optimizer], model: nn.Module, setting: AuditData) -> None:
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

    with _named_failures(type(optimizers[0]).__name__):
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
    """The same start with weights and inputs off by round-off: ±ε of their own size."""
    generator = torch.Generator().manual_seed(setting.seed)

    def off(t: Tensor) -> Tensor:
        if not t.is_floating_point() or not t.numel():
            return t
        sign = torch.randint(0, 2, t.shape, generator=generator).to(t) * 2 - 1
        size = torch.maximum(t.detach().abs(), t.detach().square().mean().sqrt())
        return t.detach() + eps * size * sign

    model = duplicate(start.model)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(off(p))
    return replace(start, model=model), replace(setting, x=off(setting.x))
