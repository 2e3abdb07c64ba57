"""Networks that cannot be used are refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError
from ...maps import Scheme
from ..discretization.residual import LocalResidual, derivatives
from ..discretization.sites import Sites
from ..problem.problem import Problem


def precision(network: nn.Module) -> Tensor:
    """A parameter of the network, whose dtype and device are those of the solve."""
    params = list(network.parameters())
    if not params:
        raise PullbackError(
            "The network has no parameters", "there is nothing to fit", "Use mlp(…)"
        )
    kinds = {(p.dtype, p.device) for p in params}
    if len(kinds) > 1 or params[0].dtype not in (torch.float32, torch.float64):
        found = ", ".join(sorted(f"{d} on {v}" for d, v in kinds))
        raise PullbackError(
            "The network's precision cannot be used",
            f"its parameters are {found}",
            "Use one dtype, float64 or float32, on one device: network.double().to(device)",
        )
    for name, buffer in network.named_buffers():
        mismatch = buffer.is_floating_point() and buffer.dtype != params[0].dtype
        if mismatch or buffer.device != params[0].device:
            raise PullbackError(
                f"The buffer {name!r} does not match the network's parameters",
                f"{buffer.dtype} on {buffer.device} beside {params[0].dtype} on {params[0].device}",
                "Convert the whole network: network.to(dtype, device)",
            )
    return params[0]


@torch.no_grad()
def refuse_shape(problem: Problem, network: nn.Module, like: Tensor) -> None:
    """The network must take d coordinates and give one value per field."""
    low, high = problem.domain.low.to(like), problem.domain.high.to(like)
    n, names = len(problem.fields) + 2, problem.domain.names
    x = low + (high - low) * torch.linspace(0.3, 0.6, n).to(like)[:, None]
    buffers = {name: b.clone() for name, b in network.named_buffers()}
    try:
        out, again, first = network(x), network(x), network(x[:2])
        shape = tuple(out.shape)
    except PullbackError:
        raise
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise PullbackError(
            "The network does not take the domain's points",
            f"at points of shape ({n}, {problem.domain.dim}): {error!r:.300}",
            f"Its input must have {len(names)} coordinates ({', '.join(names)})",
        ) from error
    finally:  # running statistics, which evaluating may have changed
        for name, b in network.named_buffers():
            b.copy_(buffers[name])
    if shape != (n, len(problem.fields)):
        raise PullbackError(
            "The network's output does not fit the fields",
            f"{n} points gave shape {shape}, and the fields are {', '.join(problem.fields)}",
            f"Its output must have {len(problem.fields)} entries per point",
        )
    same = {"random": (out, again), "dependent on the other points": (out[:2], first)}
    for what, (one, two) in same.items():
        if not torch.allclose(one, two, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise PullbackError(
                f"The network's value at a point is {what}",
                "two evaluations differ",
                "Call network.eval(), or leave out dropout and batch norms",
            )


_KINKED = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ReLU6, nn.Hardtanh, nn.Threshold)


def refuse_flat(problem: Problem, network: nn.Module, sites: Mapping[str, Sites]) -> None:
    """A network of straight pieces solves no equation of second order."""
    found = sorted({type(m).__name__ for m in network.modules() if isinstance(m, _KINKED)})
    if not found:
        return
    like = next(network.parameters())
    asked = [LocalResidual(problem, c, sites[c.name]).keys for c in problem.conditions]
    if not any(i is None or len(i) > 1 for keys in asked for _, _, i in keys):
        return
    axes = range(problem.domain.dim)
    scheme = Scheme.of([(i, j) for i in axes for j in axes if i <= j])
    x = problem.domain.sample(16, "uniform").x.to(like)
    bends = derivatives(network, x[None], scheme)
    first, second = (
        torch.stack([bends[at] for index, at in scheme.position.items() if len(index) == order])
        for order in (1, 2)
    )
    if bool(first.any()) and not bool(second.any()):  # a constant may yet become anything
        raise PullbackError(
            "The network's second derivatives vanish everywhere",
            f"{' and '.join(found)} is piecewise linear",
            "Use a smooth activation: tanh, sin, gelu, silu",
        )
