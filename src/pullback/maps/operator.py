"""Differential operators applied to a network, at many points, and their integrals.

    residuals   (params) ↦ √q · F(x, u, ∂u, …)
    integral    (params) ↦ √w (Σᵢ qᵢ f(xᵢ, u, ∂u, …) − v), one number

The network's derivatives in its inputs are carried forward as a jet, and residuals of different
points do not share anything but parameters. So one reverse pass per equation gives the cotangents
δ at the outputs of every linear layer for all points, and the rows of J are Σ_t δ_t ⊗ ā_t with the
jet's channels t as the sharing axis: the homogeneous coordinate of ā is 1 at the value and 0 above.
The Jacobian of an integral is one row, qᵀJ of the integrand: the reverse pass of a gradient.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.space import relative_tolerance
from .base import Covered, Linearization, Map, Pulled
from .jets import Jet, Scheme, Tape, Unsupported, differentiate_nested
from .jets.jet import Deltas, LinearUse, should_loop_over_features, write_rows
from .layers import AffineBlock, Block, RowsBlock
from .layers.registry import join_uses
from .objective import FunctionLinearization

#: (params, x) ↦ u(x), where x is a tensor or a jet
Network = Callable[[dict[str, Tensor], Any], Any]
#: (channels (T, S, N, m), params) ↦ F (N, R)
Operator = Callable[[Any, dict[str, Tensor]], Tensor]


class Channels:
    """A jet's channels, indexed as a tensor (T, S, N, m); only channels that are read are computed.

    `points` is (S, N).
    """

    def __init__(self, jet: Jet, points: Sequence[int]) -> None:
        self._jet = jet
        self._points = points

    def __getitem__(self, index: Any) -> Tensor:
        if not isinstance(index, tuple):
            index = (index,)
        channel = index[0]
        if not isinstance(channel, int):
            return self._jet.stack_channels().unflatten(1, self._points)[index]
        values = self._jet.channel(channel % len(self._jet.scheme)).unflatten(0, self._points)
        return values[index[1:]]


#: entries of A up to which it is formed as one matrix: 32 MiB in float64. Larger ones stay in the
#: factors of the layers.
_SMALL = 2**22
_REFUSALS = (TypeError, AttributeError, AssertionError, ValueError, IndexError)


class OperatorMap(Map):
    """z = √q · F(jet of the network at x): (N, R).

    Args:
        network: (params, x) ↦ values (B, m) at points (B, d).
        x: (S, N, d): F sees the network at S positions for each of N samples (S = 2 for
            periodic conditions, else 1).
        scheme: the derivatives that F needs.
        operator: F, of channels (T, S, N, m) and the parameters.
        weights: q, (N,).
    """

    def __init__(
        self, network: Network, x: Tensor, scheme: Scheme, operator: Operator, weights: Tensor
    ) -> None:
        self.network = network
        self.x = x
        self.scheme = scheme
        self.operator = operator
        self._weights = weights
        self._root = weights.sqrt()[:, None]
        self._coordinates = Jet.input(x.flatten(0, 1), scheme)
        self._checked = False
        #: why the derivatives are nested instead of carried forward, or empty
        self.nested_because = ""

    def scale(self, factors: Tensor) -> None:
        """Multiply the original weights by factors (N,) from now on."""
        self._root = (self._weights * factors).sqrt()[:, None]

    def channels(self, params: dict[str, Tensor], tape: Tape | None = None) -> Tensor | Channels:
        """Return the network's jet, (T, S, N, m); channels are computed when they are read."""
        if not self.nested_because:
            try:
                out = self.network(params, self._coordinates.record_on(tape))
                if not isinstance(out, Jet):
                    raise Unsupported("an output that does not depend on the input")
                return Channels(out.expand_channels(), self.x.shape[:2])
            except Unsupported as missing:
                self.nested_because = f"jets have no rule for {missing}"
            except _REFUSALS as error:  # of what is no tensor: nested derivatives say if not
                self.nested_because = f"the network does not take jets ({error})"
        points = self.x.flatten(0, 1)
        out = differentiate_nested(lambda x: self.network(params, x), points, self.scheme)
        return out.unflatten(1, self.x.shape[:2])

    def __call__(self, params: Mapping[str, Tensor], tape: Tape | None = None) -> Tensor:
        """z: (N, R)."""
        params = dict(params)
        try:
            return self._root * self.operator(self.channels(params, tape), params)
        except Unsupported as missing:  # by a channel that is computed only now
            self.nested_because = f"jets have no rule for {missing}"
            return self._root * self.operator(self.channels(params), params)

    def linearize(self, params: Mapping[str, Tensor]) -> FunctionLinearization:
        if not self.nested_because:
            linear = JetLinearization(self, params)
            if not self.nested_because:  # the evaluation may have met an operation without rule
                if not self._checked:
                    self._check(linear)
                return linear
        return FunctionLinearization(self, params)

    def _check(self, linear: JetLinearization) -> None:
        """Raise unless the rows of each point are its own and add up to autograd's gradient.

        It runs once for each map.
        """
        self._checked = True
        u = torch.ones_like(linear.value)
        u[::2] = 0
        gradient = FunctionLinearization.vjp(linear, u)
        if not bool(gradient.any()) and not bool(linear.jvp(torch.ones_like(gradient)).any()):
            raise PullbackError(
                "A residual does not depend on the parameters",
                "its gradient vanishes at every point",
                "Leave out detach, sign, comparisons and rounding of the field; scale coordinates "
                "far from [-1, 1], where a network is flat: Rescaled(network, domain) for a PDE",
            )
        coupling = linear.measure_coupling(u)
        noise = 1e3 * torch.finfo(gradient.dtype).eps * coupling.scale
        limit = relative_tolerance(gradient.dtype) * gradient.norm() + noise
        has_other_gradient = bool((linear.vjp(u) - gradient).norm() > limit)
        if has_other_gradient or coupling.is_coupled:
            raise PullbackError(
                "The network's value at one point depends on other points",
                "so it has no derivatives at a point",
                "Evaluate each point by itself: no statistics of the batch, no network.train()",
            )


