"""The tangent space of the orbits, and the vectors orthogonal to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..._core.space import ParameterSpace
from ...grams import Gram
from ...solvers import ConjugateGradient
from ..actions.scaling import Action

_BLOCKS = 2**27  # entries of the generators of a component whose triangle is formed
_WIDE = 4096  # and how many of them


class Orbits:
    """Zᵀ of some actions at w: products with it, and the projection onto its range.

    Actions that move different parameters are orthogonal, so each component is treated by itself:
    from a triangle R with RᵀR = ZZᵀ, put together parameter by parameter, where that is small; by
    conjugate gradients on ZZᵀ elsewhere.
    """

    def __init__(self, actions: Sequence[Action], params: Mapping[str, Tensor]) -> None:
        self.space = ParameterSpace(params)
        self.params = {n: w.detach().to(self.space.dtype) for n, w in params.items()}
        self.components = tuple(_components(actions))

    def horizontal(self, v: Tensor | Mapping[str, Tensor]) -> Tensor:
        """v less its part along the orbits."""
        flat = self._flat(v)
        return flat - self.vertical(flat)

    def vertical(self, v: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Zᵀ(ZZᵀ)⁺Z v, (p,)."""
        pieces = self.space.split(self._flat(v))
        out = {n: torch.zeros_like(x) for n, x in pieces.items()}
        for actions in self.components:
            solve = self._solved if self.blocked(actions) else self._iterated
            out.update(solve(actions, pieces))
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

    def blocked(self, actions: Sequence[Action]) -> bool:
        """Whether the triangle of a component can be formed."""
        entries = [a.dimension * sum(self.params[n].numel() for n in a.names) for a in actions]
        return sum(entries) <= _BLOCKS and sum(a.dimension for a in actions) <= _WIDE

    def triangle(self, actions: Sequence[Action]) -> tuple[Tensor, Tensor]:
        """R (·, k) with RᵀR = DZZᵀD, and D (k,): generators of length 1."""
        k = sum(a.dimension for a in actions)
        blocks: dict[str, list[tuple[int, Tensor]]] = {}
        start, squares = 0, self.space.zeros(k)
        for action in actions:
            for n, z in action.generators(self.params).items():
                flat = z.reshape(action.dimension, -1)
                squares[start : start + action.dimension] += flat.square().sum(1)
                blocks.setdefault(n, []).append((start, flat))
            start += action.dimension
        inverse = torch.where(squares > 0, squares, 1.0).rsqrt()
        rows = []
        for found in blocks.values():
            z = torch.cat([flat for _, flat in found])
            at = torch.cat([torch.arange(s, s + len(f), device=z.device) for s, f in found])
            r = torch.linalg.qr(z.mT * inverse[at], mode="r")[1]
            rows.append(self.space.zeros(len(r), k).index_copy_(1, at, r))
        return torch.linalg.qr(torch.cat(rows), mode="r")[1], inverse

    def _solved(self, actions: Sequence[Action], v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """ZᵀD(DZZᵀD)⁺DZ v; a second time on what is left, since ZZᵀ squares the condition."""
        r, inverse = self.triangle(actions)
        _, sigma, vt = torch.linalg.svd(r, full_matrices=False)
        vt = vt[sigma > max(r.shape) * torch.finfo(r.dtype).eps * sigma[0]]
        weights = sigma[: len(vt)].square().reciprocal()
        names = _names(actions)
        left, part = {n: v[n] for n in names}, {n: torch.zeros_like(v[n]) for n in names}
        for _ in range(2):
            c = vt.mT @ (weights * (vt @ (inverse * self.pair(actions, left))))
            move = self.move(actions, inverse * c)
            part = {n: part[n] + move[n] for n in names}
            left = {n: v[n] - part[n] for n in names}
        return part

    def _iterated(self, actions: Sequence[Action], v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Zᵀc with ZZᵀc = Z v by preconditioned conjugate gradients; consistent, so c exists."""
        gram = GeneratorGram(self, actions)
        inverse = 1 / gram.estimate_diagonal()
        solver = ConjugateGradient(0.0, tol=1e-14, preconditioner=lambda c: inverse * c)
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


class GeneratorGram(Gram):
    """ZZᵀ (k, k) of a component, by products."""

    def __init__(self, orbits: Orbits, actions: Sequence[Action]) -> None:
        self._orbits, self._actions = orbits, actions
        self.size = self.count = sum(a.dimension for a in actions)
        self.dtype, self.device = orbits.space.dtype, orbits.space.device

    def matvec(self, v: Tensor) -> Tensor:
        return self._orbits.pair(self._actions, self._orbits.move(self._actions, v))

    def estimate_diagonal(self) -> Tensor:
        """The mean of (ZZᵀs)∘s over random signs s; 1 where that is zero."""
        generator = torch.Generator().manual_seed(3)
        total = self._orbits.space.zeros(self.size)
        for _ in range(8):
            signs = torch.randint(0, 2, (self.size,), generator=generator).to(total) * 2 - 1
            total += self.matvec(signs) * signs
        return torch.where(total != 0, total.abs(), 1.0)


def _names(actions: Sequence[Action]) -> list[str]:
    return list(dict.fromkeys(n for a in actions for n in a.names))


def _components(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Actions that are connected by parameters they both move."""
    groups: list[tuple[set[str], list[Action]]] = []
    for action in actions:
        names, members = set(action.names), [action]
        apart = []
        for other, theirs in groups:
            if other & names:
                names |= other
                members = theirs + members
            else:
                apart.append((other, theirs))
        groups = [*apart, (names, members)]
    return (members for _, members in groups)
