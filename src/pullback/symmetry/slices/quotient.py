r"""The natural gradient on the quotient: G⁺∇L as a tangent of a slice.

The Gram G = AᵀA is singular along orbits. Restricted to T_wS with basis T it is TᵀAᵀAT, of full
rank where the symmetries explain the kernel of A, and its solution x = T(AT)⁺r moves the function
just as the Moore–Penrose one, A⁺r, does: they differ by a move along the orbit. On the balanced
slice they are the same, since A⁺r is orthogonal to the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._core.capture import plain
from ..._core.space import ParameterSpace
from ...optim import NaturalGradient
from .slice import Slice


def slice_direction(
    optimizer: NaturalGradient,
    slice: Slice,
    closure: Callable[[], Any] | None = None,
    *,
    objective: Any = None,
) -> Tensor:
    """The natural gradient in T_wS that moves the function as G⁺∇L does: (p,).

    Exact for undamped solvers; with damping λ it is (G + λ)⁻¹∇L that is lifted. The parameters
    stay where they are and should lie on the slice. To step on it, give the optimizer
    `retract=slice.retract`.

    Args:
        optimizer: whose `direction` is lifted; the answer has its order of parameters.
        slice: in the optimizer's model.
        closure: as for `NaturalGradient.direction`.
        objective: likewise.
    """
    solution = optimizer.direction(closure, objective=objective)
    names = {id(p): n for n, p in plain(optimizer.model).named_parameters()}
    space = ParameterSpace(
        {
            names[id(p)]: p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        }
    )
    return space.flatten(slice.lift(space.split(solution.x)))
