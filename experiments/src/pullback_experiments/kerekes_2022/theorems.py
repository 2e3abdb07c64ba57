"""Theorems 1–4 along natural gradient flows, reparametrization, least squares, Appendix D."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from pullback.flow import Supervised, Trajectory, integrate
from pullback.likelihoods import Bernoulli
from pullback.linear import DiagonalNetwork, LinearModel

from ..framework.check import Check, make_checks
from ..framework.experiment import Context, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table
from .common import DTYPE, Repeated, generator, normal
from .solutions import (
    l1_max_margin,
    l2_max_margin,
    ordinary_least_squares,
    ridgeless,
)

TIMES = (0.3, 1.0, 3.0, 10.0)


def flow(model: nn.Module, x: Tensor, y: Tensor, end: float = TIMES[-1]) -> Trajectory:
    """Natural gradient flow of the logistic loss, loss and Fisher matrix both sums."""
    data = Supervised(x, (1 + y) / 2, Bernoulli(), "sum")
    return integrate(model, data, t=(0.0, end), rtol=1e-10, atol=1e-12)


def margins(s0: Tensor, y: Tensor, t: float) -> Tensor:
    """s(t) = y log(e^{t+c} − 1), c = log(1 + e^{y s₀}), where e^{t+c} may overflow."""
    c = torch.nn.functional.softplus(y * s0)
    return y * (t + c + torch.log(-torch.expm1(-(t + c))))


def draw_data(samples: int, dim: int, context: Context) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Separable x (N, D), y; an invertible A (D, D), singular values ⅓ to 3; a start β₀."""
    source = generator(context.seed)
    x = normal((samples, dim), source, context.device)
    y = (x @ normal((dim,), source, context.device)).sign()
    u, _, v = torch.linalg.svd(normal((dim, dim), source, context.device))
    stretch = torch.linspace(1 / 3, 3, dim, dtype=DTYPE, device=context.device)
    return x, y, (u * stretch) @ v, 0.1 * normal((dim,), source, context.device)


def theorem_1(context: Context) -> Record:
    """N < D: Xβ_t = XAᵀβ'_t."""
    x, y, a, start = draw_data(5, 9, context)
    one = flow(LinearModel(9, start), x, y)
    two = flow(LinearModel(9, torch.linalg.solve(a.T, start)), x @ a.T, y)
    return {"error": _largest(lambda t: one.values(t) - two.values(t))}


def theorem_2(context: Context) -> Record:
    """N ≥ D: Aᵀβ'_t = β_t."""
    x, y, a, start = draw_data(14, 4, context)
    one = flow(LinearModel(4, start), x, y)
    two = flow(LinearModel(4, torch.linalg.solve(a.T, start)), x @ a.T, y)
    return {"error": _largest(lambda t: one.flat(t) - a.T @ two.flat(t))}


def theorem_3(context: Context) -> Record:
    """N < D: s_i(t) = y_i log(e^{t+c_i} − 1); and far out β is along X⁺y."""
    x, y, _, start = draw_data(5, 9, context)
    trajectory = flow(LinearModel(9, start), x, y)
    error = _largest(lambda t: trajectory.values(t) - margins(x @ start, y, t))
    far = flow(LinearModel(9, torch.zeros_like(start)), x, y, 300.0)
    slope = float((y * far.values() / 300.0 - 1).abs().max())
    cosine = torch.cosine_similarity(far.flat(), ridgeless(x, y), dim=0)
    return {"error": error, "slope": slope, "cosine": 1 - float(cosine)}


def theorem_4(context: Context) -> Record:
    """The same in a tanh network and in diagonal networks of depth 2 to 4 with P ≥ N."""
    x, y, _, _ = draw_data(5, 9, context)
    with torch.random.fork_rng():
        torch.manual_seed(context.seed)
        net = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 1), nn.Flatten(0))
    models: list[nn.Module] = [net.to(context.device, DTYPE)]
    models += [
        DiagonalNetwork(9, d, seed=context.seed, dtype=DTYPE, device=context.device)
        for d in (2, 3, 4)
    ]
    errors = []
    for model in models:
        with torch.no_grad():
            start = model(x)
        trajectory = flow(model, x, y)
        errors.append(_largest(partial(_off, trajectory, start, y)))
    return {"error": max(errors)}


def _off(trajectory: Trajectory, start: Tensor, y: Tensor, t: float) -> Tensor:
    return trajectory.values(t) - margins(start, y, t)


