"""The options of `KFAC`: its rule, and what else it was told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # of batches and of single samples
from torch.nn.parameter import UninitializedParameter

from ..._core.capture import Selector, unwrap_model
from ..._core.errors import PullbackError, describe_value
from ...maps.layers.moments import Sharing
from ...maps.roles import Role
from ...metrics import Euclidean, Metric
from ...steps import Step
from ..checks import choose_metric, refuse_parameter
from .arguments import check
from .factors.damping import Damping
from .needs import refuse_step
from .rules import (
    AdamW,
    Defaults,
    Eigenbasis,
    Estimation,
    Natural,
    Rule,
    Spectral,
    Statistics,
    TwoSided,
)

#: layers by which a transformer or a relative of it is known
_OF_TRANSFORMERS = (nn.Embedding, nn.MultiheadAttention, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
#: what attributes of a rule must be
_TYPES: dict[str, tuple[type, ...]] = {
    "defaults": (Defaults,),
    "estimation": (Estimation,),
    "others": (Rule, NoneType),
    "damping": (Damping, NoneType),
}
#: the bound of a KL clip that was not given
_KL_CLIP = 1e-3


@dataclass(frozen=True)
class NamedRule:
    """A rule that `KFAC(rule=...)` takes by its name."""

    make: Callable[..., Rule]
    #: arguments of `KFAC` that its constructor takes
    takes: tuple[str, ...] = ()
    #: those that have no effect on it, so that they do no harm
    ignores: tuple[str, ...] = ()


#: rules by name; `Spectral` reads nothing of the outputs, so any likelihood goes with it
_RULES: dict[str, NamedRule] = {
    "natural": NamedRule(Natural, takes=("likelihood", "damping")),
    "eigenbasis": NamedRule(Eigenbasis, takes=("likelihood",)),
    "spectral": NamedRule(Spectral, takes=("damping",), ignores=("likelihood",)),
    "two-sided": NamedRule(TwoSided, takes=("likelihood", "damping")),
    "adam": NamedRule(AdamW),
}


@dataclass(frozen=True)
class Options:
    """What `KFAC` was told, checked; what was left out is the rule's default."""

    rule: Rule
    #: the rule for parameters that the first does not take
    others: Rule | None
    lr: float
    weight_decay: float
    statistics_every: int
    invert_every: int
    output: Selector
    grad_scaler: Any
    step: Step | None
    kl_clip: float | None
    metric: Metric
    reduction: str
    #: where covectors come from: "mc", "exact" or "empirical"
    fisher: str
    #: targets per sample of "mc"
    draws: int
    #: whether steps look at the loss again
    is_controlled: bool

    # --- what statistics read ---------------------------------------------------------------------

    @property
    def reads(self) -> Statistics:
        """Which statistics are taken."""
        return self.rule.reads

    @property
    def reads_metric(self) -> bool:
        """Whether statistics depend on which tensor is measured at the output, and how."""
        if self.reads is Statistics.INPUTS:
            return False
        return self.fisher != "empirical" or not isinstance(self.metric, Euclidean)

    @property
    def measures_diagonals(self) -> bool:
        """Whether parameters of no known layer are measured too."""
        return self.rule.accepts(Role.VECTOR)

    @property
    def sharing(self) -> Sharing:
        """How a layer's moments are formed."""
        return self.rule.estimation.make_sharing()

    @property
    def batch_dim(self) -> int:
        """The output's axis of samples."""
        return self.rule.estimation.batch_dim

    @property
    def joint(self) -> bool:
        """Whether weight and bias share a block."""
        return bool(self.rule.estimation.joint)

    @property
    def has_output_rows(self) -> bool:
        """Whether the rows of a block are always a layer's outputs."""
        return self.rule.distinguishes_sides

    @property
    def measures_spectrum(self) -> bool:
        """Whether second moments of the gradient are measured in bases of the rule."""
        return self.rule.estimation.measures_spectrum

    @property
    def accepts_scaled_loss(self) -> bool:
        """Whether a loss that is scaled does no harm: the scaler is known, or no length is read."""
        return self.grad_scaler is not None or self.others is not None

    # --- what the optimizer reads -----------------------------------------------------------------

    @property
    def group_defaults(self) -> dict[str, Any]:
        """What param groups have where they say nothing else."""
        defaults = {"lr": self.lr, "weight_decay": self.weight_decay}
        defaults |= self.rule.group_options()
        if self.others is not None:
            defaults |= {**self.others.group_options(), "rule": None}
        return defaults

    @property
    def common(self) -> dict[str, Any]:
        """What must be the same on all processes; param groups are compared by themselves."""
        per_process = ("grad_scaler", "output", "weight_decay", "rule")
        common = {n: v for n, v in vars(self).items() if n not in per_process}
        of_rule = {n: v for n, v in vars(self.rule).items() if n != "estimation"}
        of_estimation = {**vars(self.rule.estimation), "ema": self.rule.find_ema()}
        return {**common, **of_rule, **of_estimation, "rule": self.rule.name}


