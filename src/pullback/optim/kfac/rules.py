r"""Direction rules: how a gradient becomes a direction, from the factors of its block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._core.flags import lerp_unless
from ...grams.kronecker import factor_matrix
from ...grams.kronecker.inverse import Inverse, apply_inverse, rotate, to_half
from ...grams.kronecker.roots import polar

_ROUND_OFF = 2  # of a coordinate, in units of the precision of the bases
_RMS = 0.75  # of a step's entries over the learning rate and the agreement: 0.2 for noise
_LEAST = 1e-3  # of the length that is divided by: without a gradient it is zero


class Rule(ABC):
    """How a gradient becomes a direction: steepest descent for a norm on the layer's weights.

    Attributes:
        needs: what is prepared per block: "inverse" sides, Cholesky "factors", an "eigenbasis" with
            eigenvalues, a "basis" that follows the averages, or the inverse "root" of the input
            side.
        moments: which moments it keeps per block, "first" or "second", each of every entry
            ("entries") or of every row ("rows").
        inputs: whether it needs the input side alone, which the forward pass gives.
        matrices: whether it is for weight matrices alone; all other parameters then follow AdamW.
        head: whether it is for the output layer too.
        rest: the share of the learning rate at which the parameters that it is not for follow
            AdamW; those of param groups with `"rule": "adam"` follow it at their own rate.
        defaults: of those arguments of `KFAC` that are not given.
    """

    needs: str = "inverse"
    moments: ClassVar[Mapping[str, str]] = {}
    inputs: bool = False
    matrices: bool = True
    head: bool = True
    rest: float = 1.0
    defaults: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def directions(
        self, prepared: Inverse, given: Sequence[Tensor], good: Tensor | None = None
    ) -> list[Tensor]:
        """Return directions for stacked gradients, and advance the moments.

        Args:
            prepared: of B blocks of one shape.
            given: weights (B, O, I) and perhaps biases (B, O); for units one tensor (k, U).
            good: a flag on the device; where it is False, the moments stay as they were.
        """

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({fields})"


def advance(moment: Tensor, new: Tensor, weight: float, good: Tensor | None) -> None:
    """Set moment ← moment + weight·(new − moment), unless the flag on the device is False."""
    lerp_unless(None if good is None else (~good).float(), [moment], [new], weight)


class Natural(Rule):
    r"""F̂⁻¹g: steepest descent for the length √(xᵀF̂x), with every parameter that has a block.

    `needs` says how: by "inverse" sides, in an "eigenbasis", or by solving with "factors" that
    serve one step.
    """

    matrices = False
    defaults: ClassVar = {
        "lr": 0.1,
        "fisher": "mc",
        "damping": 1e-3,
        "momentum": 0.9,
        "kl_clip": 1e-3,
        "ema": 0.95,
        "statistics_every": 10,
        "invert_every": 100,
    }

    def __init__(self, needs: str = "inverse") -> None:
        self.needs = needs

    def directions(
        self, prepared: Inverse, given: Sequence[Tensor], good: Tensor | None = None
    ) -> list[Tensor]:
        return apply_inverse(prepared, given)


class Eigenbasis(Rule):
    r"""Adam's step for the coordinates in which K-FAC's factors R and C are diagonal:

        g = Uᵀ G W,   m ← β₁m + (1 − β₁)g,   v ← β₂v + (1 − β₂)g²,   Δ = U (m̂/√v̂) Wᵀ,

    with U, W the eigenbases of R = mean δδᵀ, of the loss's own cotangents, and C = mean aaᵀ. When
    they turn, m turns with them, and v by the squares of the turns, as if coordinates were
    uncorrelated. Rotations of a layer's inputs and outputs are not noticed. To √v̂
    the round-off of a coordinate is added, so that directions without a gradient stay at rest.
    First bases of large sides are divided over the first steps; until then AdamW moves a matrix.

    Args:
        betas: the weights of the past in m and v.
        eps: what is added to √v̂.
        head: whether the output layer follows too.
    """

    needs = "basis"
    moments: ClassVar = {"first": "entries", "second": "entries"}
    defaults: ClassVar = {
        "lr": 3e-3,
        "fisher": "empirical",
        "ema": 0.95,
        "statistics_every": 10,
        "invert_every": 10,
    }

    def __init__(
        self, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, *, head: bool = True
    ) -> None:
        self.betas, self.eps, self.head = betas, eps, head

    def directions(
        self, prepared: Inverse, given: Sequence[Tensor], good: Tensor | None = None
    ) -> list[Tensor]:
        first, second, steps = prepared.first, prepared.second, prepared.steps
        assert first is not None
        assert second is not None
        assert steps is not None
        basis, (past, longer) = (prepared.left, prepared.right), self.betas
        g = rotate(given[0], *basis)
        steps += 1 if good is None else good
        advance(first, g, 1 - past, good)
        advance(second, g.square(), 1 - longer, good)
        c1, c2 = ((1 - beta**steps)[:, None, None] for beta in self.betas)
        bases = [side.dtype for side in basis if side is not None]
        precision = max((torch.finfo(dtype).eps for dtype in bases), default=0.0)
        noise = _ROUND_OFF * precision * second.mean((1, 2), keepdim=True).sqrt()
        d = first / second.sqrt().add_(self.eps * c2.sqrt() + noise)
        return [rotate(d, *basis, back=True, by=c2.sqrt() / c1)]


class Spectral(Rule):
    r"""All singular directions of the whitened momentum alike:

        X = M (C + λ tr(C)/n)^(-½),    U = polar(X),    Δ = D U,

    with Nesterov's momentum M of the gradient and C = mean aaᵀ of the inputs. D gives all rows one
    length, in proportion to ‖M‖ over the running mean of the gradients' size: steps are long where
    gradients agree, as Adam's are. Those of noise alone have entries of 0.2 on average, so that
    AdamW's learning rates carry over. C comes from the forward pass: there is no second
    backward pass, and no output side. A weight with three times as many rows as columns is taken
    for three matrices: fused queries, keys and values.

    Args:
        momentum: the weight of the past in M.
        adapt: the weight of the past in the mean squares of the gradient.
        head: whether the output layer follows too.
        rest: the share of the learning rate for parameters that follow AdamW.
    """

    needs = "root"
    moments: ClassVar = {"first": "entries", "second": "rows"}
    inputs = True
    head = False
    defaults: ClassVar = {
        "lr": 6e-3,
        "damping": 0.2,
        "ema": 0.8,
        "statistics_every": 10,
        "invert_every": 20,
    }

    def __init__(
        self,
        momentum: float = 0.9,
        adapt: float = 0.95,
        *,
        head: bool = False,
        rest: float = 0.5,
    ) -> None:
        self.momentum, self.adapt, self.head, self.rest = momentum, adapt, head, rest

    def directions(
        self, prepared: Inverse, given: Sequence[Tensor], good: Tensor | None = None
    ) -> list[Tensor]:
        (g,) = given
        first, second = prepared.first, prepared.second
        assert first is not None
        assert second is not None
        advance(first, g, 1 - self.momentum, good)
        advance(second, g.square().mean(2, keepdim=True), 1 - self.adapt, good)
        m = torch.lerp(g, first, self.momentum)
        x = self.whitened(m, prepared)
        count, rows, columns = x.shape
        parts = 3 if rows == 3 * columns else 1
        u = polar(x.reshape(count * parts, rows // parts, columns)).view(x.shape)
        lengths = torch.linalg.vector_norm(u, dim=2, keepdim=True, dtype=g.dtype)
        tiny = torch.finfo(g.dtype).tiny
        past = second.mean(1, keepdim=True).clamp(min=tiny)
        agreement = (m.square().mean((1, 2), keepdim=True) / past).sqrt()
        scale = _RMS * sqrt(columns) * agreement / lengths.clamp(min=_LEAST)
        return [u.to(g.dtype).mul_(scale)]

    def whitened(self, m: Tensor, prepared: Inverse) -> Tensor:
        """Return M (C + λ tr(C)/n)^(-½)."""
        right = prepared.right
        assert right is not None
        if factor_matrix.is_diagonal(right):
            return m * right[:, None]
        return torch.bmm(to_half(m, right)[0], right)
