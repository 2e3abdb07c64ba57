"""The optimizers of the races: a table of name ↦ (model, rate, settings) ↦ optimizers.

What an optimizer for hidden matrices leaves over (embeddings, head, gains) AdamW takes, at the
same rate or at the share of it that the setting `rest` says. Weights decay by the setting
`weight_decay`; gains do not, but for those that SGD trains.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pullback import KFAC
from pullback.likelihoods import Categorical
from pullback.optim.kfac import AdamW, Eigenbasis, Rule, Spectral, TwoSided

from ..learning.natural import natural_kfac

Settings = Mapping[str, Any]
#: (model, rate, settings of the constructor) ↦ optimizers that step one after the other
Build = Callable[[nn.Module, float, Settings], list[Optimizer]]

_OUTER = ("tokens", "positions", "head", "patches", "stem")
_DECAY = 0.1


def hidden(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of linear and convolution layers without the first and the last one."""
    return [p for name, p in model.named_parameters() if p.ndim > 1 and _inner(name)]


def _inner(name: str) -> bool:
    return not any(component in _OUTER for component in name.split("."))


def _adamw(params: Iterable[Tensor], lr: float, settings: Settings) -> Optimizer:
    params = list(params)
    decaying = [p for p in params if p.ndim > 1]
    others = [p for p in params if p.ndim <= 1]
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    fused = any(p.is_cuda for p in params)
    options = {"betas": (0.9, 0.95), "weight_decay": _DECAY, "fused": fused, **settings}
    return torch.optim.AdamW([g for g in groups if g["params"]], lr, **options)


