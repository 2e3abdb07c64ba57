"""The optimizers of the races: a table of name ↦ (model, rate, settings) ↦ optimizers.

What an optimizer for hidden matrices leaves over (embeddings, head, gains) AdamW takes, at the
same rate; weights decay and gains do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pullback import KFAC
from pullback.likelihoods import Categorical
from pullback.optim.kfac import Eigenbasis, Rule, Spectral

from .stacked import SOAP, Muon

Settings = Mapping[str, Any]
#: (model, rate, settings of the constructor) ↦ optimizers that step one after the other
Build = Callable[[nn.Module, float, Settings], list[Optimizer]]

_OUTER = ("tokens", "places", "head", "patches", "stem")
_DECAY = 0.1


def hidden(model: nn.Module) -> list[nn.Parameter]:
    """Weights of linear and convolution layers but for the first and the last one."""
    return [p for name, p in model.named_parameters() if p.ndim > 1 and _inner(name)]


def _inner(name: str) -> bool:
    return not any(part in _OUTER for part in name.split("."))


def _adamw(params: Iterable[Tensor], lr: float, some: Settings) -> Optimizer:
    params = list(params)
    decaying = [p for p in params if p.ndim > 1]
    others = [p for p in params if p.ndim <= 1]
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    fused = any(p.is_cuda for p in params)
    own = {"betas": (0.9, 0.95), "weight_decay": _DECAY, "fused": fused, **some}
    return torch.optim.AdamW([g for g in groups if g["params"]], lr, **own)


def _rest(model: nn.Module, lr: float) -> Optimizer:
    taken = {id(p) for p in hidden(model)}
    return _adamw([p for p in model.parameters() if id(p) not in taken], lr, {})


def adamw(model: nn.Module, lr: float, some: Settings) -> list[Optimizer]:
    """AdamW for everything; fused on CUDA."""
    return [_adamw(model.parameters(), lr, some)]


def sgd(model: nn.Module, lr: float, some: Settings) -> list[Optimizer]:
    """With Nesterov's momentum."""
    own = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, **some}
    return [torch.optim.SGD(model.parameters(), lr, fused=_cuda(model), **own)]


def muon(model: nn.Module, lr: float, some: Settings) -> list[Optimizer]:
    """Muon for hidden matrices, in stacks; its steps are as large as AdamW's."""
    own = {"weight_decay": _DECAY, **some}
    rate = own.pop("rest_lr", lr)
    return [Muon(hidden(model), lr, **own), _rest(model, rate)]


def torch_muon(model: nn.Module, lr: float, some: Settings) -> list[Optimizer]:
    """Torch's own Muon: the same steps, matrix by matrix; for linear layers alone."""
    own = {"weight_decay": _DECAY, "adjust_lr_fn": "match_rms_adamw", **some}
    rate = own.pop("rest_lr", lr)
    return [torch.optim.Muon(hidden(model), lr, **own), _rest(model, rate)]


def soap(model: nn.Module, lr: float, some: Settings) -> list[Optimizer]:
    """SOAP for hidden matrices."""
    own = {"weight_decay": _DECAY, **some}
    rate = own.pop("rest_lr", lr)
    return [SOAP(hidden(model), lr, **own), _rest(model, rate)]


def natural(model: nn.Module, lr: float, some: Settings) -> list[Optimizer]:
    """K-FAC's natural step for everything."""
    own = {"likelihood": Categorical(), "kl_clip": 1e-4, "damping": 1e-2, **some}
    return [KFAC(model, lr, **own)]


def spectral(model: nn.Module, lr: float, some: Settings) -> list[Optimizer]:
    """K-FAC's input factor, then the polar factor."""
    return [_ruled(model, lr, Spectral, some)]


def eigenbasis(model: nn.Module, lr: float, some: Settings) -> list[Optimizer]:
    """Adam in the eigenbases of K-FAC's factors."""
    return [_ruled(model, lr, Eigenbasis, some)]


def _ruled(model: nn.Module, lr: float, rule: Callable[..., Rule], some: Settings) -> Optimizer:
    """KFAC by a rule, whose own settings are `rest` and those that begin with `rule_`."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": _DECAY}, {"params": others}]
    of_rule = [k for k in some if k == "rest" or k.startswith("rule_")]
    chosen = {k.removeprefix("rule_"): some[k] for k in of_rule}
    own: Any = {k: v for k, v in some.items() if k not in of_rule}
    params = [g for g in groups if g["params"]]
    return KFAC(model, lr, rule=rule(**chosen), params=params, **own)


OPTIMIZERS: dict[str, Build] = {
    "adamw": adamw,
    "muon": muon,
    "muon-0.9": lambda model, lr, some: muon(model, lr, {"momentum": 0.9, **some}),
    "muon-torch": torch_muon,
    "soap": soap,
    "sgd": sgd,
    "kfac-natural": natural,
    "kfac-spectral": spectral,
    "kfac-eigenbasis": eigenbasis,
}

OURS = ("kfac-spectral", "kfac-eigenbasis")


def _cuda(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda
