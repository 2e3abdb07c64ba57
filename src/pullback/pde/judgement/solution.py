"""A solved problem: the network, its error, its history, and pictures of it."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError, import_extra
from ...maps import Scheme
from .. import checkpoint
from ..arguments import check_points
from ..discretization.residual import derivatives, fingerprint
from ..discretization.sites import draw_sites
from ..discretization.trial import Trial
from ..domains import PointSet
from ..networks.modules import Slabs
from ..problem.conditions import Data, Prior
from ..problem.problem import Problem
from .check import Check
from .estimate import Estimate, estimate
from .history import History
from .validation import Residual, Validation
from .verdict import PDEVerdict
from .yardstick import Yardstick

_FRESH, _SEED = 2000, 104_729  # points that the solution is checked at
_SAVED = ("unknowns", "weights", "loss", "spectrum", "nested")  # as they are
_QUICK = 1000  # parameters up to which every small residual is weighed by the error it allows


class PDESolution:
    """What `solve` found.

    Attributes:
        problem, network: what was solved, and with what.
        history: losses, errors and times along the way.
        unknowns: the coefficients that were found.
        verdict: how it ended.
        weights: of the conditions in the loss.
        loss: of the network as it is, at the points of the last step.
        spectrum: singular values of the weighted residual Jacobian at the end, where computed.
        nested: why derivatives were nested instead of carried forward, or empty.
    """

    def __init__(
        self,
        problem: Problem,
        network: nn.Module,
        history: History,
        *,
        unknowns: dict[str, float] | None = None,
        verdict: PDEVerdict | None = None,
        weights: dict[str, float] | None = None,
        loss: float = float("nan"),
        spectrum: Tensor | None = None,
        nested: str = "",
    ) -> None:
        self.problem, self.network, self.history = problem, network, history
        self.unknowns = dict(unknowns or {})
        self.verdict = verdict or PDEVerdict("", False, math.nan, math.nan, math.nan)
        self.weights = dict(weights or {c.name: c.weight for c in problem.conditions})
        self.spectrum, self.nested, self.loss = spectrum, nested, loss

    @property
    def stopped(self) -> str:
        """How it ended, why, and what to try where that is not good enough."""
        return self.verdict.text

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """u at points (N, d): (N, m)."""
        return self.network(self._points(x))

    def d(self, *names: str) -> Callable[[Tensor], Tensor]:
        """A derivative as a function of points (N, d) that returns (N, m).

        `solution.d("xx")(x)` is ∂²u/∂x² at x; `solution.d("x1", "x1")` spells the names out.
        """
        index = self.problem.coordinates.parse(*names)
        scheme = Scheme.of([index])

        def derivative(x: Tensor) -> Tensor:
            channels = derivatives(self.network, self._points(x)[None], scheme)
            return channels[scheme.position[index], 0]

        return derivative

    def _points(self, x: Tensor) -> Tensor:
        check_points(x, self.problem.domain.dim)
        return x.to(next(self.network.parameters()))

    @property
    def residual(self) -> dict[str, Residual]:
        """Every condition at fresh points, with the size of the terms that should cancel."""
        return self._validation.residuals()

    @property
    def _validation(self) -> Validation:
        counts = {c.name: _FRESH for c in self.problem.conditions}
        return Validation(self.problem, self._trial, counts, self.weights, _SEED)

    @property
    def _trial(self) -> Trial:
        return Trial(self.network, self.unknowns, next(self.network.parameters()))

    def check(self, against: PDESolution | None = None) -> Check:
        """A table to judge the solution by without knowing the true one.

        Args:
            against: another solution of the problem, by another seed or width, to compare with.
        """
        residuals = self.residual
        return Check(
            self.problem.name,
            self.stopped,
            residuals,
            self._estimate(residuals),
            self.unknowns,
            None if against is None else self._difference(against),
            self.error if self.problem.known else None,
        )

    def estimated(self) -> tuple[float | None, tuple[str, ...]]:
        """The relative error that the residuals allow, and unknowns that they do not determine.

        It is asked where it takes about as long as a step: not above 1000 parameters (of a slab),
        for nested derivatives and energies. Where there are data, their noise is no error.
        """
        noisy = any(isinstance(c, (Data, Prior)) for c in self.problem.conditions)
        slabs = len(self.network.networks) if isinstance(self.network, Slabs) else 1
        count = sum(p.numel() for p in self.network.parameters()) // slabs
        if (noisy and not self.unknowns) or self.nested or count > _QUICK:
            return None, ()
        try:
            found = self._estimate(self.residual)
        except (PullbackError, torch.linalg.LinAlgError):  # a solve is not lost for want of it
            return None, ()
        if found is None:
            return None, ()
        loose = tuple(n for n, spread in found.spread.items() if spread == math.inf)
        return None if noisy or math.isnan(found.error) else found.error, loose

    def _estimate(self, residuals: Mapping[str, Residual]) -> Estimate | None:
        affine = all(r.affine for r in residuals.values())
        return estimate(self.problem, self._trial, self.weights, affine)

    def _difference(self, other: PDESolution) -> float:
        x = self.problem.domain.sample(_FRESH, "sobol", seed=_SEED).x
        return float((self(x) - other(x)).norm() / self(x).norm())

    @property
    def error(self) -> float:
        """The relative L² error, all fields together."""
        return Yardstick(self.problem, next(self.network.parameters())).error(self.network)

    @property
    def errors(self) -> dict[str, float]:
        """The relative L² error of each field."""
        return Yardstick(self.problem, next(self.network.parameters())).errors(self.network)

    def plot(self, path: str | Path | None = None) -> Any:
        """Solution, error, convergence and spectrum; written to `path` where it is given."""
        with import_extra("plots"):
            from .plots import draw_solution  # matplotlib is slow to import

        return draw_solution(self, path)

    def save(self, path: str | Path) -> None:
        """Parameters, history and spectrum; problem and architecture are code."""
        checkpoint.save(
            Path(path),
            {
                "run": _identity(self.problem),
                "network": self.network.state_dict(),
                "history": self.history.as_dict(),
                "verdict": asdict(self.verdict),
                "edges": getattr(self.network, "edges", None),
                **{name: getattr(self, name) for name in _SAVED},
            },
        )

    @classmethod
    def load(cls, path: str | Path, problem: Problem, network: nn.Module) -> PDESolution:
        """What `save` wrote, for the same problem and a network of the same architecture.

        A solution in slabs of time is given one of their networks, and copies it.
        """
        state = checkpoint.load(Path(path), _identity(problem))
        if state["edges"] is not None:
            count = len(state["edges"]) - 1
            network = Slabs([copy.deepcopy(network) for _ in range(count)], state["edges"])
        checkpoint.restore(Path(path), network, state["network"])
        history, verdict = History.from_dict(state["history"]), PDEVerdict(**state["verdict"])
        saved = {name: state[name] for name in _SAVED}
        return cls(problem, network, history, verdict=verdict, **saved)

    def __getstate__(self) -> dict[str, Any]:
        """All, but of a problem with functions that cannot be pickled only what it is called."""
        try:
            pickle.dumps(self.problem)
        except (pickle.PicklingError, AttributeError, TypeError):
            return {**vars(self), "problem": self.problem.outline()}
        return dict(vars(self))

    def __repr__(self) -> str:
        known = f", error {self.history.error[-1]:.2e}" if self.history.error else ""
        found = "".join(f", {n} = {v:.6g}" for n, v in self.unknowns.items())
        return (
            f"PDESolution({self.problem.name}: {len(self.history)} steps in "
            f"{self.history.spent:.1f} s, loss {self.loss:.2e}{known}{found}; {self.stopped})"
        )


def _identity(problem: Problem) -> dict[str, Any]:
    """What tells one problem from another: its name and what its conditions say at some points."""
    found = {}
    for c in problem.conditions:
        region = c.region(problem.domain)
        count = len(region) if isinstance(region, PointSet) else 64
        sites = draw_sites(problem, c, count, "sobol", 0)
        found[c.name] = fingerprint(problem, c, sites)
    return {"problem": problem.name, "domain": repr(problem.domain), "conditions": found}
