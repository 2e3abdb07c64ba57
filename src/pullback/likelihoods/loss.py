"""Torch's losses as likelihoods: the family whose metric is the loss's own Gauss–Newton metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .._core.errors import PullbackError, describe_value
from .base import Likelihood
from .categorical import Categorical
from .elementwise import MSE, Bernoulli, Poisson

Loss = Callable[..., Tensor]

#: losses by the function that computes them
_FUNCTIONS: dict[type[nn.Module], Loss] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
    nn.MSELoss: F.mse_loss,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
}
#: why others have none, and the remedy
_VARIANCE = (
    "how the variance depends on the outputs is not known",
    'Return (mean, log-variance) and use likelihoods.Gaussian(variance="learned")',
)
_PROBABILITIES = (
    "it takes probabilities, and Bernoulli takes logits",
    "Leave the sigmoid out of the model and use nn.BCEWithLogitsLoss()",
)
_RATES = "it takes rates, and Poisson takes their logarithms", "Use log_input=True"
_OTHER = (
    "it is none of those that have one",
    "Pass an object such as likelihoods.Categorical(), or a likelihoods.Likelihood of your own",
)
_REFUSED: dict[Any, tuple[str, str]] = {
    nn.GaussianNLLLoss: _VARIANCE,
    F.gaussian_nll_loss: _VARIANCE,
    nn.BCELoss: _PROBABILITIES,
    F.binary_cross_entropy: _PROBABILITIES,
    F.poisson_nll_loss: _RATES,
}


def from_loss(loss: Likelihood | Loss) -> Likelihood:
    r"""Return the likelihood whose metric at the outputs z is the Gauss–Newton metric of a loss.

    | loss | likelihood |
    |---|---|
    | `nn.CrossEntropyLoss`, `F.cross_entropy` | `Categorical(dim=None)`: M = diag(p) − ppᵀ |
    | `nn.NLLLoss`, `F.nll_loss` of log-probabilities | `Categorical(dim=None)` |
    | `nn.MSELoss`, `F.mse_loss` | `MSE()`: M = 2/m for m outputs per sample |
    | `nn.BCEWithLogitsLoss` and its function | `Bernoulli()`: M = σ(z)σ(−z) |
    | `nn.PoissonNLLLoss`, `F.poisson_nll_loss` | `Poisson()`: M = eᶻ |

    The classes are on axis 1, where these losses have them. Of a model that returns (N, ..., C) and
    flattens before the loss, the loss's first gradient shows that they are on the last one. Label
    smoothing leaves the Hessian as it is, and so do soft targets that add up to one.

    Args:
        loss: a loss module or function of torch, a `functools.partial` of one, or a likelihood,
            which is returned.

    Raises:
        PullbackError: no likelihood has this loss's metric. Weights of classes are an example.

    >>> from_loss(nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0))
    Categorical(dim=None, ignore_index=0)
    """
    if isinstance(loss, Likelihood):
        return loss
    function, options = _resolve(loss)
    for name in ("weight", "pos_weight"):
        if options.get(name) is not None:
            raise PullbackError(
                f"A loss with {name}= has no likelihood",
                "its metric depends on the targets, which a likelihood does not see",
                "Give metric=Weighted(Fisher(likelihood), weights), with one weight per sample, or "
                "the unweighted likelihood",
            )
    if function in (F.cross_entropy, F.nll_loss):
        return Categorical(dim=None, ignore_index=options.get("ignore_index", -100))
    if function is F.mse_loss:
        return MSE()
    if function is F.binary_cross_entropy_with_logits:
        return Bernoulli()
    if function is F.poisson_nll_loss and options.get("log_input", True):
        return Poisson()
    why, remedy = _OTHER
    if callable(function):
        why, remedy = _REFUSED.get(function, _OTHER)
    raise PullbackError("The loss has no likelihood", f"got {describe_value(loss)}; {why}", remedy)


def reduction_of(loss: Likelihood | Loss | None) -> str:
    """Return "sum" for a loss that adds up over samples, else "mean"."""
    _, options = _resolve(loss)
    if options.get("reduction") == "sum":
        return "sum"
    return "mean"


def _resolve(loss: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return torch's function for a loss, or the loss itself, and its options by name."""
    if isinstance(loss, partial):
        return loss.func, loss.keywords
    if not isinstance(loss, nn.Module):
        return loss, {}
    options = vars(loss) | dict(loss.named_buffers())
    classes = [key for key in (*_FUNCTIONS, *_REFUSED) if isinstance(key, type)]
    for cls in classes:
        if type(loss).forward is cls.forward:  # a subclass with a forward of its own is another
            return _FUNCTIONS.get(cls, cls), options
    return loss, options
