"""Maps in chunks: the numbers of the whole map, and a peak of memory that the chunks bound."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pullback import PullbackError, pde
from pullback.maps import ChunkedMap, Linearization, OperatorMap, identity_covectors
from pullback.maps.chunks import count_saved_bytes
from pullback.pde.discretization.sites import draw_sites
from pullback.pde.discretization.term import build_term
from pullback.pde.discretization.trial import Trial


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made in this context held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._storages:
            self._storages.add(key)
            self._live += storage.nbytes()
            self.peak = max(self.peak, self._live)
            weakref.finalize(storage, self._drop, key, storage.nbytes())

    def _drop(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self._live -= size


def make_map(
    network: torch.nn.Module, problem: pde.Problem, memory: int | None, points: int = 60
) -> tuple[OperatorMap | ChunkedMap, dict[str, Tensor]]:
    """Return the equation's residuals at points, and the parameters."""
    trial = Trial(network, {}, next(network.parameters()))
    condition = problem.conditions[0]
    sites = draw_sites(problem, condition, points, "sobol", 0)
    residuals = build_term(problem, condition, trial, sites, memory=memory).map
    assert isinstance(residuals, (OperatorMap, ChunkedMap))
    return residuals, dict(trial.named_parameters())


def linearize(memory: int | None) -> Linearization:
    residuals, params = make_map(pde.mlp(3, 20, 20, 1, seed=0), pde.Poisson(3), memory, 24)
    assert isinstance(residuals, ChunkedMap) == (memory is not None)
    return residuals.linearize(params)


@dataclass(frozen=True)
class Sizes:
    """What the map of `linearize` takes, in bytes."""

    graph: int
    matrix: int

    @classmethod
    def count(cls) -> Sizes:
        residuals, params = make_map(pde.mlp(3, 20, 20, 1, seed=0), pde.Poisson(3), None, 24)
        assert isinstance(residuals, OperatorMap)
        entries = 24 * sum(p.numel() for p in params.values())
        return cls(24 * count_saved_bytes(residuals, params), 8 * entries)


def test_chunks_give_the_numbers_of_the_whole_map() -> None:
    """With A as a matrix, with factors of all chunks, and with each chunk linearized again."""
    sizes = Sizes.count()
    assert 0.9 * sizes.graph < sizes.matrix < 2 * sizes.graph
    for memory in (sizes.matrix, int(0.95 * sizes.matrix), sizes.graph // 2):
        compare_with_whole(linearize(None), linearize(memory))


def compare_with_whole(whole: Linearization, chunked: Linearization) -> None:
    v = torch.linspace(-1, 1, whole.space.size, dtype=torch.float64)
    u = torch.linspace(-1, 1, len(whole.value), dtype=torch.float64)[:, None]
    covectors = identity_covectors(whole.value)
    first = whole.pullback(covectors)
    second = chunked.pullback(covectors)
    torch.testing.assert_close(chunked.value, whole.value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(chunked.jvp(v), whole.jvp(v), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(chunked.vjp(u), whole.vjp(u), rtol=1e-12, atol=1e-12)
    results: list[Callable[..., Tensor]] = [
        lambda pulled: pulled.rows(),
        lambda pulled: pulled.kernel(),
        lambda pulled: pulled.kernel(first),
        lambda pulled: first.kernel(pulled),
        lambda pulled: pulled.narrow(5, 20).rows(),
        lambda pulled: pulled.project(v),
        lambda pulled: pulled.lift(u),
    ]
    for compute in results:
        torch.testing.assert_close(compute(second), compute(first), rtol=1e-12, atol=1e-12)


def test_the_peak_is_that_of_a_chunk() -> None:
    """A reverse pass through 300 points of 200 units, within twice the memory that is allowed."""

    def measure_peak(memory: int | None) -> int:
        residuals, params = make_map(pde.mlp(2, 200, 1, seed=0), pde.Poisson(2), memory, 300)
        linearization = residuals.linearize(params)
        linearization.vjp(linearization.value)  # first linearizations are verified
        with PeakBytes() as counter:
            linearization = residuals.linearize(params)
            pulled = linearization.pullback(identity_covectors(linearization.value))
            pulled.lift(linearization.value)
        return counter.peak

    memory = 2**20
    assert measure_peak(None) > 5 * memory
    assert measure_peak(memory) < 2 * memory


def test_a_solve_within_little_memory_takes_the_same_steps() -> None:
    losses = []
    for memory in (2**20, 2**32):
        network = pde.mlp(2, 60, 1, seed=0)
        options = {"points": 300, "steps": 3, "progress": False, "refine": None}
        solution = pde.solve(pde.Poisson(2), network, memory=memory, **options)  # pyright: ignore[reportArgumentType]
        losses.append(torch.tensor(solution.history.loss, dtype=torch.float64))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=0)


def test_measured_values_follow_their_points() -> None:
    x = torch.linspace(0, 1, 40, dtype=torch.float64)
    data = pde.Data(x, torch.sin(x))
    problem = pde.Problem(pde.Interval(0, 1), [data, pde.Equation(lambda u: u.xx + u)])
    network = pde.mlp(1, 10, 1, seed=0)
    whole, params = make_map(network, problem, None, 40)
    chunked, _ = make_map(network, problem, 2_000, 40)
    assert isinstance(chunked, ChunkedMap)
    torch.testing.assert_close(chunked(params), whole(params))
    factors = torch.linspace(1, 2, 40, dtype=torch.float64)
    chunked.scale(factors)
    torch.testing.assert_close(chunked(params), factors.sqrt()[:, None] * whole(params))


def test_what_needs_all_samples_is_refused() -> None:
    chunked = linearize(10_000)
    covectors = identity_covectors(chunked.value)
    with pytest.raises(PullbackError, match="no factors"):
        chunked.pullback_factored(covectors)
    with pytest.raises(PullbackError, match="no trace"):
        chunked.pullback(covectors).trace_covectors()