def invariance(context: Context) -> Record:
    """N ≥ D: the same β_t at depths 1 to 4 from one β₀."""
    x, y, _, start = draw_data(14, 4, context)
    one = flow(LinearModel(4, start), x, y)
    errors = []
    for depth in (2, 3, 4):
        factors = torch.ones(depth, 4, dtype=DTYPE, device=context.device)
        factors[-1] = start
        two = flow(DiagonalNetwork(4, depth, factors), x, y)
        errors.append(_largest(partial(_relative_difference, one, two, depth)))
    return {"error": max(errors)}


def _relative_difference(one: Trajectory, two: Trajectory, depth: int, t: float) -> Tensor:
    return one.flat(t) - two.flat(t).view(depth, -1).prod(0)


def least_squares(context: Context) -> Record:
    """Appendix G: the same fitted values for N < D, Aᵀβ' = β for N ≥ D."""
    x, y, a, _ = draw_data(5, 9, context)
    few = float((x @ a.T @ ridgeless(x @ a.T, y) - x @ ridgeless(x, y)).abs().max())
    x, y, a, _ = draw_data(14, 4, context)
    beta = ordinary_least_squares(x, y)
    return {"error": max(few, float((a.T @ ordinary_least_squares(x @ a.T, y) - beta).abs().max()))}


def counterexample(context: Context) -> Record:
    """Appendix D: X = (2, −3), A = [[1, 2], [−1, 0]]; the printed points minimize ℓ1, not ℓ2."""
    x = torch.tensor([[2.0, -3.0]], dtype=DTYPE)
    a = torch.tensor([[1.0, 2.0], [-1.0, 0.0]], dtype=DTYPE)
    y = torch.ones(1, dtype=DTYPE)
    beta = l2_max_margin(x, y).beta
    moved = a.T @ l2_max_margin(x @ a.T, y).beta
    printed = torch.tensor([0.0, -1 / 3], dtype=DTYPE)
    return {
        "beta": beta.tolist(),
        "moved": moved.tolist(),
        "gap": float((beta - moved).norm()),
        "off l2": float((beta - printed).norm()),
        "off l1": float((l1_max_margin(x, y).beta - printed).norm()),
    }


def _largest(gap: Callable[[float], Tensor]) -> float:
    return max(float(gap(t).abs().max()) for t in TIMES)


WORKS: dict[str, Callable[[Context], Record]] = {
    "theorem 1": theorem_1,
    "theorem 2": theorem_2,
    "theorem 3": theorem_3,
    "theorem 4": theorem_4,
    "reparametrization": invariance,
    "least squares": least_squares,
}


@dataclass(frozen=True, kw_only=True)
class Theorems(Repeated):
    """Each statement on random separable data, by an adaptive integrator.

    Attributes:
        works: names of `WORKS`.
    """

    seeds: Sequence[int] = (0, 1, 2)
    works: Sequence[str] = tuple(WORKS)

    def smoke(self) -> Self:
        return replace(self, judged=False, works=("theorem 1", "least squares"))

    def config(self, quick: bool) -> dict[str, Any]:
        return {"times": list(TIMES)}

    def items(self, quick: bool) -> list[Item]:
        once = Item(("counterexample",), counterexample, once=True)
        return [once, *(Item((name,), WORKS[name]) for name in self.works)]

    def line(self, record: Record) -> str:
        if "error" in record:
            return f"largest error {record['error']:.1e}"
        return ""

    def judge(self, results: Results) -> list[Check]:
        claims = []
        for name in self.works:
            error = max(r["error"] for r in results.of(name))
            claim = (WORKS[name].__doc__ or name).strip().rstrip(".")
            claims.append((f"{name.capitalize()}. {claim}", error < 1e-8, f"{error:.0e}"))
        slope = max(r["slope"] for r in results.of("theorem 3"))
        cosine = max(r["cosine"] for r in results.of("theorem 3"))
        one = results.once("counterexample")
        gap = one["gap"]
        off = one["off l2"]
        claims += [
            (
                "far out the logits are t·y and β is along least squares",
                slope < 0.01 and cosine < 1e-8,
                f"at t = 300 y·s/t is {slope:.0e} from 1, the cosine {cosine:.0e}",
            ),
            ("the ℓ2 margin is not invariant (Appendix D)", gap > 0.1, f"{gap:.2f} apart"),
            ("the points printed there are the ℓ2 margins", off < 1e-9, f"off by {off:.2f}"),
        ]
        return make_checks(claims, (True,) * 8 + (False,))

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for name in self.works:
            rows.append([name, max(r["error"] for r in results.of(name))])
        return [Table(["statement", "largest error"], rows, f"{len(results.seeds)} seeds")]