class LayerUse(NamedTuple):
    """One use of a linear layer with its cotangents."""

    use: LinearUse
    deltas: Deltas


@dataclass(frozen=True)
class _Coupling:
    """How the points of a batch depend on each other."""

    #: Σ ‖δ‖‖ā‖ over the layers: round-off in the rows is relative to it
    scale: float
    #: points with covector 0 have cotangents at a layer, so others depend on them
    is_coupled: bool


@dataclass(frozen=True)
class _LayerUses:
    """The uses of one linear layer, each with its cotangents."""

    weight: str | None
    bias: str | None
    uses: list[LayerUse]

    @property
    def names(self) -> list[str]:
        return [name for name in (self.weight, self.bias) if name is not None]


class JetLinearization(FunctionLinearization):
    """J from the recorded linear layers; parameters used elsewhere by forward-mode columns."""

    structured = True

    def __init__(self, source: OperatorMap, params: Mapping[str, Tensor]) -> None:
        self._map = source
        super().__init__(source, params)
        largest = 0
        for use in self._uses:
            largest = max(largest, sum(x.numel() for x in use.output.tensors()))
        self.footprint = max(16 * self.value.numel(), 8 * largest)

    def _evaluate(self) -> Tensor:
        self._leaves = {n: p.clone().requires_grad_() for n, p in self._point.items()}
        names = {id(leaf): n for n, leaf in self._leaves.items()}
        tape = Tape(names, prod(self._map.x.shape[:2]))
        with torch.enable_grad():
            self._graph = self._map(self._leaves, tape)
        self._uses = tape.uses
        tape.uses = []  # jets refer to the tape: the cycle would keep the graph until a collection
        return self._graph.detach().to(self.space.dtype)

    def _pull_to_layers(self, u: Tensor) -> tuple[list[list[Tensor]], set[str]]:
        """Return the cotangents (S·N, …, O) of each layer's output channels.

        The second result is the set of parameters that the covector reaches outside of layers.
        """
        outputs: list[Tensor] = []
        for use in self._uses:
            outputs.extend(use.output.tensors())
        targets = outputs + list(self._leaves.values())
        gradients: Sequence[Tensor | None] = [None] * len(targets)
        if self._graph.requires_grad:
            gradients = torch.autograd.grad(
                self._graph, targets, u.to(self._graph.dtype), retain_graph=True, allow_unused=True
            )
        remaining = iter(gradients)
        deltas = [_split_channels(use, remaining) for use in self._uses]
        elsewhere = {name for name, g in zip(self._leaves, remaining, strict=True) if g is not None}
        return deltas, elsewhere

    def measure_coupling(self, u: Tensor) -> _Coupling:
        """Return how far cotangents of the covectors u reach points whose covector is 0."""
        silent = (u == 0).all(1)
        scale = 0.0
        is_coupled = False
        for use, channels in zip(self._uses, self._pull_to_layers(u)[0], strict=True):
            delta = torch.stack(channels).unflatten(1, self._map.x.shape[:2])  # (T, S, N, …, O)
            scale += float(delta.norm() * torch.stack(use.channels).norm())
            limit = relative_tolerance(delta.dtype) * delta.norm()
            is_coupled |= bool(delta[:, :, silent].norm() > limit)
        return _Coupling(scale, is_coupled)

    def pullback(self, covectors: Tensor) -> Pulled:
        entries = self.value.shape[0] * covectors.shape[0] * self.space.size
        if entries <= _SMALL:
            return self._pull_matrix(covectors)
        return self.pullback_factored(covectors)

    def pullback_factored(self, covectors: Tensor) -> Pulled:
        layers, others = self._group_by_layer(covectors)
        blocks: list[Block] = []
        coverage = []
        for layer in layers:
            block = self._form_block(layer)
            blocks.append(block)
            coverage += _cover(layer.names, block.route)
        if others:
            rows = self._form_rows(covectors, others)
            blocks.append(RowsBlock(rows))
            coverage += _cover_others(rows)
        shape = (self.value.shape[0], covectors.shape[0])
        return Pulled(self.space, shape, blocks, coverage)

    def _pull_matrix(self, covectors: Tensor) -> Pulled:
        """Return the covectors pulled back as one matrix A."""
        layers, others = self._group_by_layer(covectors)
        shape = (self.value.shape[0], covectors.shape[0])
        matrix = self.space.zeros(*shape, self.space.size)
        index = self.space.slices()
        rows: dict[str, Tensor] = {}
        coverage = []
        for layer in layers:
            if not self._write_layer_rows(layer, matrix):
                rows.update(self._form_block(layer).rows())
            coverage += _cover(layer.names, "rows")
        if others:
            other_rows = self._form_rows(covectors, others)
            rows.update(other_rows)
            coverage += _cover_others(other_rows)
        for name, values in rows.items():
            matrix[..., index[name]] = values
        return Pulled.of_rows(self.space, shape, matrix.flatten(0, 1), coverage)

    def _form_rows(self, covectors: Tensor, names: set[str]) -> dict[str, Tensor]:
        """Return the rows (N, R, numel) of parameters that are not the weight of one layer."""
        columns = self.columns(sorted(names))
        return {name: self.contract(covectors, column) for name, column in columns.items()}

    def _group_by_layer(self, covectors: Tensor) -> tuple[list[_LayerUses], set[str]]:
        """Return the uses of each layer, and the parameters of no single layer.

        These are parameters that several layers share, or that are used outside of layers.
        """
        passes = [self._pull_to_layers(u) for u in covectors]
        others: set[str] = set().union(*(elsewhere for _, elsewhere in passes))
        cotangents = zip(*(deltas for deltas, _ in passes), strict=True)
        groups: dict[tuple[str | None, str | None], list[LayerUse]] = defaultdict(list)
        for use, deltas in zip(self._uses, cotangents, strict=True):
            groups[use.weight, use.bias].append(LayerUse(use, deltas))
        return _separate_shared(
            [_LayerUses(*names, uses) for names, uses in groups.items()], others
        )

    def _write_layer_rows(self, layer: _LayerUses, matrix: Tensor) -> bool:
        """Write a layer's rows into A and return True, if a loop over its features is faster."""
        sites = len(self._map.x)
        if len(layer.uses) > 1 or not should_loop_over_features(*layer.uses[0], sites):
            return False
        index = self.space.slices()
        weight_rows: Tensor | None = None
        bias_rows: Tensor | None = None
        if layer.weight is not None:
            weight_rows = matrix[..., index[layer.weight]]
        if layer.bias is not None:
            bias_rows = matrix[..., index[layer.bias]]
        write_rows(*layer.uses[0], sites, weight_rows, bias_rows)
        return True

    def _form_block(self, layer: _LayerUses) -> AffineBlock:
        """Return the layer's block, with channels and sites of all uses along one sharing axis."""
        inputs = []
        deltas = []
        heights = []
        for use, by_covector in layer.uses:
            x = self._arrange_by_sample(use.channels)[:, None]
            inputs.append(x)
            cotangents = [self._arrange_by_sample(d)[:, None, None] for d in by_covector]
            deltas.append(join_uses(cotangents, 1))
            height = x.new_zeros(x.shape[2])
            height[: len(height) // len(use.channels)] = 1  # the value's channel comes first
            heights.append(height)
        return AffineBlock(
            layer.weight,
            layer.bias,
            join_uses(inputs, 2),
            join_uses(deltas, 3),
            join_uses(heights, 0),
        )

    def _arrange_by_sample(self, channels: Sequence[Tensor]) -> Tensor:
        """Return channels (S·N, …, I) side by side, (N, T·S·positions, I)."""
        by_sample = [x.unflatten(0, self._map.x.shape[:2]).transpose(0, 1) for x in channels]
        return torch.stack(by_sample, 1).flatten(1, -2).to(self.space.dtype)

    rows = Linearization.rows

    def vjp(self, u: Tensor) -> Tensor:
        ones = torch.ones(self.value.shape[0], 1, dtype=u.dtype, device=u.device)
        return self.pullback(u[None]).lift(ones)


def _separate_shared(
    candidates: Sequence[_LayerUses], others: set[str]
) -> tuple[list[_LayerUses], set[str]]:
    """Return the layers that share no parameter, and `others` with the parameters of the rest."""
    owners: Counter[str] = Counter()
    for layer in candidates:
        owners.update(layer.names)
    layers = []
    for layer in candidates:
        if any(name in others or owners[name] > 1 for name in layer.names):
            others.update(layer.names)
        else:
            layers.append(layer)
    return layers, others


def _split_channels(use: LinearUse, gradients: Iterator[Tensor | None]) -> list[Tensor]:
    """Return the cotangents of a layer's output channels, from the next gradients.

    Zeros of a channel that nothing depends on are one number, expanded.
    """
    channels: list[Tensor] = []
    for k, output in enumerate(use.output.tensors()):
        gradient = next(gradients)
        if gradient is None:
            gradient = output.new_zeros(()).expand_as(output)
        if k == 1 and use.output.computed_flags[0]:  # all first derivatives in one tensor
            channels.extend(gradient.unbind())
        else:
            channels.append(gradient)
    return channels


def _cover(names: Iterable[str], route: str) -> list[Covered]:
    """Return the coverage of a layer's parameters."""
    return [Covered(name, route, "linear layer of a jet") for name in names]


def _cover_others(names: Iterable[str]) -> list[Covered]:
    """Return the coverage of parameters that are not the weight of one layer."""
    return [Covered(name, "rows", "not the weight of one linear layer") for name in names]


class IntegralMap(Map):
    """z = √w (∫f − v): (1, R).

    Args:
        integrand: f at the quadrature's points, (N, R), unweighted.
        quadrature: q, (N,).
        value: v, what the integral should be.
        weight: w, of the square in the loss.
    """

    def __init__(
        self, integrand: OperatorMap, quadrature: Tensor, value: float, weight: float
    ) -> None:
        self.integrand = integrand
        self._value = value
        self._root = weight**0.5
        #: √w q
        self.weights = self._root * quadrature

    @property
    def nested_because(self) -> str:
        """Why the derivatives are nested instead of carried forward, or empty."""
        return self.integrand.nested_because

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """z: (1, R)."""
        return self.deviation(self.integrand(params))

    def deviation(self, f: Tensor) -> Tensor:
        """√w (Σ qᵢ fᵢ − v): (N, R) -> (1, R)."""
        return (self.weights @ f)[None] - self._root * self._value

    def linearize(self, params: Mapping[str, Tensor]) -> IntegralLinearization:
        return IntegralLinearization(self, params)


class IntegralLinearization(Linearization):
    """qᵀJ, where J is the integrand's."""

    def __init__(self, source: IntegralMap, params: Mapping[str, Tensor]) -> None:
        self._q = source.weights
        self._inner = source.integrand.linearize(params)
        self.space = self._inner.space
        self.structured = self._inner.structured
        self.footprint = self._inner.footprint
        self.value = source.deviation(self._inner.value)

    def jvp(self, v: Tensor) -> Tensor:
        return (self._q @ self._inner.jvp(v))[None]

    def vjp(self, u: Tensor) -> Tensor:
        return self._inner.vjp(self._q[:, None] * u)

    def pullback(self, covectors: Tensor) -> Pulled:
        matrix = torch.stack([self.vjp(u.reshape(self.value.shape)) for u in covectors])
        return Pulled.of_rows(self.space, (1, len(covectors)), matrix)
