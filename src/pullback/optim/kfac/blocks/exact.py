"""Products with the exact Gram along a few directions, each by one forward-mode pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

from ...._core.attention import unfused_attention
from ...._core.capture import Call, Selector, plain, select
from ...._core.errors import PullbackError, reraise_fatal
from ...._core.space import compute_dtype, tolerance
from ....maps.module import double_vjp, in_every_slot
from ....metrics import Metric


def products(
    model: nn.Module,
    calls: Sequence[Call],
    metric: Metric,
    params: Mapping[str, Tensor],
    span: Sequence[Mapping[str, Tensor]],
    *,
    output: Selector,
    batch_dim: int,
    reduction: str,
) -> list[list[Tensor]]:
    """x_iᵀ G x_j for directions x_i by name, with G = mean JᵀMJ over the calls' samples."""
    total: list[list[Tensor]] = []
    samples = 0.0
    for call in calls:
        values, pushed = _pushed(model, call, params, span, output)

        def arranged(z: Tensor) -> Tensor:
            z = z.movedim(batch_dim, 0).to(compute_dtype(z.dtype))
            return z[:, None] if z.ndim == 1 else z

        z, tangents = arranged(values), [arranged(t) for t in pushed]
        factor = metric.factor(z, inputs=_inputs(call, batch_dim, len(z)))
        share = 1.0
        if call.cotangent is not None:
            mask = metric.counted(z, arranged(call.cotangent))
            if mask is not None:
                tangents = [t * mask for t in tangents]
                share = float(mask.to(z.dtype).mean())
        white = [factor.transpose(t) for t in tangents]
        found = [[(a * b).sum() for b in white] for a in white]
        total = (
            [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(total, found, strict=True)]
            if total
            else found
        )
        samples += metric.samples(z) * share
    scale = 1.0 if reduction == "sum" else 1 / max(samples, 1.0)
    return [[x * scale for x in row] for row in total]


def _pushed(
    model: nn.Module,
    call: Call,
    params: Mapping[str, Tensor],
    span: Sequence[Mapping[str, Tensor]],
    output: Selector,
) -> tuple[Tensor, list[Tensor]]:
    """z and J x for every direction x."""
    inner = plain(model)
    here = {n: p.detach() for n, p in params.items()}
    recorded = call.buffers if call.buffers is not None else dict(inner.named_buffers())

    def value(point: dict[str, Tensor]) -> Tensor:
        buffers = {n: b.clone() for n, b in recorded.items()}
        tensors = in_every_slot(inner, {**buffers, **point})
        args: Any = call.args
        out = functional_call(inner, tensors, args, call.kwargs, tie_weights=False, strict=False)
        return select(out, output)

    with torch.no_grad(), unfused_attention(), _unfused_recurrence(inner), call.replaying():
        try:
            pairs: Any = [jvp(value, (here,), (_like(here, x),)) for x in span]
        except (RuntimeError, NotImplementedError) as error:
            reraise_fatal(error)
            return _pushed_by_reverse(value, here, span)
    return pairs[0][0].detach(), [t.detach() for _, t in pairs]


def _like(params: Mapping[str, Tensor], x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: x[n].to(p.dtype) for n, p in params.items()}


def _pushed_by_reverse(
    value: Callable[[dict[str, Tensor]], Tensor],
    here: Mapping[str, Tensor],
    span: Sequence[Mapping[str, Tensor]],
) -> tuple[Tensor, list[Tensor]]:
    """The same by two reverse passes, and proved by a third: ‖Jx‖² = ⟨x, JᵀJx⟩."""
    leaves = {n: p.clone().requires_grad_() for n, p in here.items()}
    why = "in reverse mode it depends on more than its cotangent"
    try:
        with torch.enable_grad():
            z = value(leaves)
        pushed = [double_vjp(z, leaves, _like(here, x)) for x in span]
        if all(_adjoint(z, leaves, x, t) for x, t in zip(span, pushed, strict=True)):
            return z.detach(), pushed
    except (RuntimeError, NotImplementedError) as error:
        reraise_fatal(error)
        why = str(error).partition("\n")[0].rstrip(".")
    raise PullbackError(
        "This step needs directional derivatives of the model",
        f"an operation in it has neither a forward-mode nor a second derivative ({why})",
        "Leave out Adaptive damping and step=, or give the operation a jvp",
    )


def _adjoint(
    z: Tensor, leaves: Mapping[str, Tensor], x: Mapping[str, Tensor], pushed: Tensor
) -> bool:
    """Whether ‖Jx‖² is ⟨x, Jᵀ(Jx)⟩."""
    every = list(leaves.values())
    pulled = torch.autograd.grad(z, every, pushed, retain_graph=True, allow_unused=True)
    pairs = [(x[n], g) for n, g in zip(leaves, pulled, strict=True) if g is not None]
    slope = sum(float(torch.sum(a.double() * g.double())) for a, g in pairs)
    length = float(pushed.double().square().sum())
    return abs(slope - length) <= tolerance(z.dtype, 10) * max(abs(slope), length)


@contextlib.contextmanager
def _unfused_recurrence(model: nn.Module) -> Iterator[None]:
    """No fused kernels of recurrent layers, which know but one reverse pass."""
    if not any(isinstance(m, nn.RNNBase) for m in model.modules()):
        yield
        return
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
        yield


def _inputs(call: Call, batch_dim: int, samples: int) -> Tensor | None:
    tensors = call.tensors
    if not tensors:
        return None
    x = tensors[0]
    if x.ndim > batch_dim and x.shape[batch_dim] == samples:
        return x.movedim(batch_dim, 0)
    return x
