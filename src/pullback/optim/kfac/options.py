"""The arguments of `KFAC`: completed by the rule's defaults, or refused with the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # of batches and of single samples
from torch.nn.parameter import UninitializedParameter

from ..._core.capture import Selector, unwrap_model
from ..._core.errors import PullbackError, require
from ...likelihoods import reduction_of
from ...maps.layers.moments import Sharing
from ...metrics import Metric
from ...steps import QuadraticModel
from ..checks import metric_of, refuse_parameter
from .factors.damping import Damping, as_damping
from .rules import Eigenbasis, Natural, Rule, Spectral

#: what is read from a param group
_GROUPED = ("lr", "momentum", "weight_decay", "betas", "rule")
#: what a param group may be labeled with, by schedulers too
_LABELS = (
    "params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum",
    "max_momentum",
)  # fmt: skip


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < inf


def _pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and [_number(b) and b < 1 for b in value] == [True] * 2


#: arguments, what they must be, and the remedy
_TABLE: list[tuple[str, Callable[[Any], bool], str]] = [
    ("lr weight_decay eps rest", _number, "Use a number ≥ 0"),
    ("momentum ema adapt", lambda v: _number(v) and v < 1, "Use a number in [0, 1)"),
    ("betas", lambda v: _pair(v), "Use two numbers in [0, 1)"),
    ("rule", ("adam",).__contains__, "Use 'adam', or None for the optimizer's own rule"),
    ("kl_clip", lambda v: _number(v) and v > 0, "Use a number > 0, or None"),
    ("statistics_every invert_every", lambda v: _whole(v) and v >= 1, "Use a whole number ≥ 1"),
    ("draws max_factor", lambda v: _whole(v) and v >= 1, "Use a whole number ≥ 1"),
    ("seed", _whole, "Use a whole number"),
    ("batch_dim", lambda v: _whole(v) and v >= 0, "Use 0, or 1 for sequences first"),
    ("joint ekfac", lambda v: isinstance(v, bool), "Use True or False"),
    ("fisher", ("mc", "exact", "empirical").__contains__, "Use 'mc', 'exact' or 'empirical'"),
    ("sharing", ("expand", "reduce").__contains__, "Use 'expand' or 'reduce'"),
    ("reduction", ("mean", "sum").__contains__, "Use 'mean' or 'sum'"),
    ("params", lambda v: isinstance(v, Iterable), "Use a list of parameters or of param groups"),
    ("step", lambda v: isinstance(v, QuadraticModel), "Use steps.QuadraticModel(), or None"),
    ("grad_scaler", lambda v: hasattr(v, "get_scale"), "Use the torch.amp.GradScaler of the loss"),
    (
        "output",
        lambda v: isinstance(v, (str, int)) or callable(v),
        "Use a key, an index or a function of the model's output",
    ),
]
#: arguments that may be None
_OPTIONAL = ("kl_clip", "params", "step", "grad_scaler", "output", "rule")
_TESTS = {name: (good, remedy) for names, good, remedy in _TABLE for name in names.split()}


def check(**given: Any) -> None:
    """Raise for the first argument that is not usable."""
    for name, value in given.items():
        good, remedy = _TESTS[name]
        if value is None and name in _OPTIONAL:
            continue
        require(not isinstance(value, Tensor) and good(value), f"{name}=", value, remedy)


def check_group(group: Mapping[str, Any], read: Iterable[str]) -> None:
    """Raise for options of a param group that are not usable, or not among those `read`."""
    for name in group:
        if name not in (*read, *_LABELS):
            raise PullbackError(
                f"A param group cannot have its own {name}=",
                f"with this rule only {', '.join(read)} are read from a group",
                "Give it to KFAC itself where it is one of its options, or leave it out",
            )
    check(**{name: group[name] for name in _GROUPED if name in group})


def check_rates(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise for options that schedulers or users have made unusable since."""
    for group in groups:
        check(**{name: _as_number(group[name]) for name in _GROUPED if name in group})


