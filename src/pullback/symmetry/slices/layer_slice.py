r"""The paper's slice: all layers have the same norm.

    S = {|(A_1, b_1)| = … = |(A_{ℓ−1}, b_{ℓ−1})| = |A_ℓ|}

It meets every orbit of the *layer-wise* scalings once. The network restricted to it is still no
immersion: there is one scaling symmetry per hidden unit, and S cuts only one per hidden layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import exp, log

import scipy
import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError
from ..actions.scaling import Scaling
from .chains import Chain, chain, components
from .slice import Slice
from .units import wide


class EqualNorm(Slice):
    r"""Layers of equal norm, |(A_k, b_k)| = λ for all k; the last layer's bias does not count.

    Without biases the retraction is the paper's, w_k ← exp(mean_i log|w_i|) w_k/|w_k|. With biases
    the product of the factors must be 1 while b_k is multiplied by all those up to its layer,
    G_k = g_1…g_k. So λ is the root of G_ℓ(λ) = 1 in

        G_k = λ/√(|A_k|²/G²_{k−1} + |b_k|²),    G_0 = 1,

    which is strictly increasing in λ: one root, found from norms alone. (The printed retraction
    with biases multiplies b_k by one common factor too few from the third layer on, and changes
    the function.)

    Args:
        scalings: of units or of layers; units of a layer are merged.
        model: the module, or parameters by name.
        biases: whether biases count in the norms. Without them |A_1| = … = |A_ℓ|, whose
            retraction is closed: g_k = exp(mean_i log|A_i|)/|A_k|.
    """

    def __init__(
        self,
        scalings: Sequence[Scaling],
        model: nn.Module | Mapping[str, Tensor],
        biases: bool = True,
    ) -> None:
        super().__init__([s if s.units == 1 else s.merged() for s in scalings], model)
        self.biases = biases
        self.chains = [self._chain(part) for part in components(self.scalings)]

    def _chain(self, component: tuple[int, ...]) -> Chain:
        found = chain(self.scalings, component)
        if found is None:
            names = ", ".join(self.scalings[i].about for i in component)
            raise PullbackError(
                "There is no slice of equal norms",
                f"the layers of {names} are no chain: their norms cannot all be made equal",
                "Use symmetry.Balanced, which every network has",
            )
        return found

    def log_scales(self, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        first = params[self.units.names[0]]
        t = torch.zeros(self.units.total, dtype=wide(first), device=first.device)
        dead = torch.zeros(self.units.total, dtype=torch.bool, device=first.device)
        for found in self.chains:
            logs = self._log_norms(found, params)
            index = list(found.scalings)
            scales = _closed(logs) if not self.biases else _root(logs)
            if scales is None:
                dead[index] = True
            else:
                t[index] = torch.tensor(scales, dtype=t.dtype, device=t.device)
        return t, dead

    def constraint(self, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """log|w_k| − log|w_{k+1}| along every chain, 0 where a layer is zero."""
        given = self.params if params is None else params
        found = []
        for links in self.chains:
            logs = [_hypot(*pair) for pair in self._log_norms(links, given)]
            found += [a - b if min(a, b) > -torch.inf else 0.0 for a, b in pairwise(logs)]
        first = given[self.units.names[0]]
        return torch.tensor(found, dtype=wide(first), device=first.device)

    def _log_norms(self, links: Chain, params: Mapping[str, Tensor]) -> list[tuple[float, float]]:
        """(log|A_k|, log|b_k|) of each block in a unit of the chain's; what does not count is 0.

        The unit is the largest entry: logarithms are small on the slice, whatever its scale λ.
        """
        counted = {n for b in links.blocks for n in (b.names if self.biases else b.weights(params))}
        unit = max((largest(params[n]) for n in counted), default=0.0) or 1.0

        def log_of(names: Sequence[str]) -> float:
            return _hypot(*(log_norm(params[n], unit) for n in names if n in counted))

        return [(log_of(block.inner), log_of(block.outer)) for block in links.blocks]

    def _rows(self) -> Tensor:
        """N = rows·(w_p·): coefficients (k, parameters) of the constraints' gradients."""
        names = self.units.names
        first = self.params[names[0]]
        rows = []
        for links in self.chains:
            norms = []
            for block in links.blocks:
                counted = block.names if self.biases else block.weights(self.params)
                row = torch.tensor([float(n in counted) for n in names], dtype=wide(first))
                size = _hypot(*(log_norm(self.params[n]) for n in counted))
                norms.append((row * exp(-2 * size) if size > -torch.inf else 0 * row, size))
            for (a, one), (b, two) in pairwise(norms):
                alive = min(one, two) > -torch.inf
                rows.append(a - b if alive else 0 * a)
        return torch.stack(rows).to(first.device)

    def _normal(self, v: Mapping[str, Tensor]) -> Tensor:
        rows = self._rows()
        pairs = [
            torch.sum(self.params[n].detach().to(rows) * v[n].to(rows))
            if n in v
            else rows.new_zeros(())
            for n in self.units.names
        ]
        return rows @ torch.stack(pairs)

    def _conormal(self, a: Tensor) -> dict[str, Tensor]:
        coefficients = a @ self._rows()
        return {
            n: (self.params[n].detach().to(a) * c).to(self.params[n].dtype)
            for n, c in zip(self.units.names, coefficients, strict=True)
        }

    def _solve(self, rhs: Tensor, orbits: bool) -> Tensor:
        rows = self._rows()
        squares = torch.stack(
            [self.params[n].detach().to(rows).square().sum() for n in self.units.names]
        )
        right = rows
        if orbits:
            eye = torch.eye(self.units.total, dtype=rows.dtype, device=rows.device)
            right = torch.stack([part.log_factor(eye).reshape(-1) for part in self.units.parts], 1)
        return torch.linalg.pinv((rows * squares) @ right.mT) @ rhs