@dataclass(frozen=True)
class Arguments:
    """Arguments of `KFAC` as the user gave them; None stands for the rule's default."""

    rule: Rule | str | None
    likelihood: Any
    damping: Any
    lr: float | None
    weight_decay: float
    statistics_every: int | None
    invert_every: int | None
    output: Selector
    grad_scaler: Any
    step: Step | None

    def fill_in(self, defaults: Defaults) -> Defaults:
        """Return a rule's defaults, replaced by the rate of the step and the values of the user."""
        values: dict[str, Any] = {}
        if isinstance(self.step, Step):
            values["lr"] = self.step.initial_lr
        for name in ("lr", "statistics_every", "invert_every"):
            user_value = getattr(self, name)
            if user_value is not None:
                values[name] = user_value
        return replace(defaults, **values)


def resolve(model: nn.Module, arguments: Arguments) -> Options:
    """Return the options of these arguments of `KFAC`; raise for what is not usable."""
    step = arguments.step
    rule = choose_rule(model, arguments.rule, arguments.likelihood, arguments.damping, step)
    _check_types(rule)
    values = arguments.fill_in(rule.default_arguments())
    check(
        **vars(values), weight_decay=arguments.weight_decay, output=arguments.output,
        grad_scaler=arguments.grad_scaler, step=step,
    )  # fmt: skip
    _check_rule(rule)
    has_control = rule.damping is not None and rule.damping.is_controlled
    if step is not None:
        refuse_step(step, has_control=has_control)
    is_controlled = step is not None or has_control
    return Options(
        rule=rule,
        others=_find_others(rule),
        lr=values.lr,
        weight_decay=arguments.weight_decay,
        statistics_every=values.statistics_every,
        invert_every=values.invert_every,
        output=arguments.output,
        grad_scaler=arguments.grad_scaler,
        step=step,
        kl_clip=_find_kl_clip(rule, is_controlled=is_controlled),
        metric=rule.estimation.metric or choose_metric(None, None),
        reduction=rule.estimation.reduction or "mean",
        fisher=rule.estimation.fisher or "mc",
        draws=rule.estimation.draws,
        is_controlled=is_controlled,
    )


def _find_kl_clip(rule: Rule, *, is_controlled: bool) -> float | None:
    """Return the bound of the KL clip or None, which "auto" is if a closure controls the step."""
    kl_clip: Any = rule.kl_clip
    if kl_clip != "auto":
        return kl_clip
    if is_controlled:
        return None
    return _KL_CLIP


def _find_others(rule: Rule) -> Rule | None:
    """Return the rule for parameters that this one does not take; an elementwise one is its own.

    None for a rule of blocks that takes all parameters.
    """
    if not rule.accepts(Role.VECTOR):
        others = rule.others
        if others is None:
            others = AdamW()
        _check_types(others)
        _check_rule(others)
        return others
    if rule.is_elementwise:
        return rule
    return None


def choose_rule(
    model: nn.Module, rule: Rule | str | None, likelihood: Any, damping: Any, step: Any
) -> Rule:
    """Return the rule that was given, or that the other arguments and the model ask for.

    A likelihood, a damping or a step rule asks for `Natural`. Where there is nothing of the kind,
    transformers and other networks with normalizations take `Spectral`, and the rest `Eigenbasis`.
    """
    shortcuts = {"likelihood": likelihood, "damping": damping}
    shortcuts = {name: value for name, value in shortcuts.items() if value is not None}
    if rule is None:
        if shortcuts or step is not None:
            chosen = Natural(**shortcuts)
        else:
            chosen = default_rule(model)
    elif isinstance(rule, str) and rule in _RULES:
        chosen = _make_named_rule(rule, shortcuts)
    else:
        chosen = _check_rule_object(rule, shortcuts)
    if step is not None and chosen.damping is None:
        raise _make_option_error("step", chosen)
    return chosen


