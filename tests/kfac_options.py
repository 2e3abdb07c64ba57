"""K-FAC with the options of its rule given flatly, for tables of options."""

from dataclasses import fields
from typing import Any

import pullback as pb
from pullback.optim.kfac import AdamW, Eigenbasis, Estimation, Natural, Rule, Spectral, TwoSided

_ESTIMATION = {f.name for f in fields(Estimation)} - {"fisher", "metric"}
_OWN: dict[str, tuple[str, ...]] = {
    "natural": (
        "likelihood", "metric", "fisher", "damping", "momentum", "kl_clip", "ekfac", "warmup",
    ),
    "eigenbasis": ("betas", "eps", "likelihood", "metric", "fisher"),
    "spectral": ("damping",),
    "two-sided": ("damping",),
    "adam": ("betas",),
}  # fmt: skip
_KINDS: dict[str, Any] = {
    "natural": Natural, "eigenbasis": Eigenbasis, "spectral": Spectral,
    "two-sided": TwoSided, "adam": AdamW,
}  # fmt: skip


def kfac_of(model: Any, lr: float | None = None, *, rule: Any = None, **options: Any) -> pb.KFAC:
    """Return `KFAC` with a rule that has those of the options that are the rule's.

    Without a rule, an option of the natural gradient asks for it. Its steps then follow the given
    schedule from the first on (`warmup=0`), unless told otherwise.
    """
    options = {name: value for name, value in options.items() if not _is_unset(name, value)}
    if rule is None and not options.keys().isdisjoint({*_OWN["natural"], "joint", "step"}):
        rule = "natural"
    if isinstance(rule, str) and rule in _KINDS:
        rule, options = _build_rule(rule, options)
    return pb.KFAC(model, lr, rule=rule, **options)


def _is_unset(name: str, value: Any) -> bool:
    return value is None and name in ("likelihood", "damping")


def _build_rule(name: str, options: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    """Return the rule with its own options, and the options that remain for KFAC."""
    estimation = {n: options[n] for n in options if n in _ESTIMATION}
    rule_options = {n: options[n] for n in options if n in _OWN[name]}
    remaining = {n: options[n] for n in options if n not in {*estimation, *rule_options}}
    if name == "natural":
        rule_options.setdefault("warmup", 0)
    if name in ("spectral", "two-sided"):
        remaining.pop("likelihood", None)
        if "betas" in remaining:
            others = _KINDS[name]().others
            rule_options["others"] = AdamW(remaining.pop("betas"), rate=others.rate)
        if estimation:
            estimation.setdefault("ema", 0.8)
    if estimation:
        rule_options["estimation"] = Estimation(**estimation)
    return _KINDS[name](**rule_options), remaining