def _make_adamw_for_rest(model: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    hidden_ids = {id(p) for p in hidden(model)}
    others = [p for p in model.parameters() if id(p) not in hidden_ids]
    return _adamw(others, lr, {"weight_decay": weight_decay})


def adamw(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
    """AdamW for everything; fused on CUDA."""
    return [_adamw(model.parameters(), lr, settings)]


def sgd(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
    """SGD with Nesterov's momentum; all parameters decay."""
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, **settings}
    return [torch.optim.SGD(model.parameters(), lr, fused=_cuda(model), **options)]


def muon(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
    """Muon for hidden matrices, in stacks; its steps are as large as AdamW's."""
    options = {"weight_decay": _DECAY, **settings}
    share = options.pop("rest", 1.0)
    adamw_for_rest = _make_adamw_for_rest(model, share * lr, options["weight_decay"])
    return [Muon(hidden(model), lr, **options), adamw_for_rest]


def normuon(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
    """NorMuon for hidden matrices, in stacks."""
    options = {"weight_decay": _DECAY, **settings}
    share = options.pop("rest", 1.0)
    adamw_for_rest = _make_adamw_for_rest(model, share * lr, options["weight_decay"])
    return [NorMuon(hidden(model), lr, **options), adamw_for_rest]


def torch_muon(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
    """Torch's own Muon: the same steps, matrix by matrix; for linear layers alone."""
    options = {"weight_decay": _DECAY, "adjust_lr_fn": "match_rms_adamw", **settings}
    share = options.pop("rest", 1.0)
    adamw_for_rest = _make_adamw_for_rest(model, share * lr, options["weight_decay"])
    return [torch.optim.Muon(hidden(model), lr, **options), adamw_for_rest]


def soap(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
    """SOAP for hidden matrices."""
    options = {"weight_decay": _DECAY, **settings}
    share = options.pop("rest", 1.0)
    adamw_for_rest = _make_adamw_for_rest(model, share * lr, options["weight_decay"])
    return [SOAP(hidden(model), lr, **options), adamw_for_rest]


def natural(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
    """K-FAC's natural step for everything."""
    options = {"likelihood": Categorical(), "kl_clip": 1e-4, "damping": 1e-2, **settings}
    return [natural_kfac(model, lr, **options)]


def default(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
    """`KFAC(model)` as it is, but for the weight decay that all entrants have."""
    options = {"weight_decay": _DECAY, **settings}
    groups = make_decay_groups(model, options.pop("weight_decay"))
    return [KFAC(model, lr, params=groups, **options)]


def spectral(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
    """K-FAC's input factor, then the polar factor."""
    return [_make_kfac(model, lr, Spectral, settings)]


def two_sided(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
    """K-FAC's factors on both sides, then the polar factor."""
    return [_make_kfac(model, lr, TwoSided, settings)]


def eigenbasis(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
    """Adam in the eigenbases of K-FAC's factors, with the memories of the other entrants."""
    return [_make_kfac(model, lr, Eigenbasis, {"rule_betas": (0.9, 0.95), **settings})]


def _make_kfac(
    model: nn.Module, lr: float, rule: Callable[..., Rule], settings: Settings
) -> Optimizer:
    """KFAC by a rule, whose own settings begin with `rule_`.

    `rest` is the share of the rate for parameters that follow AdamW, `damping` the rule's own.
    """
    rule_options: dict[str, Any] = {}
    options: dict[str, Any] = {}
    weight_decay = _DECAY
    for name, value in settings.items():
        if name == "weight_decay":
            weight_decay = value
        elif name == "rest":
            rule_options["others"] = AdamW(rate=value)
        elif name == "damping" or name.startswith("rule_"):
            rule_options[name.removeprefix("rule_")] = value
        else:
            options[name] = value
    groups = make_decay_groups(model, weight_decay)
    return KFAC(model, lr, rule=rule(**rule_options), params=groups, **options)


def make_decay_groups(model: nn.Module, weight_decay: float = _DECAY) -> list[dict[str, Any]]:
    """Return param groups of KFAC: matrices decay, gains do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others}]
    return [g for g in groups if g["params"]]


def _preset(build: Build, **preset: Any) -> Build:
    """Return an optimizer of the table with these settings, unless a race has its own."""
    return lambda model, lr, settings: build(model, lr, {**preset, **settings})


OPTIMIZERS: dict[str, Build] = {
    "adamw": adamw,
    "muon": muon,
    "muon-0.9": _preset(muon, momentum=0.9),
    "muon-0.9-half": _preset(muon, momentum=0.9, rest=0.5),
    "muon-half": _preset(muon, rest=0.5),
    "muon-torch": torch_muon,
    "normuon": normuon,
    "normuon-0.9": _preset(normuon, momentum=0.9),
    "normuon-0.9-half": _preset(normuon, momentum=0.9, rest=0.5),
    "normuon-0.9-muon-length": _preset(normuon, momentum=0.9, rest=0.5, as_long_as_muon=True),
    "normuon-muon-length": _preset(normuon, rest=0.5, as_long_as_muon=True),
    "soap": soap,
    "sgd": sgd,
    "kfac-natural": natural,
    "kfac-spectral": spectral,
    "kfac-eigenbasis": eigenbasis,
    "kfac": default,
    "kfac-two-sided": two_sided,
    "kfac-two-sided-warm-up": _preset(two_sided, rule_warmup=10, damping=0.05),
    "kfac-two-sided-often": _preset(two_sided, rule_warmup=20, statistics_every=5, invert_every=10),
    "kfac-two-sided-often-gentle-start": _preset(
        two_sided, rule_gentle_start=True, rule_warmup=20, statistics_every=5, invert_every=10
    ),
    "kfac-gentle-start": _preset(spectral, rule_gentle_start=True),
    "kfac-two-sided-gentle-start": _preset(two_sided, rule_gentle_start=True),
    "kfac-plain-start": _preset(spectral, rule_gentle_start=False),
    "kfac-two-sided-plain-start": _preset(two_sided, rule_gentle_start=False),
    "kfac-adapt-0.99": _preset(spectral, rule_adapt=0.99),
    "kfac-rate-0.5": default,
    "kfac-rate-2": default,
}


def _cuda(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


class StackedOptimizer(Optimizer):
    """W ← (1 − ηλ)W − ηU, where U is found for all matrices of one shape at once.

    Torch's Muon goes from matrix to matrix, and computes in bfloat16 on every device; here few
    launches take the same steps, in float32 on the CPU.
    Parameters have two axes or more; an axis beyond the second is folded into the second. The
    state of a stack lies with its first matrix, so that the same parameters have gradients at
    every step.
    """

    @abstractmethod
    def direction(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """U from gradients (L, m, n) and the state of their stack."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on all matrices that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault((len(p), p.numel() // len(p)), []).append(p)
            for same_shape in shapes.values():
                self._move(same_shape, group)
        return loss

    def _move(self, params: list[Tensor], group: dict[str, Any]) -> None:
        grads = [p.grad.permute(p.dim_order()).flatten(1) for p in params if p.grad is not None]
        update = self.direction(torch.stack(grads).float(), self.state[params[0]], group)
        weights = [p.permute(p.dim_order()).view(len(p), -1) for p in params]  # in their own order
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, list(update.to(weights[0].dtype)), alpha=-group["lr"])


class Muon(StackedOptimizer):
    r"""Jordan et al. (2024): the polar factor of the momentum, by Newton–Schulz steps.

        M ← μM + (1 − μ)G,   U = 0.2 √max(m, n) · polar((1 − μ)G + μM)

    Entries of U have a root mean square of about 0.2 in every shape, and less where momentum has
    few directions, as at the start of training: `polar` leaves the smallest ones small. For a
    convolution m is the number of filters and n the number of entries of one.

    Args:
        params: matrices.
        lr: η, as large as AdamW's.
        momentum: μ.
        weight_decay: λ, decoupled.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 3e-3,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def direction(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not state:
            state["m"] = torch.zeros_like(g)
        m = state["m"].lerp_(g, 1 - group["momentum"])
        update = polar(g.lerp(m, group["momentum"]))
        return update * (0.2 * max(g.shape[1:]) ** 0.5)


class NorMuon(StackedOptimizer):
    r"""Li et al. (2025, arXiv:2510.05491): Muon with rows of one running length.

        M ← μM + (1 − μ)G,   O = polar((1 − μ)G + μM),   v ← β₂v + (1 − β₂) mean O² of each row
        U = 0.2 √(mn) · X/‖X‖,   X = O/√v

    The paper's O is the polar factor of M itself; that of Nesterov's momentum is as in `Muon`.
    Code by its authors has U = 0.2 √max(m, n) ‖O‖ · X/‖X‖ instead, as long as Muon's step, which
    is shorter at the start of training, the more so the wider a network is.

    Args:
        params: matrices.
        lr: η, as large as AdamW's.
        momentum: μ.
        beta2: β₂.
        weight_decay: λ, decoupled.
        as_long_as_muon: whether U is as in that code.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 3e-3,
        *,
        momentum: float = 0.95,
        beta2: float = 0.95,
        weight_decay: float = 0.1,
        as_long_as_muon: bool = False,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "beta2": beta2, "weight_decay": weight_decay}
        super().__init__(params, options)
        self._as_long_as_muon = as_long_as_muon

    def direction(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not state:
            state["m"] = torch.zeros_like(g)
            state["v"] = torch.zeros_like(g[:, :, :1])
        m = state["m"].lerp_(g, 1 - group["momentum"])
        o = polar(g.lerp(m, group["momentum"]))
        v = state["v"].lerp_(o.square().mean(2, keepdim=True), 1 - group["beta2"])
        x = o * (v + 1e-10).rsqrt()
        length = 0.2 * g[0].numel() ** 0.5
        if self._as_long_as_muon:
            length = 0.2 * max(g.shape[1:]) ** 0.5 * o.norm(dim=(1, 2), keepdim=True)
        return x * (length / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7))


def polar(x: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """UVᵀ of X = USVᵀ, by and large, for all X of a stack; singular values end in [0.7, 1.2].

    X ← aX + (bA + cA²)X with A = XXᵀ; in bfloat16 on CUDA.
    """
    a = 3.4445
    b = -4.775
    c = 2.0315
    if x.shape[-2] > x.shape[-1]:  # A is the smaller of the two products
        return polar(x.mT, steps, eps).mT
    y = x
    if y.is_cuda:
        y = y.bfloat16()
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        s = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(s, s, s, beta=b, alpha=c), y, beta=a)
    return y.to(x.dtype)


class SOAP(StackedOptimizer):
    r"""Vyas et al. (2024): Adam in the eigenbases of Shampoo's factors.

        L ← β₂L + (1 − β₂)GGᵀ,   R ← β₂R + (1 − β₂)GᵀG
        M ← β₁M + (1 − β₁)G,     V ← β₂V + (1 − β₂)(QᵀGP)²
        U = Q [ (QᵀMP)/(1 − β₁ᵗ) / (√(V/(1 − β₂ᵗ)) + ε) ] Pᵀ

    L and R begin as those of the first gradient, which takes no step, with its whole weight; code
    by its authors begins at zero. Q and P are their eigenvectors. Every
    `refresh_every` steps one step of orthogonal iteration renews them, Q ← qr(LQ), after the
    columns, and V with them, are put in the order of the eigenvalues diag QᵀLQ.

    Args:
        params: matrices.
        lr: η.
        betas: β₁ and β₂; β₂ is also that of the factors.
        eps: ε.
        weight_decay: λ, decoupled.
        refresh_every: steps between two renewals of the eigenbases.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 3e-3,
        *,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        refresh_every: int = 10,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "every": refresh_every,
        }
        super().__init__(params, defaults)

    def direction(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        left = g @ g.mT
        right = g.mT @ g
        if not state:
            state |= {"t": 0, "m": torch.zeros_like(g), "v": torch.zeros_like(g)}
            state |= {"left": left, "right": right}
            state["q"], state["p"] = _eigenvectors(g)
            return torch.zeros_like(g)
        state["t"] += 1
        q, p, m, v, t = (state[k] for k in ("q", "p", "m", "v", "t"))
        rotated = q.mT @ g @ p
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        scale = (v / (1 - beta2**t)).sqrt_().add_(group["eps"])
        update = q @ (q.mT @ m @ p).div_(scale).div_(1 - beta1**t) @ p.mT
        state["left"].lerp_(left, 1 - beta2)
        state["right"].lerp_(right, 1 - beta2)
        if t % group["every"] == 0:
            state["q"], rows = _refresh_basis(state["left"], q)
            state["p"], columns = _refresh_basis(state["right"], p)
            v = v.gather(1, rows[:, :, None].expand_as(v))
            state["v"] = v.gather(2, columns[:, None, :].expand_as(v))
        return update


def _eigenvectors(g: Tensor) -> tuple[Tensor, Tensor]:
    """Of GGᵀ and of GᵀG, the largest eigenvalues first: those of the longer side by QR of GᵀQ."""
    if g.shape[-2] > g.shape[-1]:
        p, q = _eigenvectors(g.mT)
        return q, p
    with _float32():
        q = torch.linalg.eigh(g @ g.mT)[1].flip(-1)
        return q, torch.linalg.qr(g.mT @ q, mode="complete")[0]


def _refresh_basis(s: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration, and the order that the columns of q are put in first."""
    with _float32():  # round-off of the largest eigenvalues would drown the smallest
        sq = s @ q
        order = (q * sq).sum(-2).argsort(-1, descending=True)
        return torch.linalg.qr(sq.gather(-1, order[:, None, :].expand_as(sq)))[0], order


@contextmanager
def _float32() -> Iterator[None]:
    """Products in full precision, whatever the training's."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
