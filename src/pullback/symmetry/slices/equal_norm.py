r"""The paper's slice, layers of equal norm, and the chains of layers that have it.

Merged scalings e^{t_1}, …, e^{t_{ℓ−1}} of a chain act on its ℓ blocks (A_k, b_k): A_k lies between
the scalings k − 1 and k and is multiplied by e^{t_k − t_{k−1}}, b_k only leads into the k-th and is
multiplied by e^{t_k}. The last block has no b, and t_0 = t_ℓ = 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError, refuse_unknown
from ..actions.scaling import Scaling, connected
from .retraction import log_squares
from .slice import Balanced, Slice
from .units import ScalingUnits

SLICES = ("balanced", "layer-balanced", "equal-norm")


def make_slice(
    kind: str, scalings: Sequence[Scaling], model: nn.Module | Mapping[str, Tensor]
) -> Slice:
    """A slice by name: one of `SLICES`."""
    refuse_unknown("slice", kind, SLICES)
    if kind == "equal-norm":
        return EqualNorm(scalings, model)
    return Balanced(scalings if kind == "balanced" else [s.merged() for s in scalings], model)


def layer_slice(scalings: Sequence[Scaling]) -> str:
    """Equal norms where all layers stand in chains, else the balanced slice of layers."""
    chains = all(chain(scalings, part) for part in connected(s.names for s in scalings))
    return "equal-norm" if chains else "layer-balanced"


@dataclass(frozen=True)
class Chain:
    """Scalings by index, in order, and the names of each layer's parameters, one more."""

    scalings: tuple[int, ...]
    layers: tuple[tuple[str, ...], ...]


def layers_of(scalings: Sequence[Scaling]) -> list[tuple[tuple[str, ...], ...]]:
    """The names of each layer's parameters, for every component."""
    return [_layers(scalings, part) for part in connected(s.names for s in scalings)]


