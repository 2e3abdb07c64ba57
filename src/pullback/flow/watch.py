"""The gradient of a classifier's closure where it is certain: mended, or known to be lost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..likelihoods import Bernoulli, Categorical
from ..metrics import Fisher
from ..optim import NaturalGradient

_SURE = 1e-4  # the probability of the other classes from which on p − y is looked at
_ULPS = 4


class Watch:
    """A closure's ∂ℓ/∂z, followed while it runs, for Fisher metrics of classifiers.

    Autograd's w(p − y) has the absolute round-off of p: its digits go as p nears 1, and from logits
    of about 37 on it is zero, while the natural gradient is not (zero over zero). A gradient that
    is w(p − y) to that round-off, for the weight w of a sum or a mean, is replaced by the same in
    full precision. Where it is zero nothing is left to say which y it was.
    """

    def __init__(self, model: nn.Module, optimizer: NaturalGradient | None) -> None:
        metric = None if optimizer is None else optimizer.metric
        self._likelihood = metric.likelihood if isinstance(metric, Fisher) else None
        self._model, self._lost = model, 0
        self._hook: Any = None

    def __enter__(self) -> Watch:
        if isinstance(self._likelihood, (Bernoulli, Categorical)):
            # first, so that whoever records the cotangent receives the mended one
            self._hook = self._model.register_forward_hook(self._follow, prepend=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _follow(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        z = output.detach()

        def mend(g: Tensor) -> Tensor | None:
            if isinstance(self._likelihood, Bernoulli):
                exact, sure = _bernoulli(z, g)
                silent = g == 0
            elif z.ndim == 2 and g.shape == z.shape:
                exact, sure = _categorical(z, g)
                silent = (g == 0).all(1, keepdim=True)
            else:
                return None
            self._lost += int((sure & silent).sum())
            eps = torch.finfo(g.dtype).eps
            for count in (1, z.shape[0], z.numel()):
                near = (g - exact / count).abs() <= _ULPS * eps / count
                if bool((near | silent | ~sure).all()):
                    return torch.where(sure & ~silent, exact / count, g)
            return None

        output.register_hook(mend)

    def rounded(self) -> str:
        """The reason to stop, or nothing."""
        if not self._lost:
            return ""
        return (
            f"the loss's gradient p − y rounded to zero at {self._lost} outputs whose logits are "
            "beyond about ±37 (flow.Supervised goes on from there)"
        )


def _bernoulli(z: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """σ(z) − y with the y that the sign of g tells, and where it is small."""
    exact = torch.where(g < 0, -torch.sigmoid(-z), torch.sigmoid(z))
    sure = torch.where(g == 0, torch.sigmoid(z.abs()) == 1, exact.abs() < _SURE)
    return exact, sure


def _categorical(z: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """p − e_y with the y at which g is negative, and in which rows it is small."""
    log_p = z.log_softmax(1)
    y = g.argmin(1, keepdim=True)
    others = log_p.scatter(1, y, -torch.inf).logsumexp(1, keepdim=True).exp()
    exact = log_p.exp().scatter(1, y, -others)
    lost = z.softmax(1).amax(1, keepdim=True) == 1
    silent = (g == 0).all(1, keepdim=True)
    return exact, torch.where(silent, lost, others < _SURE).expand_as(z)
