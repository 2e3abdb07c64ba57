"""A solved problem: the network, its error, its history, and pictures of it."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError, import_extra
from ...maps import Scheme
from ..arguments import check_points
from ..checkpoint import FORMAT, load_parameters, load_state
from ..discretization.residual import compute_derivatives, fingerprint
from ..discretization.seeds import SEEDS
from ..discretization.sites import draw_sites
from ..discretization.trial import Trial
from ..networks.modules import Slabs
from ..networks.state import copy_architecture
from ..problem.problem import Problem
from .check import Check
from .contradiction import find_contradiction, find_differing_values
from .correction import CorrectionFailed, correct_solution, is_resolved
from .error_profile import ErrorProfile
from .estimate import THRESHOLDS as TANGENTS
from .estimate import Estimate, estimate_error
from .growth import measure_growth
from .history import History
from .integration import IntegrationFailed, compare_with_integration
from .jumps import find_jump
from .stop import Stop
from .validation import Residual, Validation
from .verdict import PDEVerdict
from .yardstick import Yardstick


@dataclass(frozen=True)
class SolutionThresholds:
    """Where a solution is checked."""

    #: fresh points of a condition, and of the comparison with another solution
    fresh_points: int = 2000
    #: points of a condition that tell one problem from another
    identity_points: int = 64
    #: parameters up to which the error is estimated after every solve: that takes about a step
    estimated_parameters: int = 1000
    #: share of the mean square at a twentieth of the points, from which a residual is concentrated;
    #: that of a wave has 10 % there, and of a Gaussian error 30 %
    concentrated_share: float = 0.7
    #: growth of waves beyond which tangents alone say nothing about the error: an error estimated
    #: ten times too small would be silent
    largest_growth: float = 10.0
    #: reach of tangents beyond which they alone say nothing either: it is below 0.2 for Poisson's,
    #: Helmholtz' and heat equations in four and five dimensions, and 2e3 to 8e4 for Laplace's with
    #: values on one face alone, which the smallest residuals do not determine
    largest_reach: float = 100.0
    #: terms below this have squares that float64 cannot hold with all of its digits, √(tiny/ε)
    smallest_size: float = 1e-146


THRESHOLDS = SolutionThresholds()
#: attributes that are saved as they are
_SAVED = ("unknowns", "weights", "loss", "spectrum", "nested")


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
        self.problem = problem
        self.network = network
        self.history = history
        self.unknowns = dict(unknowns or {})
        self.verdict = verdict or PDEVerdict(Stop(), False, math.nan, math.nan, math.nan)
        self.weights = dict(weights or {c.name: c.weight for c in problem.conditions})
        self.spectrum = spectrum
        self.nested = nested
        self.loss = loss

    @property
    def stopped(self) -> str:
        """Return why the run ended, and a remedy where the result is not good enough."""
        return self.verdict.text

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return u at points (N, d): (N, m)."""
        return self.network(self._check_points(x))

    def d(self, *names: str) -> Callable[[Tensor], Tensor]:
        """Return a derivative as a function of points (N, d) that returns (N, m).

        `solution.d("xx")(x)` is ∂²u/∂x² at x; `solution.d("x1", "x1")` spells the names out.
        """
        index = self.problem.coordinates.parse(*names)
        scheme = Scheme.of([index])

        def derivative(x: Tensor) -> Tensor:
            channels = compute_derivatives(self.network, self._check_points(x)[None], scheme)
            return channels[scheme.position[index], 0]

        return derivative

    def _check_points(self, x: Tensor) -> Tensor:
        check_points(x, self.problem.domain.dim)
        return x.to(next(self.network.parameters()))

    @property
    def residual(self) -> dict[str, Residual]:
        """Every condition at fresh points, with the size of the terms that should cancel."""
        return self._validation.residuals()

    @property
    def _validation(self) -> Validation:
        counts = {c.name: THRESHOLDS.fresh_points for c in self.problem.conditions}
        return Validation(self.problem, self._trial, counts, self.weights, SEEDS.validation)

    @property
    def _trial(self) -> Trial:
        return Trial(self.network, self.unknowns, next(self.network.parameters()))

    def check(self, against: PDESolution | None = None) -> Check:
        """Return a table to judge the solution by without knowing the true one.

        Args:
            against: another solution of the problem, by another seed or width, to compare with.
        """
        residuals = self.residual
        return Check(
            name=self.problem.name,
            stopped=self.stopped,
            residuals=residuals,
            estimate=self._estimate(residuals),
            unknowns=self.unknowns,
            difference=None if against is None else self._difference(against),
            error=self.error if self.problem.known else None,
        )

    def estimate_error(self) -> tuple[float | None, tuple[str, ...]]:
        """Return the relative error that the residuals allow, and unknowns they leave open.

        The error is None where it is unknown: no second discretization is possible, and the
        tangents would take longer than a step (above 1000 parameters of a slab, for nested
        derivatives and energies), or do not see how waves grow. It is None too if there are data,
        whose noise is no error.
        """
        verdict = self.judge_error()
        return verdict.estimated, verdict.loose

    def judge_error(self) -> PDEVerdict:
        """Return the verdict with an estimate of the error, where there is one."""
        jump = find_jump(self.problem)
        if jump:
            return replace(self.verdict, jump=jump)
        has_noise = any(c.is_measured or c.is_prior for c in self.problem.conditions)
        if has_noise and not self.unknowns:
            return self.verdict
        estimate = self._try_to_estimate()
        if estimate is None:
            return self.verdict
        loose = tuple(name for name, spread in estimate.spread.items() if spread == math.inf)
        if has_noise or math.isnan(estimate.error):
            return replace(
                self.verdict,
                loose=loose,
                is_isolated=estimate.is_isolated,
                is_unbounded=estimate.is_unbounded and not has_noise,
            )
        return replace(
            self.verdict,
            estimated=estimate.error,
            loose=loose,
            lost_fields=estimate.lost_fields,
            lost_from=estimate.lost_from,
        )

    def judge_residuals(self) -> PDEVerdict:
        """Return the verdict with what keeps residuals large, where that is seen.

        It is a coefficient that jumps, conditions that contradict each other, or a place where most
        of an equation's residual lies.
        """
        jump = find_jump(self.problem)
        if jump:
            return replace(self.verdict, jump=jump)
        if not math.isfinite(self.verdict.relative):  # the network's values are not
            return self.verdict
        residuals = self.residual
        return replace(
            self.verdict,
            concentrated=self._find_concentration(residuals),
            contradicting=self._find_contradiction(residuals),
            differing=find_differing_values(self.problem),
        )

    def _find_concentration(self, residuals: Mapping[str, Residual]) -> str:
        """Return where most of the largest residual of an equation lies, in words, or ""."""
        equations = [c.name for c in self.problem.conditions if c.is_equation and c.on is None]
        if not equations:
            return ""
        name = max(equations, key=lambda n: residuals[n].relative)
        worst = residuals[name]
        if worst.concentration < THRESHOLDS.concentrated_share:
            return ""
        coordinates = ", ".join(f"{axis} = {at:.3g}" for axis, at in worst.largest_at.items())
        return f"{name!r} near {coordinates}"

    def _find_contradiction(self, residuals: Mapping[str, Residual]) -> tuple[str, ...]:
        """Return the names of conditions that cannot hold together near the solution, if any."""
        if self.nested:
            return ()
        sizes = {name: residual.size for name, residual in residuals.items()}
        try:
            return find_contradiction(self.problem, self.network, sizes)
        except (PullbackError, torch.linalg.LinAlgError):
            return ()

    def _try_to_estimate(self) -> Estimate | None:
        """Return a quick estimate of the error; a solve is not lost for want of it."""
        most_parameters = THRESHOLDS.estimated_parameters
        if self.nested:
            most_parameters = 0
        try:
            return self._estimate(self.residual, most_parameters)
        except (PullbackError, torch.linalg.LinAlgError):
            return None

    def _estimate(
        self, residuals: Mapping[str, Residual], most_parameters: int = TANGENTS.most_parameters
    ) -> Estimate | None:
        """Return an estimate by a second discretization, by the tangents, or by both.

        The tangents do not see how an unstable equation amplifies errors. Where a coefficient
        jumps the error is unknown, and where squares of the terms vanish in float64.
        """
        affine = all(residual.affine for residual in residuals.values())
        sizes = [residual.size for residual in residuals.values()]
        if any(0 < size < THRESHOLDS.smallest_size for size in sizes):
            return Estimate(math.nan, {}, affine)
        estimate = self._estimate_by_tangents(affine, most_parameters)
        if find_jump(self.problem):
            return replace(estimate or Estimate(math.nan, {}, affine), error=math.nan)
        try:
            profile = self._compare_discretizations()
        except (CorrectionFailed, IntegrationFailed) as failure:
            profile = None
            estimate = replace(
                estimate or Estimate(math.nan, {}, affine),
                error=math.nan,
                is_isolated=isinstance(failure, CorrectionFailed),
            )
        if profile is None:
            return self._drop_unreliable_error(estimate)
        if estimate is None:
            if not is_resolved(profile) and profile.is_bounded:
                return None
            estimate = Estimate(math.nan, {}, affine)
        return estimate.combine(profile, is_resolved=is_resolved(profile))

    def _drop_unreliable_error(self, estimate: Estimate | None) -> Estimate | None:
        """Return an estimate by tangents alone, without its error where that cannot be relied on.

        This is so where waves grow tenfold, and where tangents of a large reach show that
        conditions leave almost everything open.
        """
        if estimate is None or estimate.error == math.inf:
            return estimate
        if estimate.reach > THRESHOLDS.largest_reach:
            return replace(estimate, error=math.nan)
        if not self.problem.domain.evolves:
            return estimate
        growth = measure_growth(self.problem, self._trial, dict(self._trial.unknowns))
        if growth > THRESHOLDS.largest_growth:
            return replace(estimate, error=math.nan)
        return estimate

    def _estimate_by_tangents(self, affine: bool, most_parameters: int) -> Estimate | None:
        """Return an estimate by the network's tangents, None where they cannot give one."""
        try:
            return estimate_error(self.problem, self._trial, self.weights, affine, most_parameters)
        except (PullbackError, torch.linalg.LinAlgError):
            return None

    def _compare_discretizations(self) -> ErrorProfile | None:
        """Return the error by an integrator or by polynomials, None where neither is possible.

        An integrator cannot begin where the highest derivative has the factor 0, as in the center
        of a ball. There, polynomials may do.
        """
        try:
            profile = compare_with_integration(self.problem, self.unknowns, self)
        except IntegrationFailed:
            with suppress(CorrectionFailed):
                profile = correct_solution(self.problem, self.network, self.unknowns)
                if profile is not None and is_resolved(profile):
                    return profile
            raise
        if profile is not None:
            return profile
        return correct_solution(self.problem, self.network, self.unknowns)

    def _difference(self, other: PDESolution) -> float:
        x = self.problem.domain.sample(THRESHOLDS.fresh_points, "sobol", seed=SEEDS.validation).x
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
        """Draw solution, error, convergence and spectrum; write the picture if there is a path."""
        with import_extra("plots"):
            from .plots import draw_solution  # matplotlib is slow to import

        return draw_solution(self, path)

    def save(self, path: str | Path) -> None:
        """Write parameters, history and spectrum; problem and architecture are code."""
        state = {
            "run": _identify(self.problem),
            "network": self.network.state_dict(),
            "history": self.history.as_dict(),
            "verdict": self.verdict.as_dict(),
            "edges": getattr(self.network, "edges", None),
        }
        state |= {name: getattr(self, name) for name in _SAVED}
        FORMAT.write(Path(path), state)

    @classmethod
    def load(cls, path: str | Path, problem: Problem, network: nn.Module) -> PDESolution:
        """Return what `save` wrote, for the same problem and a network of the same architecture.

        A solution in slabs of time is given one of their networks, and copies it. Slabs of an
        ordinary problem that `solve` cut by itself have networks of their own.
        """
        state = load_state(Path(path), _identify(problem))
        edges = state["edges"]
        if edges is not None:
            slabs = []
            for number in range(len(edges) - 1):
                slab = copy_architecture(state["network"], number)
                slabs.append(slab or copy.deepcopy(network))
            network = Slabs(slabs, edges)
        load_parameters(Path(path), network, state["network"])
        history = History.from_dict(state["history"])
        verdict = PDEVerdict.from_dict(state["verdict"])
        attributes = {name: state[name] for name in _SAVED}
        return cls(problem, network, history, verdict=verdict, **attributes)

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes; a problem that cannot be pickled is left without its functions."""
        try:
            pickle.dumps(self.problem)
        except (pickle.PicklingError, AttributeError, TypeError):
            return {**vars(self), "problem": self.problem.without_functions()}
        return dict(vars(self))

    def __repr__(self) -> str:
        facts = [
            f"{len(self.history)} steps in {self.history.spent:.1f} s",
            f"loss {self.loss:.2e}",
        ]
        if self.history.error:
            facts.append(f"error {self.history.error[-1]:.2e}")
        facts += [f"{name} = {value:.6g}" for name, value in self.unknowns.items()]
        return f"PDESolution({self.problem.name}: {', '.join(facts)}; {self.stopped})"


def _identify(problem: Problem) -> dict[str, Any]:
    """Return what tells one problem from another: what its conditions say at some points."""
    conditions = {}
    for condition in problem.conditions:
        count = condition.region(problem.domain).point_count or THRESHOLDS.identity_points
        sites = draw_sites(problem, condition, count, "sobol", 0)
        conditions[condition.name] = fingerprint(problem, condition, sites)
    return {"problem": problem.name, "domain": repr(problem.domain), "conditions": conditions}