def _layers(scalings: Sequence[Scaling], component: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """What leads into each scaling, weights between two of them first; then what only leads out."""
    into, out = _sides(scalings, component)
    leads, entered = (set().union(*side.values()) for side in (out, into))
    found = [tuple(sorted(into[i], key=lambda n: n not in leads)) for i in component]
    last = [tuple(n for n in out[i] if n not in entered) for i in component]
    return (*found, *(names for names in last if names))


def chain(scalings: Sequence[Scaling], component: Sequence[int]) -> Chain | None:
    """The component as a chain, or None where it branches, or scales by other powers or in part."""
    into, out = _sides(scalings, component)
    legs = [leg for i in component for leg in scalings[i].legs]
    if any(abs(leg.power) != 1 or not leg.complete for leg in legs):
        return None
    after: dict[int, int | None] = {}
    for i in component:
        targets = {next((j for j in component if n in into[j]), None) for n in out[i]}
        if len(targets) != 1:
            return None
        after[i] = targets.pop()
    starts = set(component) - set(after.values())
    if len(starts) != 1 or len(set(after.values())) != len(component):
        return None
    order = [starts.pop()]
    while (following := after[order[-1]]) is not None:
        order.append(following)
    # a parameter inside must leave exactly one scaling
    left = [n for i in order for n in out[i]]
    if len(order) != len(component) or len(set(left)) != len(left):
        return None
    return Chain(tuple(order), _layers(scalings, order))


def _sides(
    scalings: Sequence[Scaling], component: Sequence[int]
) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    into = {i: [leg.name for leg in scalings[i].legs if leg.power > 0] for i in component}
    out = {i: [leg.name for leg in scalings[i].legs if leg.power < 0] for i in component}
    return into, out


class BlockNorms:
    r"""Norms of blocks of whole parameters along an orbit: imbalance −D log(R exp(log q + 2Bt)).

    Args:
        slice: with R (blocks, P), which adds up blocks, and D (U, blocks), their differences.
        params: by name, with squared norms q (P,).
    """

    near = torch.inf

    def __init__(self, slice: EqualNorm, params: Mapping[str, Tensor]) -> None:
        self.units: ScalingUnits = slice.units
        self._adds, self._differences = slice.adds, slice.differences
        self._twice = 2 * slice.units.powers
        logs, _ = log_squares(slice.units, params)
        self._logs = torch.stack([each.reshape(()) for each in logs])
        self.zeros = self._twice.new_zeros(slice.units.total)
        alive = torch.isfinite(self._log_sums(self.zeros))
        self.dead = torch.zeros_like(self.zeros, dtype=torch.bool)
        start = 0
        for links in slice.chains:
            end = start + len(links.layers)
            self.dead[list(links.scalings)] = ~alive[start:end].all()
            start = end

    def _log_sums(self, t: Tensor) -> Tensor:
        """log|w_k|² of the blocks, (blocks,); −inf for zeros."""
        logs = self._logs + self._twice @ t
        return torch.where(self._adds > 0, logs, -torch.inf).logsumexp(1)

    def imbalance(self, t: Tensor) -> Tensor:
        sums = self._log_sums(t)
        found = self._differences @ torch.where(torch.isfinite(sums), sums, 0.0)
        return torch.where(self.dead, 0.0, -found)

    def newton(self, t: Tensor, tolerance: float) -> Tensor:
        logs = self._logs + self._twice @ t
        shares = torch.where(self._adds > 0, logs, -torch.inf).softmax(1).nan_to_num(0.0)
        jacobian = self._differences @ (shares @ self._twice)
        jacobian = torch.where(self.dead[:, None], 0.0, jacobian)
        return torch.linalg.pinv(jacobian) @ self.imbalance(t)

    def rows(self) -> Tensor:
        """Coefficients (U, P) of the constraints' gradients, times a common factor: N = rows·w."""
        inverse = (-self._log_sums(self.zeros)).exp()
        rows = self._differences @ (self._adds * inverse[:, None]).nan_to_num(0.0, 0.0, 0.0)
        return torch.where(self.dead[:, None], 0.0, rows)


class EqualNorm(Slice):
    r"""Layers of equal norm, |(A_k, b_k)| = λ for all k; the last layer's bias does not count.

        S = {|(A_1, b_1)| = … = |(A_{ℓ−1}, b_{ℓ−1})| = |A_ℓ|}

    It meets every orbit of the *layer-wise* scalings once. The network restricted to it is still no
    immersion: there is one scaling symmetry per hidden unit, and S cuts only one per hidden layer.

    Without biases the retraction is the paper's, w_k ← exp(mean_i log|w_i|) w_k/|w_k|: Newton's
    method ends after one step, since the constraints are linear in t. (The printed retraction
    with biases multiplies b_k by one common factor too few from the third layer on, and changes
    the function.)

    Args:
        scalings: of units or of layers; units of a layer are merged.
        model: the module, or parameters by name.
    """

    def __init__(
        self, scalings: Sequence[Scaling], model: nn.Module | Mapping[str, Tensor]
    ) -> None:
        super().__init__([s if s.units == 1 else s.merged() for s in scalings], model)
        self.chains = [self._chain(part) for part in connected(s.names for s in self.scalings)]
        #: the parameters that count in each norm
        self.blocks = [names for links in self.chains for names in links.layers]
        powers = self.units.powers
        self.adds = powers.new_zeros(len(self.blocks), len(powers))
        for k, names in enumerate(self.blocks):
            self.adds[k, [self.units.names.index(n) for n in names]] = 1
        self.differences = powers.new_zeros(self.units.total, len(self.blocks))
        k = 0
        for links in self.chains:
            for i in links.scalings:
                self.differences[i, k], self.differences[i, k + 1] = 1, -1
                k += 1
            k += 1

    def _chain(self, component: Sequence[int]) -> Chain:
        found = chain(self.scalings, component)
        if found is None:
            names = ", ".join(self.scalings[i].about for i in component)
            raise PullbackError(
                "There is no slice of equal norms",
                f"the layers of {names} are no chain: their norms cannot all be made equal",
                "Use symmetry.Balanced, which every network has",
            )
        return found

    def norms(self, params: Mapping[str, Tensor]) -> BlockNorms:
        return BlockNorms(self, params)

    def _normal(self, v: Mapping[str, Tensor]) -> Tensor:
        rows = self.norms(self.params).rows()
        pairs = rows.new_zeros(len(self.units.names))
        for i, n in enumerate(self.units.names):
            if n in v:
                pairs[i] = torch.sum(self.params[n].detach().to(rows) * v[n].to(rows))
        return rows @ pairs

    def _conormal(self, a: Tensor) -> dict[str, Tensor]:
        coefficients = a @ self.norms(self.params).rows()
        return {
            n: (self.params[n].detach().to(a) * c).to(self.params[n].dtype)
            for n, c in zip(self.units.names, coefficients, strict=True)
        }

    def _solve(self, rhs: Tensor, orbits: bool) -> Tensor:
        rows = self.norms(self.params).rows()
        found = [self.params[n].detach().to(rows).square().sum() for n in self.units.names]
        right = self.units.powers if orbits else rows.mT
        return torch.linalg.pinv((rows * torch.stack(found)) @ right) @ rhs
