"""From maps and metrics to a Gram, in the form that fits sizes, memory and solver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from math import prod

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.factor import Factor
from .._core.space import ParameterSpace
from ..maps import Covered, Linearization, Pulled, identity_covectors
from .base import Gram
from .forms import Dense, Kernel, Operator, Panels, Rows

_PANEL = 2**27
FORMS = ("auto", "rows", "kernel", "dense", "matrix_free")


class Part:
    """One linearized map with the factor of its metric: the rows A = SᵀJ of its samples."""

    def __init__(self, linear: Linearization, factor: Factor) -> None:
        self.linear, self.factor = linear, factor
        self.count = linear.value.shape[0] * prod(factor.white)

    @cached_property
    def pulled(self) -> Pulled:
        """The covectors S (or, where S couples samples, the coordinates) pulled back."""
        value = self.linear.value
        coupled = self.factor.couples_samples
        return self.linear.pullback(
            identity_covectors(value) if coupled else self.factor.covectors(value)
        )

    @property
    def used_structure(self) -> bool:
        """Whether rows were pulled back through layers, and not by autograd alone."""
        return "pulled" in vars(self) and bool(self.pulled.coverage)

    def _white(self, c: Tensor) -> Tensor:
        return c.reshape(*c.shape[:-1], self.linear.value.shape[0], *self.factor.white)

    def transpose(self, v: Tensor) -> Tensor:
        """Sᵀ on the last axis of v, (..., N·|event|) -> (..., n)."""
        shaped = v.reshape(*v.shape[:-1], *self.linear.value.shape)
        return self.factor.transpose(shaped).flatten(v.ndim - 1)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """A, (n, p), or its rows of the samples in [start, stop)."""
        if self.factor.couples_samples:
            return self.transpose(self.pulled.rows().T).T
        stop = self.linear.value.shape[0] if stop is None else stop
        whole = (start, stop) == (0, self.linear.value.shape[0])
        return (self.pulled if whole else self.pulled.narrow(start, stop)).rows()

    def project(self, v: Tensor) -> Tensor:
        """A v from the pulled-back blocks."""
        out = self.pulled.project(v).flatten()
        return self.transpose(out) if self.factor.couples_samples else out

    def lift(self, c: Tensor) -> Tensor:
        """Aᵀ c from the pulled-back blocks."""
        if self.factor.couples_samples:
            c = self.factor.apply(self._white(c))
        return self.pulled.lift(c.reshape(self.pulled.shape))

    def push(self, v: Tensor) -> Tensor:
        """A v by one forward-mode pass."""
        return self.factor.transpose(self.linear.jvp(v)).flatten()

    def pull(self, c: Tensor) -> Tensor:
        """Aᵀ c by one reverse-mode pass."""
        return self.linear.vjp(self.factor.apply(self._white(c)))


def assemble(parts: Sequence[Part], form: str, budget: int, prefers: str = "small") -> Gram:
    """The Gram of all parts together.

    Args:
        parts: linearized maps with their factors, over the same parameters.
        form: one of "rows", "kernel", "dense", "matrix_free", or "auto": the map's own closed
            form where it has one, else what fits the sizes.
        budget: bytes that one matrix may take.
        prefers: what the solver works from best: "rows", "panels" (rows, a few at a time where
            they do not fit), "small" (the smaller of the kernel and the dense Gram) or "products".
    """
    space = parts[0].linear.space
    n, p = sum(part.count for part in parts), space.size
    if len(parts) > 1 and any(part.factor.couples_samples for part in parts):
        raise PullbackError(
            "The metric couples the samples of one forward call",
            f"the closure made {len(parts)} forward calls, whose samples it would not relate",
            "Pass the whole batch in one call",
        )
    if form == "auto":
        own = parts[0].linear.closed_form(parts[0].factor) if len(parts) == 1 else None
        if own is not None:
            return own
        form = choose(n, p, torch.finfo(space.dtype).bits // 8, budget, prefers)
    if form == "rows":
        return Rows(parts[0].rows() if len(parts) == 1 else torch.cat([x.rows() for x in parts]))
    if form == "dense":
        return Dense(dense(parts, space, budget), n)
    if form == "kernel":
        products = _products(parts, "project", "lift")
        return Kernel(_kernel(parts, budget), *products, p, lambda: squares(parts, space, budget))
    if form == "panels":
        products = _products(parts, "project", "lift")
        some = partial(panels, parts, space, panel_bytes(space, budget))
        return Panels(some, *products, (n, p), space.dtype, space.device)
    if form == "matrix_free":
        return Operator(*_products(parts, "push", "pull"), (n, p), space.dtype, space.device)
    raise PullbackError(
        f"Unknown Gram form {form!r}", "it is not one of the forms", f"Use one of {FORMS}"
    )


def choose(n: int, p: int, itemsize: int, budget: int, prefers: str) -> str:
    """The form for n rows and p parameters: the small side, kept factored where it fits."""
    if prefers == "products":
        return "matrix_free"
    if prefers == "panels":
        return "rows" if n * p * itemsize <= budget else "panels"
    need = min(n, p) ** 2 * itemsize
    if need > budget:
        raise PullbackError(
            "The Gram does not fit the memory budget",
            f"its smaller side has {min(n, p)} rows and takes {need:.2g} bytes of {budget:.2g}",
            "Use solvers.ConjugateGradient, a smaller batch, or raise memory=",
        )
    fits = n * p * itemsize <= budget
    if p <= n:
        return "rows" if fits else "dense"
    return "rows" if fits and prefers == "rows" else "kernel"


def coverage(parts: Sequence[Part]) -> tuple[Covered, ...]:
    """How each parameter's share was computed, for the forms that pull blocks back."""
    return parts[0].pulled.coverage if parts and "pulled" in vars(parts[0]) else ()


