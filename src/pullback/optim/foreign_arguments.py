"""Arguments of other optimizers that `KFAC` and `NaturalGradient` do not have, and their remedies.

Someone who comes from Adam, SGD or another K-FAC writes `betas=` or `damping=`. The error says
where the option is here, or that it has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import ParamSpec

from .._core.errors import PullbackError, describe_nearest_names

Parameters = ParamSpec("Parameters")


class UnknownArgumentError(PullbackError, TypeError):
    """An argument that a constructor does not have; also a `TypeError`, as Python raises it."""


@dataclass(frozen=True)
class Counterpart:
    """Why a constructor does not have an argument, and what to write instead."""

    why: str
    remedy: str


def _list_counterparts(*rows: tuple[str, str, str]) -> dict[str, Counterpart]:
    """Return counterparts by name, from rows of names, reason and remedy."""
    counterparts = {}
    for names, why, remedy in rows:
        for name in names.split():
            counterparts[name] = Counterpart(why, remedy)
    return counterparts


_NO_COUNTERPART = (
    (
        "foreach fused capturable",
        "layers of one shape are always computed together",
        "Leave it out",
    ),
    ("differentiable", "a step is not differentiated", "Leave it out"),
)

KFAC_COUNTERPARTS = _list_counterparts(
    *_NO_COUNTERPART,
    (
        "betas",
        "the memories belong to a rule",
        "Write rule=Eigenbasis(betas=(0.5, 0.99)); for parameters that follow AdamW write it into "
        "their param group, or others=AdamW(betas=...) of the rule",
    ),
    (
        "eps",
        "it belongs to a rule",
        "Write rule=Eigenbasis(eps=...); what is added to factors before they are inverted is "
        "damping=",
    ),
    (
        "momentum",
        "it belongs to a rule",
        "Write rule=Natural(momentum=...) or rule=Spectral(momentum=...); Eigenbasis has betas=",
    ),
    (
        "fisher metric",
        "it belongs to a rule",
        "Write rule=Natural(likelihood, fisher=...) or rule=Natural(metric=...)",
    ),
    (
        "kl_clip norm_constraint ekfac",
        "it belongs to the natural rule",
        "Write rule=Natural(likelihood, kl_clip=..., ekfac=...)",
    ),
    (
        "warmup",
        "it belongs to a rule",
        "Write rule=Natural(warmup=...) or rule=Spectral(warmup=...)",
    ),
    (
        "head cuda_graph others",
        "it belongs to a rule",
        "Write rule=Eigenbasis(head=..., cuda_graph=..., others=...), or the same with Spectral",
    ),
    (
        "adapt whitening agreement filters gentle_start",
        "it belongs to the spectral rule",
        "Write rule=Spectral(adapt=..., whitening=..., agreement=..., filters=..., "
        "gentle_start=...)",
    ),
    (
        "draws ema sharing max_factor batch_dim reduction seed joint",
        "it says how a rule estimates its factors",
        "Write rule=Natural(likelihood, estimation=Estimation(draws=..., ema=..., reduction=...))",
    ),
    (
        "stat_decay factor_decay curvature_ema",
        "the memory of the factors belongs to a rule",
        "Write rule=Natural(likelihood, estimation=Estimation(ema=0.95))",
    ),
    (
        "max_precond_dim",
        "it says how a rule estimates its factors",
        "Write rule=Eigenbasis(estimation=Estimation(max_factor=...)) with the longest side of a "
        "full factor",
    ),
    (
        "batch_averaged",
        "K-FAC assumes that the loss is a mean",
        "Leave it out; for a summed loss write "
        'rule=Natural(likelihood, estimation=Estimation(reduction="sum"))',
    ),
    (
        "TCov factor_update_steps fac_update_freq",
        "it has another name here",
        "Write statistics_every=...",
    ),
    (
        "TInv inv_update_steps kfac_update_freq inverse_update_period precondition_frequency",
        "it has another name here",
        "Write invert_every=...",
    ),
    ("loss criterion loss_fn", "it has another name here", "Write likelihood=..."),
    ("learning_rate", "it has another name here", "Write lr=..."),
    ("l2_reg", "it has another name here", "Write weight_decay=..., which is decoupled"),
    (
        "amsgrad nesterov dampening ns_steps accumulation_steps",
        "no rule of K-FAC has it",
        "Leave it out",
    ),
    ("maximize", "K-FAC minimizes", "Call backward() on the negative of what you maximize"),
    (
        "solver gram retract metric_batch",
        "it belongs to the exact natural gradient",
        "Leave it out, or use NaturalGradient",
    ),
)

NATURAL_COUNTERPARTS = _list_counterparts(
    (
        "draws ema sharing max_factor batch_dim reduction seed joint",
        "it says how the rule estimates its factors",
        "Write estimation=Estimation(draws=..., ema=..., joint=...)",
    ),
)

NATURAL_GRADIENT_COUNTERPARTS = _list_counterparts(
    *_NO_COUNTERPART,
    (
        "damping",
        "it belongs to the solver, or to a step that adapts it",
        "Write solver=solvers.Cholesky(damping=...), or step=steps.LevenbergMarquardt(damping=...)",
    ),
    (
        "momentum",
        "it belongs to a step",
        "Write step=steps.QuadraticModel(), which finds it, or step=steps.Spring(momentum=...)",
    ),
    (
        "weight_decay l2_reg",
        "the exact step is that of the closure's whole loss",
        "Add 0.5·weight_decay·‖w‖² to the loss in the closure",
    ),
    (
        "betas eps amsgrad nesterov dampening",
        "the exact step keeps no moments",
        "Leave it out; what is added to the Gram is the damping of solver=",
    ),
    (
        "rule statistics_every invert_every estimation fisher",
        "it belongs to K-FAC",
        "Leave it out, or use KFAC",
    ),
    ("kl_clip max_delta", "it belongs to a step", "Write step=steps.TrustNorm(limit)"),
    (
        "line_search_fn",
        "a line search is a step",
        "Leave it out: steps.Backtracking() is the default",
    ),
    ("max_iter history_size", "a step solves one damped system", "Leave it out"),
    ("loss criterion loss_fn", "it has another name here", "Write likelihood=..."),
    ("learning_rate", "it has another name here", "Write lr=..."),
    ("reduction batch_dim", "it belongs to output=", "Write output=optim.Outputs(reduction=...)"),
)


def explain_unknown_arguments(
    counterparts: Mapping[str, Counterpart],
) -> Callable[[Callable[Parameters, None]], Callable[Parameters, None]]:
    """Return a decorator of `__init__` that refuses keywords which the constructor does not have.

    The error tells the counterpart of the argument; without one, the arguments with similar names.
    """

    def decorate(init: Callable[Parameters, None]) -> Callable[Parameters, None]:
        names = [*signature(init).parameters][1:]
        optimizer = init.__qualname__.partition(".")[0]

        @wraps(init)
        def check_and_init(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
            for name in kwargs:
                if name not in names:
                    raise _make_error(optimizer, name, names, counterparts)
            init(*args, **kwargs)

        return check_and_init

    return decorate


def _make_error(
    optimizer: str, name: str, names: list[str], counterparts: Mapping[str, Counterpart]
) -> UnknownArgumentError:
    """Return the error for an argument that the constructor does not have."""
    counterpart = counterparts.get(name)
    if counterpart is None:
        counterpart = Counterpart(
            describe_nearest_names(name, names), f"Use one of {', '.join(names)}"
        )
    return UnknownArgumentError(
        f"{optimizer} has no argument {name}=", counterpart.why, counterpart.remedy
    )