def largest(w: Tensor) -> float:
    """max |w_e|; raises where w is not finite."""
    top = float(w.detach().abs().amax()) if w.numel() else 0.0
    if not top < torch.inf:
        raise PullbackError(
            "A layer has no norm",
            "a parameter contains nan or inf",
            "Load a checkpoint, or lower the learning rate",
        )
    return top


def log_norm(w: Tensor, unit: float = 1.0) -> float:
    """log(|w|/unit), −inf for zeros; raises where w is not finite."""
    top = largest(w)
    if not top:
        return -torch.inf
    far = log(top / unit) if top / unit else log(top) - log(unit)
    return far + log(float(torch.linalg.vector_norm(w.detach().to(wide(w)) / top)))


def _closed(logs: Sequence[tuple[float, float]]) -> list[float] | None:
    """t_k = Σ_{i≤k} (mean log|A| − log|A_i|), k < ℓ."""
    norms = [_hypot(*pair) for pair in logs]
    if min(norms) == -torch.inf:
        return None
    mean, t = sum(norms) / len(norms), [0.0]
    for norm in norms[:-1]:
        t.append(t[-1] + mean - norm)
    return t[1:]


def _root(logs: Sequence[tuple[float, float]]) -> list[float] | None:
    """log G_k, k < ℓ, at the λ where G_ℓ = 1."""
    if all(outer == -torch.inf for _, outer in logs):
        return _closed(logs)
    if min(_hypot(*pair) for pair in logs) == -torch.inf:
        return None

    def climb(u: float) -> list[float]:
        out = [0.0]
        for inner, outer in logs:
            out.append(u - _hypot(inner - out[-1], outer))
        return out[1:]

    low = high = 0.0
    width = 1.0
    while climb(low)[-1] > 0:
        low, width = low - width, 2 * width
    while climb(high)[-1] < 0:
        high, width = high + width, 2 * width
    if low < high:
        low = scipy.optimize.brentq(lambda u: climb(u)[-1], low, high, xtol=1e-15)
    return climb(low)[:-1]


def _hypot(*logs: float) -> float:
    """log √(Σ e^{2x})."""
    top = max(logs, default=-torch.inf)
    if top == -torch.inf:
        return top
    return top + 0.5 * log(sum(exp(2 * (x - top)) for x in logs))