def _products(parts: Sequence[Part], forward: str, backward: str):
    counts = [part.count for part in parts]

    def project(v: Tensor) -> Tensor:
        return torch.cat([getattr(part, forward)(v) for part in parts])

    def lift(c: Tensor) -> Tensor:
        pieces = zip(parts, c.split(counts), strict=True)
        shares = [getattr(part, backward)(x) for part, x in pieces]
        return shares[0] if len(shares) == 1 else torch.stack(shares).sum(0)

    return project, lift


def dense(parts: Sequence[Part], space: ParameterSpace, budget: int) -> Tensor:
    """Σ AᵀA over panels of samples whose rows fit the budget."""
    out = space.zeros(space.size, space.size)
    for rows in panels(parts, space, budget):
        out.addmm_(rows.T, rows)
    return out


def squares(parts: Sequence[Part], space: ParameterSpace, budget: int) -> Tensor:
    """The diagonal of Σ AᵀA."""
    out = space.zeros(space.size)
    for rows in panels(parts, space, budget):
        out += rows.norm(dim=0).square()
    return out


def panel_bytes(space: ParameterSpace, budget: int) -> int:
    """What a panel may take: on a CPU little, for its cache; on a GPU enough to keep it busy."""
    return _PANEL if space.device.type == "cpu" else max(_PANEL, budget // 4)


def panels(parts: Sequence[Part], space: ParameterSpace, budget: int) -> Iterator[Tensor]:
    """The rows of all parts, as many samples at a time as fit half the budget."""
    itemsize = torch.finfo(space.dtype).bits // 8
    for part in parts:
        samples = part.linear.value.shape[0]
        per_sample = part.count // samples * space.size * itemsize
        panel = samples if part.factor.couples_samples else max(1, budget // (2 * per_sample))
        for a in range(0, samples, panel):
            yield part.rows(a, min(a + panel, samples))


def _kernel(parts: Sequence[Part], budget: int) -> Tensor:
    """The blocks A_i A_jᵀ of all pairs of parts."""
    lines = []
    for i, one in enumerate(parts):
        line = [
            one.pulled.kernel(None if i == j else two.pulled, budget=budget)
            for j, two in enumerate(parts)
            if j <= i
        ]
        lines.append(line)
    full = [
        [lines[i][j] if j <= i else lines[j][i].T for j in range(len(parts))]
        for i in range(len(parts))
    ]
    kernel = full[0][0] if len(parts) == 1 else torch.cat([torch.cat(line, 1) for line in full])
    if parts[0].factor.couples_samples:
        kernel = parts[0].transpose(parts[0].transpose(kernel).T)
    return kernel
