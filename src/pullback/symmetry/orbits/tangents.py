"""The tangent space of the orbits, and the vectors orthogonal to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..._core.space import ParameterSpace
from ...grams import Operator
from ...solvers import ConjugateGradient
from ..actions.scaling import Action, connected

_LARGEST = 2**25  # entries of a component's generators that are decomposed


class Orbits:
    """Zᵀ of some actions at w: products with it, and the projection onto its range.

    Actions that move different parameters are orthogonal, so each component is treated by itself:
    by a singular value decomposition where it is small, by conjugate gradients on ZZᵀ elsewhere.
    """

    def __init__(self, actions: Sequence[Action], params: Mapping[str, Tensor]) -> None:
        self.space = ParameterSpace(params)
        self.params = {n: w.detach().to(self.space.dtype) for n, w in params.items()}
        #: actions that are connected by parameters they both move
        self.components = [
            [actions[i] for i in some] for some in connected(a.names for a in actions)
        ]

    def horizontal(self, v: Tensor | Mapping[str, Tensor]) -> Tensor:
        """v less its part along the orbits."""
        flat = self._flat(v)
        return flat - self.vertical(flat)

    def vertical(self, v: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Zᵀ(ZZᵀ)⁺Z v, (p,)."""
        pieces = self.space.split(self._flat(v))
        out = {n: torch.zeros_like(x) for n, x in pieces.items()}
        for actions in self.components:
            names, basis = _names(actions), self.basis(actions)
            if basis is None:
                out.update(self._iterated(actions, pieces))
                continue
            flat = torch.cat([pieces[n].flatten() for n in names])
            along = (basis.mT @ (basis @ flat)).split([pieces[n].numel() for n in names])
            out.update({n: x.view_as(pieces[n]) for n, x in zip(names, along, strict=True)})
        return self.space.flatten(out)

    def _flat(self, v: Tensor | Mapping[str, Tensor]) -> Tensor:
        flat = self.space.flatten(v) if isinstance(v, Mapping) else v
        if flat.shape != (self.space.size,):
            raise PullbackError(
                f"The vector has shape {tuple(flat.shape)}",
                f"the model has {self.space.size} parameters that require gradients",
                f"Pass ({self.space.size},) or a dict by name",
            )
        return flat.to(device=self.space.device, dtype=self.space.dtype)

    def basis(self, actions: Sequence[Action], rtol: float | None = None) -> Tensor | None:
        """Orthonormal rows that span the tangents of a component; None where that is too large.

        Generators of length 1 with singular values below rtol·σ_max count as dependent.
        """
        names, k = _names(actions), sum(a.dimension for a in actions)
        sizes = [self.params[n].numel() for n in names]
        if k * sum(sizes) > _LARGEST:
            return None
        rows = self.space.zeros(k, sum(sizes))
        pieces, start = dict(zip(names, rows.split(sizes, 1), strict=True)), 0
        for action in actions:
            for n, z in action.generators(self.params).items():
                pieces[n][start : start + action.dimension] = z.reshape(action.dimension, -1)
            start += action.dimension
        length = rows.norm(dim=1, keepdim=True)
        _, sigma, basis = torch.linalg.svd(
            rows / torch.where(length > 0, length, 1.0), full_matrices=False
        )
        cut = max(rows.shape) * torch.finfo(rows.dtype).eps if rtol is None else rtol
        return basis[sigma > cut * sigma[0]]

    def _iterated(self, actions: Sequence[Action], v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Zᵀc with ZZᵀc = Z v by preconditioned conjugate gradients; consistent, so c exists."""
        names, k = _names(actions), sum(a.dimension for a in actions)
        component = ParameterSpace({n: self.params[n] for n in names})
        gram = Operator(
            lambda c: component.flatten(self.move(actions, c)),
            lambda flat: self.pair(actions, component.split(flat)),
            (component.size, k),
            self.space.dtype,
            self.space.device,
        )
        # the mean of (ZZᵀs)∘s over random signs s estimates the diagonal
        signs = 2.0 * torch.randint(0, 2, (8, k), generator=torch.Generator().manual_seed(3)) - 1
        diagonal = torch.stack([gram.matvec(s) * s for s in signs.to(self.space.zeros(0))]).sum(0)
        scale = torch.where(diagonal != 0, diagonal.abs(), 1.0)
        solver = ConjugateGradient(0.0, tol=1e-14, preconditioner=lambda c: c / scale)
        return self.move(actions, solver.solve(gram, self.pair(actions, v)).x)

    def pair(self, actions: Sequence[Action], v: Mapping[str, Tensor]) -> Tensor:
        """Z v, (k,)."""
        return torch.cat([a.pairing(self.params, v) for a in actions])

    def move(self, actions: Sequence[Action], c: Tensor) -> dict[str, Tensor]:
        """Zᵀc, by name."""
        out = {n: torch.zeros_like(self.params[n]) for n in _names(actions)}
        for action, piece in zip(actions, c.split([a.dimension for a in actions]), strict=True):
            for n, t in action.tangent(self.params, piece).items():
                out[n] = out[n] + t
        return out


def _names(actions: Sequence[Action]) -> list[str]:
    return list(dict.fromkeys(n for a in actions for n in a.names))