def _as_number(value: Any) -> Any:
    """Return a number of numpy's or torch's as one of Python's, and 0 for one on a GPU."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.item() if value.device.type == "cpu" else 0.0  # reading it would wait
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


#: layers by which a transformer or a relative of it is known
_OF_TRANSFORMERS = (nn.Embedding, nn.MultiheadAttention, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
#: arguments that rules do not take which are for matrices alone
_NATURAL = ("momentum", "kl_clip", "ekfac", "step")


def _default_rule(model: nn.Module) -> Rule | str:
    """Return the rule for a model of which nothing else is known.

    Behind a normalization the length of a weight has no effect, so that steps of their own
    size suit it. The output layer of a transformer may be a vocabulary, which is left to AdamW.
    """
    every = list(model.modules())
    if any(isinstance(m, _OF_TRANSFORMERS) for m in every):
        return "spectral"
    return Spectral(head=True) if any(isinstance(m, _NormBase) for m in every) else "eigenbasis"


def rule_of(
    rule: Rule | str | None, betas: tuple[float, float], model: nn.Module, **given: Any
) -> Rule:
    """Return the rule that was given, or that the other arguments and the model ask for.

    A metric, a damping and all that belongs to the natural gradient ask for `Natural`. Where there
    is nothing of the kind, transformers and other networks with normalizations take `Spectral`, and
    the rest `Eigenbasis`. Arguments that were left out are None.
    """
    asked = [name for name, value in given.items() if value is not None]
    if rule is None:
        rule = "natural" if asked else _default_rule(model)
    found: Any = _RULES[rule](betas) if isinstance(rule, str) and rule in _RULES else rule
    if isinstance(found, type) or not callable(getattr(found, "directions", None)):
        raise PullbackError(
            "rule= is not usable", f"got {rule!r}", f"Use one of {', '.join(_RULES)}, or a Rule"
        )
    wrong = [n for n in asked if found.matrices and n in _NATURAL]
    wrong += [n for n in asked if n in ("fisher", "damping") and n not in found.defaults]
    if wrong:
        raise PullbackError(
            f"{wrong[0]}= does not go with {found!r}",
            "another rule reads it",
            "Leave it out, or use rule='natural'; momenta are arguments of the rule itself",
        )
    damping = given.get("damping")
    if found.needs == "root" and damping is not None and not (_number(damping) and damping > 0):
        raise PullbackError(
            f"damping= does not go with {found!r}",
            f"it is the share of the inputs' mean square that is added to them; got {damping!r}",
            "Use a number > 0",
        )
    check(**{n: v for n, v in vars(found).items() if n in _TESTS})  # the rule's own arguments
    return found


#: of arguments that a rule does not read
_ABSENT = {"fisher": "mc", "damping": 0.0, "momentum": 0.0}
#: arguments that the rule has a default for
_FILLED = ("lr", "fisher", "damping", "momentum", "ema", "statistics_every", "invert_every")
_RULES: dict[str, Callable[[tuple[float, float]], Rule]] = {
    "natural": lambda betas: Natural(),
    "eigenbasis": Eigenbasis,
    "spectral": lambda betas: Spectral(),
}


@dataclass(frozen=True)
class Options:
    """The arguments of `KFAC`, checked, and those that were left out from the rule's defaults."""

    rule: Rule
    metric: Metric
    #: "mc" draws covectors, "exact" takes the columns of S, "empirical" the loss's own cotangent
    fisher: str
    sharing: Sharing
    #: whether weight and bias share a block
    joint: bool
    #: targets per sample of "mc"
    draws: int
    output: Selector
    batch_dim: int
    #: whether eigenvalues are measured in the factors' eigenbases
    ekfac: bool
    #: of the loss, "mean" or "sum"
    reduction: str
    damping: Damping
    lr: float
    momentum: float
    betas: tuple[float, float]
    weight_decay: float
    kl_clip: float | None
    ema: float
    statistics_every: int
    invert_every: int
    grad_scaler: Any
    step: QuadraticModel | None
    seed: int

    @property
    def scaled(self) -> bool:
        """Whether a loss that is scaled does no harm: the scaler is known, or no length is read."""
        return self.grad_scaler is not None or self.rule.matrices

    @property
    def controlled(self) -> bool:
        """Whether steps look at the loss again."""
        return self.damping.controlled or self.step is not None

    @property
    def once(self) -> bool:
        """Whether factors serve one step, for which they are damped by a constant."""
        own, often = self.damping, self.invert_every == 1 == self.statistics_every
        return often and own.value > 0 and not (own.referenced or own.controlled)

    @property
    def defaults(self) -> dict[str, Any]:
        """What param groups have where they say nothing else."""
        own = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.rule.matrices:
            return own | {"betas": self.betas, "rule": None}
        return own | {"momentum": self.momentum}

    @property
    def common(self) -> dict[str, Any]:
        """What several processes must have in common; param groups are compared by themselves."""
        own = ("grad_scaler", "output", "weight_decay")
        return {n: v for n, v in vars(self).items() if n not in own}


