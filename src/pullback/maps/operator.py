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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.space import relative_tolerance
from .base import Covered, Linearization, Map, Pulled
from .jets import Jet, Scheme, Tape, Unsupported, nested
from .jets.jet import Deltas, Used, prefers_loop, write_rows
from .layers import AffineBlock, Block, RowsBlock
from .layers.registry import join_uses
from .objective import FunctionLinearization

#: (params, x) ↦ u(x), where x is a tensor or a jet
Network = Callable[[dict[str, Tensor], Any], Any]
#: (channels (T, S, N, m), params) ↦ F (N, R)
Operator = Callable[[Any, dict[str, Tensor]], Tensor]


class Channels:
    """A jet's channels, indexed as a tensor (T, S, N, m): what no index takes is not computed."""

    def __init__(self, jet: Jet, positions: Sequence[int]) -> None:
        self._jet = jet
        self._places = positions

    def __getitem__(self, index: Any) -> Tensor:
        at, *rest = index if isinstance(index, tuple) else (index,)
        if not isinstance(at, int):
            return self._jet.stacked().unflatten(1, self._places)[index]
        channel = self._jet.channel(at % len(self._jet.scheme)).unflatten(0, self._places)
        if rest:
            return channel[tuple(rest)]
        return channel


_SMALL = 2**22  # entries of A up to which it is formed at once
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
        """Multiply the given weights by factors (N,) from now on."""
        self._root = (self._weights * factors).sqrt()[:, None]

    def channels(self, params: dict[str, Tensor], tape: Tape | None = None) -> Tensor | Channels:
        """The network's jet, (T, S, N, m), each channel computed when it is taken."""
        if not self.nested_because:
            try:
                out = self.network(params, self._coordinates.taped(tape))
                if not isinstance(out, Jet):
                    raise Unsupported("an output that does not depend on the input")
                return Channels(out.full(), self.x.shape[:2])
            except Unsupported as missing:
                self.nested_because = f"jets have no rule for {missing}"
            except _REFUSALS as error:  # of what is no tensor: nested derivatives say if not
                self.nested_because = f"the network does not take jets ({error})"
        points = self.x.flatten(0, 1)
        out = nested(lambda x: self.network(params, x), points, self.scheme)
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
            if not self.nested_because:  # which the first attempt may find out
                if not self._checked:
                    self._check(linear)
                return linear
        return FunctionLinearization(self, params)

    def _check(self, linear: JetLinearization) -> None:
        """Once: are the rows of each point its own, and do they make up autograd's gradient?"""
        self._checked = True
        u = torch.ones_like(linear.value)
        u[::2] = 0
        want = FunctionLinearization.vjp(linear, u)
        got = linear.vjp(u)
        if not bool(want.any()) and not bool(linear.jvp(torch.ones_like(want)).any()):
            raise PullbackError(
                "A residual does not depend on the parameters",
                "its gradient vanishes at every point",
                "Leave out detach, sign, comparisons and rounding of the field",
            )
        size, leak = linear.coupling(u)
        noise = 1e3 * torch.finfo(want.dtype).eps * size
        off = (got - want).norm() > relative_tolerance(want.dtype) * want.norm() + noise
        if bool(off) or leak:
            raise PullbackError(
                "The network's value at one point depends on other points",
                "so it has no derivatives at a point",
                "Evaluate each point by itself: no statistics of the batch, no network.train()",
            )


@dataclass(frozen=True)
class _LayerUses:
    """The uses of one linear layer, each with its cotangents."""

    weight: str | None
    bias: str | None
    uses: list[tuple[Used, Deltas]]

    @property
    def names(self) -> list[str]:
        return [name for name in (self.weight, self.bias) if name is not None]


