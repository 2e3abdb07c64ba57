"""Networks that cannot be used are refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError
from ...maps import Scheme
from ..discretization.residual import LocalResidual, compute_derivatives
from ..discretization.sites import Sites
from ..problem.problem import Problem


def find_template(network: nn.Module) -> Tensor:
    """Return a parameter of the network, whose dtype and device are those of the solve.

    Raise if parameters and buffers have several, or a dtype that cannot be used.
    """
    parameters = list(network.parameters())
    if not parameters:
        raise PullbackError(
            "The network has no parameters", "there is nothing to fit", "Use mlp(…)"
        )
    first = parameters[0]
    precisions = {(p.dtype, p.device) for p in parameters}
    if len(precisions) > 1 or first.dtype not in (torch.float32, torch.float64):
        names = sorted(f"{dtype} on {device}" for dtype, device in precisions)
        raise PullbackError(
            "The network's precision cannot be used",
            f"its parameters are {', '.join(names)}",
            "Use one dtype, float64 or float32, on one device: network.double().to(device)",
        )
    for name, buffer in network.named_buffers():
        has_other_dtype = buffer.is_floating_point() and buffer.dtype != first.dtype
        if has_other_dtype or buffer.device != first.device:
            raise PullbackError(
                f"The buffer {name!r} does not match the network's parameters",
                f"{buffer.dtype} on {buffer.device} beside {first.dtype} on {first.device}",
                "Convert the whole network: network.to(dtype, device)",
            )
    return first


@dataclass(frozen=True)
class ProbeOutputs:
    """A network at some points of the domain.

    Attributes:
        values: at all of them.
        repeated: the same, once more.
        first_two: at the first two points alone.
    """

    values: Tensor
    repeated: Tensor
    first_two: Tensor


@torch.no_grad()
def refuse_shape(problem: Problem, network: nn.Module, template: Tensor) -> None:
    """Raise unless the network takes d coordinates and gives one fixed value per field."""
    low = problem.domain.low.to(template)
    high = problem.domain.high.to(template)
    count = len(problem.fields) + 2
    x = low + (high - low) * torch.linspace(0.3, 0.6, count).to(template)[:, None]
    outputs = _evaluate(problem, network, x)
    shape = tuple(outputs.values.shape)
    if shape != (count, len(problem.fields)):
        raise PullbackError(
            "The network's output does not fit the fields",
            f"{count} points gave shape {shape}, and the fields are {', '.join(problem.fields)}",
            f"Its output must have {len(problem.fields)} entries per point",
        )
    _refuse_difference(outputs.values, outputs.repeated, "random")
    _refuse_difference(outputs.values[:2], outputs.first_two, "dependent on the other points")


def _evaluate(problem: Problem, network: nn.Module, x: Tensor) -> ProbeOutputs:
    """Return the network at points; its buffers stay as they are, running statistics too."""
    names = problem.domain.names
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    try:
        outputs = ProbeOutputs(network(x), network(x), network(x[:2]))
    except PullbackError:
        raise
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise PullbackError(
            "The network does not take the domain's points",
            f"at points of shape {tuple(x.shape)}: {error!r:.300}",
            f"Its input must have {len(names)} coordinates ({', '.join(names)})",
        ) from error
    finally:
        for name, buffer in network.named_buffers():
            buffer.copy_(buffers[name])
    return outputs


def _refuse_difference(values: Tensor, others: Tensor, what: str) -> None:
    """Raise if two evaluations at the same points differ."""
    if not torch.allclose(values, others, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise PullbackError(
            f"The network's value at a point is {what}",
            "two evaluations differ",
            "Call network.eval(), or leave out dropout and batch norms",
        )


_PIECEWISE_LINEAR = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.ReLU6,
    nn.Hardtanh,
    nn.Threshold,
)


def refuse_flat(problem: Problem, network: nn.Module, sites: Mapping[str, Sites]) -> None:
    """Raise if a network of straight pieces is to solve an equation of second order."""
    modules = [m for m in network.modules() if isinstance(m, _PIECEWISE_LINEAR)]
    if not modules or not _has_second_derivatives(problem, sites):
        return
    if _is_piecewise_linear(problem, network):
        names = sorted({type(module).__name__ for module in modules})
        raise PullbackError(
            "The network's second derivatives vanish everywhere",
            f"{' and '.join(names)} is piecewise linear",
            "Use a smooth activation: tanh, sin, gelu, silu",
        )


def _has_second_derivatives(problem: Problem, sites: Mapping[str, Sites]) -> bool:
    """Return True if a condition asks for second derivatives or higher ones."""
    for condition in problem.conditions:
        local = LocalResidual(problem, condition, sites[condition.name])
        if any(index is None or len(index) > 1 for index in local.indices):
            return True
    return False


def _is_piecewise_linear(problem: Problem, network: nn.Module) -> bool:
    """Return True if first derivatives do not vanish at some points, and second ones do.

    The second derivatives of a constant vanish too, but it may yet become anything.
    """
    dim = problem.domain.dim
    pairs = list(combinations_with_replacement(range(dim), 2))
    scheme = Scheme.of(pairs)
    x = problem.domain.sample(16, "uniform").x.to(next(network.parameters()))
    channels = compute_derivatives(network, x[None], scheme)
    has_slope = any(bool(channels[scheme.position[(i,)]].any()) for i in range(dim))
    has_curvature = any(bool(channels[scheme.position[pair]].any()) for pair in pairs)
    return has_slope and not has_curvature
