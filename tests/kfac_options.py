"""K-FAC with the options of its rule given flatly, for tables of options."""

from dataclasses import fields
from typing import Any

import pullback as pb
from pullback.optim.kfac import AdamW, Eigenbasis, Estimation, Natural, Rule, Spectral

_ESTIMATION = {f.name for f in fields(Estimation)} - {"fisher", "metric", "joint"}
_OWN: dict[str, tuple[str, ...]] = {
    "natural": (
        "likelihood", "metric", "fisher", "damping", "momentum", "kl_clip", "ekfac", "joint",
        "warmup",
    ),
    "eigenbasis": ("betas", "eps", "likelihood", "metric", "fisher"),
    "spectral": ("damping",),
    "adam": ("betas",),
}  # fmt: skip
_KINDS: dict[str, Any] = {
    "natural": Natural, "eigenbasis": Eigenbasis, "spectral": Spectral, "adam": AdamW
}  # fmt: skip


def kfac_of(model: Any, lr: float | None = None, *, rule: Any = None, **options: Any) -> pb.KFAC:
    """Return `KFAC` with a rule that has those of the options that are the rule's.

    Without a rule, an option of the natural gradient asks for it. Its steps then follow the given
    schedule from the first on (`warmup=0`), unless told otherwise.
    """
    for name in ("likelihood", "damping"):
        if options.get(name, 0) is None:
            options.pop(name)
    if isinstance(rule, Rule):
        return pb.KFAC(model, lr, rule=rule, **options)
    if rule is None and not options.keys().isdisjoint({*_OWN["natural"], "step"}):
        rule = "natural"
    if rule not in _KINDS:
        return pb.KFAC(model, lr, rule=rule, **options)
    estimation = {n: options.pop(n) for n in list(options) if n in _ESTIMATION}
    own = {n: options.pop(n) for n in list(options) if n in _OWN[rule]}
    if rule == "natural":
        own.setdefault("warmup", 0)
    if rule == "spectral":
        options.pop("likelihood", None)
    if "betas" in options and rule == "spectral":
        own["others"] = AdamW(options.pop("betas"), rate=0.5)
    if estimation:
        given = {"ema": 0.8, **estimation} if rule == "spectral" else estimation
        own["estimation"] = Estimation(**given)
    return pb.KFAC(model, lr, rule=_KINDS[rule](**own), **options)