class JetLinearization(FunctionLinearization):
    """J from the recorded linear layers; parameters used elsewhere by forward-mode columns."""

    structured = True

    def __init__(self, source: OperatorMap, params: Mapping[str, Tensor]) -> None:
        self._map = source
        super().__init__(source, params)
        widest = max((sum(x.numel() for x in u.output.tensors()) for u in self._uses), default=0)
        self.footprint = max(16 * self.value.numel(), 8 * widest)

    def _evaluate(self) -> Tensor:
        self._leaves = {n: p.clone().requires_grad_() for n, p in self._point.items()}
        names = {id(leaf): n for n, leaf in self._leaves.items()}
        tape = Tape(names, prod(self._map.x.shape[:2]))
        with torch.enable_grad():
            self._graph = self._map(self._leaves, tape)
        self._uses = tape.uses
        return self._graph.detach().to(self.space.dtype)

    def _reverse(self, u: Tensor) -> tuple[list[list[Tensor]], set[str]]:
        """Cotangents (S·N, …, O) of the recorded outputs' channels; parameters reached elsewhere.

        Those of channels that nothing depends on are zeros held once.
        """
        outputs = [x for used in self._uses for x in used.output.tensors()]
        edges = outputs + list(self._leaves.values())
        found: Sequence[Tensor | None] = [None] * len(edges)
        if self._graph.requires_grad:
            found = torch.autograd.grad(
                self._graph, edges, u.to(self._graph.dtype), retain_graph=True, allow_unused=True
            )
        deltas = []
        at = 0
        for used in self._uses:
            pieces: list[Tensor] = []
            for k, x in enumerate(used.output.tensors()):
                if found[at] is None:
                    g = x.new_zeros(()).expand_as(x)
                else:
                    g = found[at]
                assert g is not None
                pieces += g.unbind() if k == 1 and used.output.asked[0] else [g]
                at += 1
            deltas.append(pieces)
        rest = zip(self._leaves, found[len(outputs) :], strict=True)
        return deltas, {n for n, g in rest if g is not None}

    def coupling(self, u: Tensor) -> tuple[float, bool]:
        """Σ ‖δ‖‖ā‖ over the layers, of whose round-off rows that cancel are; and whether points
        whose covector is 0 have cotangents at a layer: these are others' then.
        """
        silent = (u == 0).all(1)
        size = 0.0
        leak = False
        for used, pieces in zip(self._uses, self._reverse(u)[0], strict=True):
            delta = torch.stack(pieces).unflatten(1, self._map.x.shape[:2])  # (T, S, N, …, O)
            size += float(delta.norm() * torch.stack(used.channels).norm())
            leak |= bool(
                delta[:, :, silent].norm() > relative_tolerance(delta.dtype) * delta.norm()
            )
        return size, leak

    def pullback(self, covectors: Tensor) -> Pulled:
        entries = self.value.shape[0] * covectors.shape[0] * self.space.size
        return self._pull(covectors, whole=entries <= _SMALL)

    def factored(self, covectors: Tensor) -> Pulled:
        return self._pull(covectors, whole=False)

    def _pull(self, covectors: Tensor, *, whole: bool) -> Pulled:
        """Pull covectors back: as one matrix A if `whole`, or block by block."""
        layers, others = self._group_by_layer(covectors)
        shape = self.value.shape[0], covectors.shape[0]
        matrix = self.space.zeros(*shape, self.space.size if whole else 0)
        blocks: list[Block] = []
        coverage = []
        for layer in layers:
            block = None
            if not (whole and self._write_layer_rows(layer, matrix)):
                block = self._block(layer.weight, layer.bias, layer.uses)
                blocks.append(block)
            route = "rows" if whole or block is None else block.route
            coverage += [Covered(n, route, "linear layer of a jet") for n in layer.names]
        if others:
            columns = self.columns(sorted(others))
            rows = {n: self.contracted(covectors, column) for n, column in columns.items()}
            blocks.append(RowsBlock(rows))
            coverage += [Covered(n, "rows", "not the weight of one linear layer") for n in rows]
        if not whole:
            return Pulled(self.space, shape, blocks, coverage)
        index = self.space.slices()
        for block in blocks:
            for name, rows in block.rows().items():
                matrix[..., index[name]] = rows
        return Pulled.of_rows(self.space, shape, matrix.flatten(0, 1), coverage)

    def _group_by_layer(self, covectors: Tensor) -> tuple[list[_LayerUses], set[str]]:
        """The uses of each layer with their cotangents, and the parameters of no single layer.

        Rows of parameters that several layers share, or that are used outside of layers, are
        formed whole.
        """
        passes = [self._reverse(u) for u in covectors]
        others: set[str] = set().union(*(reached for _, reached in passes))
        cotangents = zip(*(deltas for deltas, _ in passes), strict=True)
        groups: dict[tuple[str | None, str | None], list[tuple[Used, Deltas]]] = defaultdict(list)
        for used, deltas in zip(self._uses, cotangents, strict=True):
            groups[used.weight, used.bias].append((used, deltas))
        candidates = [_LayerUses(weight, bias, uses) for (weight, bias), uses in groups.items()]
        owners = Counter(name for layer in candidates for name in layer.names)
        layers = []
        for layer in candidates:
            if any(n in others or owners[n] > 1 for n in layer.names):
                others.update(layer.names)
            else:
                layers.append(layer)
        return layers, others

    def _write_layer_rows(self, layer: _LayerUses, matrix: Tensor) -> bool:
        """Write a layer's rows into A where a loop over channels is cheaper; False elsewhere."""
        sites = len(self._map.x)
        if len(layer.uses) > 1 or not prefers_loop(*layer.uses[0], sites):
            return False
        index = self.space.slices()
        targets = [None if n is None else matrix[..., index[n]] for n in (layer.weight, layer.bias)]
        write_rows(*layer.uses[0], sites, *targets)
        return True

    def _block(
        self, weight: str | None, bias: str | None, uses: list[tuple[Used, Deltas]]
    ) -> AffineBlock:
        """Channels and sites of all uses along one sharing axis."""
        inputs = []
        deltas = []
        heights = []
        for used, pieces in uses:
            inputs.append(self._by_sample(used.channels)[:, None])
            given = [self._by_sample(one)[:, None, None] for one in pieces]
            deltas.append(join_uses(given, 1))
            first = inputs[-1].new_zeros(inputs[-1].shape[2])
            first[: len(first) // len(used.channels)] = 1
            heights.append(first)
        x = join_uses(inputs, 2)
        delta = join_uses(deltas, 3)
        h = join_uses(heights, 0)
        return AffineBlock(weight, bias, x, delta, h)

    def _by_sample(self, channels: Sequence[Tensor]) -> Tensor:
        """Channels (S·N, …, I) side by side, (N, T·S·positions, I)."""
        parts = [x.unflatten(0, self._map.x.shape[:2]).transpose(0, 1) for x in channels]
        return torch.stack(parts, 1).flatten(1, -2).to(self.space.dtype)

    rows = Linearization.rows

    def vjp(self, u: Tensor) -> Tensor:
        ones = torch.ones(self.value.shape[0], 1, dtype=u.dtype, device=u.device)
        return self.pullback(u[None]).lift(ones)


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
