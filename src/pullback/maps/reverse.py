"""Reverse passes for many covectors: one vectorized pass, or one pass each."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from .._core.errors import reraise_fatal
from .._core.graph import arithmetic
from .._core.space import ParameterSpace, tolerance
from .layers.moments import SampleLayout


class ForwardReplay(Protocol):
    """A forward pass run again, with its graph kept for many reverse passes."""

    #: the map: its `call`, `batch_dim`, and `call_with(params, *args, **kwargs)`
    map: Any
    space: ParameterSpace
    #: z, detached, in the precision of linear algebra
    value: Tensor
    #: z, with its graph
    graph: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The parameters the graph was built on."""
        ...

    def gradients(
        self, u: Tensor, inputs: list[Any], *, batched: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Autograd's answer for parameters or for the layers' outputs."""
        ...


def looped_cotangents(
    linear: ForwardReplay, edges: list[Any], layouts: Sequence[SampleLayout], covectors: Tensor
) -> list[Tensor]:
    """Per edge the cotangents (N, R, ...), samples first, by R reverse passes."""
    out: list[Tensor] = []
    for r, u in enumerate(covectors if edges else ()):
        for i, (gradient, layout) in enumerate(
            zip(linear.gradients(u, edges), layouts, strict=True)
        ):
            assert gradient is not None
            placed = layout(gradient)
            if r == 0:
                shape = (placed.shape[0], len(covectors), *placed.shape[1:])
                out.append(linear.space.zeros(*shape))
            out[i][:, r] = placed
    return out


def batched_cotangents(
    linear: ForwardReplay, edges: list[Any], layouts: Sequence[SampleLayout], covectors: Tensor
) -> list[Tensor]:
    """The same by one reverse pass in which every operation is vectorized over covectors."""
    if not edges:
        return []
    out = []
    for gradient, layout in zip(
        linear.gradients(covectors, edges, batched=True), layouts, strict=True
    ):
        assert gradient is not None
        out.append(layout.of_batch(gradient).to(linear.space.dtype))
    return out


def vectorized(z: Tensor, inputs: list[Any], u: Tensor) -> tuple[Tensor | None, ...]:
    """Autograd's answers for covectors u (R, *z.shape) side by side, by torch.func's rules.

    `is_grads_batched` has older ones, which take convolutions, normalizations and most activations
    covector by covector: ten launches where one does. They serve where torch.func's do not.
    """
    used: list[bool] = []

    def pull(one: Tensor) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(z, inputs, one, retain_graph=True, allow_unused=True)
        used[:] = [g is not None for g in found]
        return tuple(g for g in found if g is not None)

    try:
        pulled = iter(vmap(pull)(u))
    except (RuntimeError, UserWarning, NotImplementedError) as error:
        reraise_fatal(error)
        return torch.autograd.grad(
            z, inputs, u, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    return tuple(next(pulled) if some else None for some in used)


def vectorizes(
    linear: ForwardReplay, edges: list[Any], u: Tensor, truth: Sequence[Tensor | None]
) -> bool:
    """Whether the vectorized pass works for this graph, at speed, and agrees with the plain one."""
    if not edges:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where an operation has no batching rule
            found = linear.gradients(torch.stack([u, -u]), edges, batched=True)
    except (RuntimeError, UserWarning, NotImplementedError) as error:
        reraise_fatal(error)
        return False
    limit = tolerance(arithmetic(linear.graph))
    for got, want in zip(found, truth, strict=False):
        if got is None or want is None or not want.numel():
            continue
        error = torch.maximum((got[0] - want).abs().max(), (got[1] + want).abs().max())
        if not bool(error <= limit * want.abs().max()):
            return False
    return True