def resolve(model: nn.Module, likelihood: Any, metric: Any, **given: Any) -> Options:
    """Return the options of these arguments of `KFAC`; raise for what is not usable."""
    if given["reduction"] is None:
        given["reduction"] = reduction_of(likelihood)
    asked = {n: given[n] for n in ("fisher", "damping", "momentum", "step")}
    asked |= {"likelihood": likelihood, "metric": metric, "ekfac": given["ekfac"] or None}
    asked["kl_clip"] = None if given["kl_clip"] == "auto" else given["kl_clip"]
    rule = rule_of(given.pop("rule"), given["betas"], model, **asked)
    defaults = {**_ABSENT, **rule.defaults}
    for name in _FILLED:
        if given[name] is None:
            given[name] = defaults.get(name)
    damping, ekfac = given.pop("damping"), given["ekfac"]
    if given["kl_clip"] == "auto":  # a controlled step looks at the loss itself
        controlled = given["step"] is not None or getattr(damping, "controlled", False)
        given["kl_clip"] = None if controlled else defaults.get("kl_clip")
    check(**given)
    reduce, longest = given.pop("sharing") == "reduce", given.pop("max_factor")
    given["sharing"] = Sharing(reduce, given["batch_dim"], longest)
    given["joint"] = given["joint"] and not rule.matrices
    given |= {"metric": metric_of(likelihood, metric), "damping": as_damping(damping)}
    out = Options(**given, rule=rule)
    if ekfac and out.damping.referenced:
        raise PullbackError(
            "Corrected eigenvalues do not go with this damping",
            f"{damping!r} adds to the sides, and ekfac=True damps the corrected eigenvalues",
            "Give a number, or leave ekfac out",
        )
    if out.metric.couples_samples and out.fisher == "empirical":
        raise PullbackError(
            'fisher="empirical" does not go with this metric',
            f"{out.metric!r} relates samples, and their own gradients are not the same covector",
            'Use fisher="mc" or "exact"',
        )
    if out.metric.couples_samples and ekfac:
        raise PullbackError(
            "ekfac=True does not go with this metric",
            f"{out.metric!r} relates samples, and the corrected eigenvalues are sums over single "
            "ones",
            "Leave ekfac out",
        )
    return out


def refuse_unready(model: nn.Module, params: Sequence[Any]) -> None:
    """Raise where there is nothing to optimize, or not yet."""
    for name, p in unwrap_model(model).named_parameters():
        if isinstance(p, UninitializedParameter):
            refuse_parameter(name, p)
    if not params:
        raise PullbackError(
            "There is nothing to optimize",
            "the model has no parameters, or params= is empty",
            "Pass a model with parameters",
        )


def refuse_spread(own: Options, *, several: bool, teams: bool, shards: bool) -> None:
    """Raise for options that do not go with `several` processes, their `teams`, or `shards`."""
    if own.metric.couples_samples and several:
        raise PullbackError(
            f"{own.metric!r} does not go with several processes",
            "it relates the samples of a batch, of which each process has a part",
            "Use a metric of single samples, such as the likelihood's own",
        )
    if own.ekfac and teams:
        raise PullbackError(
            "workers= does not go with ekfac=True",
            "all processes measure in the eigenbases",
            "Leave workers out, so that all of them hold these",
        )
    if own.controlled and shards:
        raise PullbackError(
            "A controlled step does not go with a sharded model",
            "Adaptive damping and QuadraticModel look at whole parameters",
            "Leave them out, or wrap the model in DistributedDataParallel",
        )
