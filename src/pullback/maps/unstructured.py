"""Rows of J for parameters without layer structure: per sample under vmap, or row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils import _pytree as pytree

from .._core.attention import unfused_attention
from .._core.errors import reraise_fatal
from .._core.space import tolerance
from .replay import Replay

_CHUNK = 2**28  # bytes of rows formed at once under vmap


def sample_rows(
    linear: Replay, names: Sequence[str], covectors: Tensor, known: str | None
) -> tuple[dict[str, Tensor], str]:
    """Rows (N, R, numel) by name, and the way that worked.

    The vmapped rows are trusted only if they add up to autograd's own gradient: dropout, or an
    argument that is wrongly taken for a batch, makes them differ, and then each row gets a
    reverse pass of its own on the recorded graph.
    """
    if known != "reverse passes":
        try:
            rows = _vmapped(linear, names, covectors)
        except Exception as error:  # a model may refuse a batch of one in any way it likes
            reraise_fatal(error)
            rows = None
        if rows is not None and _adds_up(linear, rows, covectors):
            return rows, "vmap"
    return _row_by_row(linear, names, covectors), "reverse passes"


def _vmapped(linear: Replay, names: Sequence[str], covectors: Tensor) -> dict[str, Tensor]:
    source, call = linear.map, linear.map.call
    samples, axis = linear.value.shape[0], source.batch_dim
    fixed = {n: p.detach() for n, p in linear.leaves.items()}
    free = {n: fixed.pop(n) for n in names}
    flat, spec = pytree.tree_flatten((call.args, call.kwargs))
    batched = [isinstance(t, Tensor) and t.ndim > axis and t.shape[axis] == samples for t in flat]

    def rows(values: list[Any], u: Tensor) -> dict[str, Tensor]:
        full = [
            v.unsqueeze(axis) if b else t for v, b, t in zip(values, batched, flat, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(full, spec)
        pull = vjp(lambda p: source.call_with({**fixed, **p}, *args, **kwargs)[0], free)[1]
        pulled = [pull(row)[0] for row in u]
        return {n: torch.stack([p[n] for p in pulled]) for n in names}

    values = [t if b else torch.zeros(samples) for t, b in zip(flat, batched, strict=True)]
    axes = [axis if b else 0 for b in batched]
    size = sum(p.numel() for p in free.values()) * covectors.shape[0]
    chunk = max(1, _CHUNK // (size * linear.value.element_size()))
    u = covectors.movedim(1, 0).to(linear.graph.dtype)
    with call.replaying(), unfused_attention():  # the fused one has no vmap rule
        out = vmap(rows, in_dims=(axes, 0), chunk_size=chunk, randomness="different")(values, u)
    return {n: v.reshape(*v.shape[:2], -1).to(linear.space.dtype) for n, v in out.items()}


def _adds_up(linear: Replay, rows: dict[str, Tensor], covectors: Tensor) -> bool:
    """Whether Σ c_nr row_nr equals autograd's Jᵀ Σ c_nr u_nr for random c."""
    r, n = covectors.shape[:2]
    generator = torch.Generator().manual_seed(1)
    c = torch.randn(n, r, generator=generator, dtype=torch.float64).to(linear.value)
    u = torch.einsum("nr,rn...->n...", c, covectors.to(c))
    truth = linear.gradients(u, [linear.leaves[name] for name in rows])
    limit = tolerance(linear.graph.dtype, 10)
    for (_, value), want in zip(rows.items(), truth, strict=True):
        got = torch.einsum("nrp,nr->p", value, c.to(value))
        exact = torch.zeros_like(got) if want is None else want.flatten().to(got)
        if bool((got - exact).norm() > limit * exact.norm()):
            return False
    return True


def _row_by_row(linear: Replay, names: Sequence[str], covectors: Tensor) -> dict[str, Tensor]:
    r, n = covectors.shape[:2]
    leaves = [linear.leaves[name] for name in names]
    rows = {
        name: linear.space.zeros(n, r, leaf.numel())
        for name, leaf in zip(names, leaves, strict=True)
    }
    for i in range(n):
        for k in range(r):
            u = torch.zeros_like(linear.graph)
            u[i] = covectors[k, i]
            for name, g in zip(names, linear.gradients(u, leaves), strict=True):
                if g is not None:
                    rows[name][i, k] = g.flatten()
    return rows