def _check_rule_object(rule: Any, shortcuts: dict[str, Any]) -> Rule:
    """Return the rule; raise if it is none, or if options stand beside it."""
    if not isinstance(rule, Rule):
        raise PullbackError(
            "rule= is not usable",
            f"got {describe_value(rule)}",
            f"Use one of {', '.join(_RULES)}, or a Rule",
        )
    if shortcuts:
        name = next(iter(shortcuts))
        raise PullbackError(
            f"{name}= was given beside {rule!r}",
            "a rule that is given as an object has its own options",
            f"Give it to the rule: Natural({name}=...)",
        )
    return rule


def _make_named_rule(name: str, shortcuts: dict[str, Any]) -> Rule:
    """Return the rule of this name with its shortcuts; raise for those that it does not have."""
    named_rule = _RULES[name]
    options: dict[str, Any] = {}
    for option, value in shortcuts.items():
        if option in named_rule.takes:
            options[option] = value
        elif option not in named_rule.ignores:
            raise _make_option_error(option, named_rule.make())
    return named_rule.make(**options)


def _make_option_error(option: str, rule: Rule) -> PullbackError:
    return PullbackError(
        f"{option}= does not go with {rule!r}",
        "another rule reads it",
        "Leave it out, or use rule='natural'",
    )


def default_rule(model: nn.Module) -> Rule:
    """Return the rule for a model of which nothing else is known.

    Behind a normalization the length of a weight has no effect, so that steps of their own
    size suit it. The output layer of a transformer may be a vocabulary, which is left to AdamW.
    """
    modules = list(model.modules())
    if any(isinstance(module, _OF_TRANSFORMERS) for module in modules):
        return Spectral()
    if any(isinstance(module, _NormBase) for module in modules):
        return Spectral(head=True, others=AdamW())
    return Eigenbasis()


def _check_rule(rule: Rule) -> None:
    """Raise for options of a rule, or of its estimation, that are not usable."""
    estimation = rule.estimation
    check(
        fisher=estimation.fisher, draws=estimation.draws, ema=rule.find_ema(),
        sharing=estimation.sharing, max_factor=estimation.max_factor,
        batch_dim=estimation.batch_dim, reduction=estimation.reduction, seed=estimation.seed,
        joint=estimation.joint, rate=rule.rate, warmup=rule.warmup, kl_clip=rule.kl_clip,
    )  # fmt: skip
    if rule.kl_clip is not None and rule.reads is not Statistics.INPUTS_AND_OUTPUTS:
        raise PullbackError(
            f"kl_clip of {rule!r} is not usable",
            f"the rule reads {rule.reads}, and F̂ has both factors",
            "Declare reads = Statistics.INPUTS_AND_OUTPUTS, or leave kl_clip out",
        )
    if rule.others is not None and not rule.others.is_elementwise:
        raise PullbackError(
            f"{rule.others!r} cannot be the rule for others",
            "it reads statistics, and not all parameters have any",
            "Use AdamW(), or another rule with is_elementwise = True",
        )


def _check_types(rule: Rule) -> None:
    """Raise for attributes of a rule that are of another type."""
    for name, expected in _TYPES.items():
        value = getattr(rule, name)
        if not isinstance(value, expected):
            usable = " or ".join(option.__name__ for option in expected)
            raise PullbackError(
                f"{name} of {rule!r} is not usable",
                f"it is {value!r}",
                f"Use {usable.replace('NoneType', 'None')}",
            )


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


def refuse_shards(options: Options) -> None:
    """Raise for options that do not go with a sharded model."""
    if options.is_controlled:
        raise PullbackError(
            "A controlled step does not go with a sharded model",
            "adaptive damping and rules of steps/ look at whole parameters",
            "Leave them out, or wrap the model in DistributedDataParallel",
        )
