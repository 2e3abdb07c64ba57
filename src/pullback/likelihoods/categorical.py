"""Softmax classification: the Fisher metric of `F.cross_entropy`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.errors import PullbackError
from .._core.factor import Factor, Whitened
from .._core.space import compute_dtype
from .base import Likelihood

_RUN = 256  # classes whose probabilities are added up first


class SoftmaxFactor(Factor):
    """S = diag(√p) − p √pᵀ, so that S Sᵀ = diag(p) − p pᵀ, from log-probabilities."""

    def __init__(self, log_p: Tensor, dim: int) -> None:
        self._log_p, self._dim = log_p, dim
        self._p, self._root = log_p.exp(), (0.5 * log_p).exp()
        self.white = tuple(log_p.shape[1:])

    def apply(self, r: Tensor) -> Tensor:
        weighted = self._root * r
        return weighted - self._p * weighted.sum(self._dim, keepdim=True)

    def transpose(self, v: Tensor) -> Tensor:
        mean = (self._p * v).sum(self._dim, keepdim=True)
        return self._root * (v - mean)

    def whiten(self, g: Tensor, eps: float | None = None) -> Whitened:
        """r = g/√p; g is in the range of S exactly when it sums to zero over the classes."""
        r = torch.where(g == 0, 0.0, g * (-0.5 * self._log_p).exp())
        excess = g.sum(self._dim).abs().max()
        limit = 10 * (eps or torch.finfo(g.dtype).eps) * g.shape[self._dim] * g.abs().max()
        return Whitened.if_valid(r, excess <= limit)


def chosen(p: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One class per row of probabilities (R, C), never one of probability 0: (R,).

    Of many classes first a run is chosen, then one of its classes: one pass over p is made, and
    nothing of its size is written.
    """
    classes, dtype = p.shape[1], compute_dtype(p.dtype)
    if classes <= 2 * _RUN:
        return _raced(p.to(dtype), generator)
    whole = classes // _RUN * _RUN
    runs = p[:, :whole].unflatten(1, (-1, _RUN)).sum(2, dtype=dtype)
    if whole < classes:
        runs = torch.cat([runs, p[:, whole:].sum(1, keepdim=True, dtype=dtype)], 1)
    start = _RUN * _raced(runs, generator)[:, None]
    index = start + torch.arange(_RUN, device=p.device)
    some = p.gather(1, index.clamp(max=classes - 1)).to(dtype)
    return start[:, 0] + _raced(some.where(index < classes, 0.0), generator)  # NaN stays inside


def _raced(p: Tensor, generator: torch.Generator | None) -> Tensor:
    """The class whose exponential clock of rate p rings first, which is c in a share p_c of all."""
    clocks = torch.empty_like(p).exponential_(generator=generator)
    return (p / clocks.clamp_(min=torch.finfo(p.dtype).tiny)).argmax(1)


class Categorical(Likelihood):
    """Logits z along `dim`; a sample is one counted position.

    `F.cross_entropy` on images or sequences, (N, C, ...), has its classes on axis 1: `dim=1`. A
    loss of softmax probabilities does not change where all logits of a position are raised, so that
    its gradient adds up to zero over the classes; where it does so along another axis than `dim`,
    that is an error. The first gradient tells: a loss with further terms may add up to zero
    elsewhere by and by, once its softmax has nothing left to learn. With `dim=None` the classes are
    on axis 1, as in torch's losses, or on the one axis that this gradient shows instead.

    Positions whose target was `ignore_index` receive no gradient from the loss; they are
    recognized by that and left out of the metric and of its mean. A further term that reaches
    every position (a z-loss, say) hides them: then mask the metric with `Weighted`.
    """

    halves = True  # torch's softmax adds up in float32
    _checked = False  # whether a gradient has shown that the axis is not the wrong one
    _shown = 1  # the axis where `dim` is None

    def __init__(self, dim: int | None = -1, ignore_index: int = -100) -> None:
        self.dim, self.ignore_index = dim, ignore_index

    def _axis(self, z: Tensor) -> int:
        """The class axis, counted from the end; axis 0 holds the samples."""
        dim = self._shown if self.dim is None else self.dim
        axis = dim if dim < 0 else dim - z.ndim
        if z.ndim < 2 or not -z.ndim < axis < 0 or z.shape[axis] < 2:
            raise PullbackError(
                "Categorical does not fit the model's output",
                f"axis {dim} of shape {tuple(z.shape)} does not hold two or more classes",
                "Set Categorical(dim=...), or use Bernoulli for a single logit",
            )
        return axis

    def factor(self, z: Tensor) -> Factor:
        axis = self._axis(z)
        return SoftmaxFactor(torch.log_softmax(z, axis), axis)

    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        moved = z.movedim(self._axis(z), 1)
        return F.cross_entropy(moved, y, ignore_index=self.ignore_index, reduction="none")

    def sample(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        p = torch.softmax(z.movedim(self._axis(z), -1), -1)
        return chosen(p.flatten(0, -2), generator).view(p.shape[:-1])

    def score(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """p − e_y, from one softmax, in the precision of z."""
        axis = self._axis(z)
        p = torch.softmax(z.detach(), axis)
        rows = p.movedim(axis, -1)
        y = chosen(rows.flatten(0, -2), generator).view(rows.shape[:-1]).unsqueeze(axis)
        return p.scatter_add_(axis, y, p.new_full((), -1.0).expand(y.shape))

    def samples(self, z: Tensor) -> int:
        return z.numel() // z.shape[self._axis(z)]

    def counted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        axis = self._checked_axis(z, cotangent)
        silent = _silent(cotangent, axis)
        if not bool(silent.any()):
            return None
        certain = torch.softmax(z, axis).amax(axis, keepdim=True) == 1
        counts = ~silent | certain
        return None if bool(counts.all()) else counts

    def uncounted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        return _silent(cotangent, self._checked_axis(z, cotangent)).any()

    def mismatch(self, z: Tensor, cotangent: Tensor) -> str:
        """Recognize outputs of a softmax, and squared errors to one-hot targets.

        Other terms in a loss make its gradient any vector, so only what cannot be an accident is
        said: rows z ≥ 0 that all add up to one, or a number s for which all rows of
        z − ∂loss/∂z / s are one-hot. Later gradients cannot tell: logits that are equal at first
        keep the sum they have, as cross-entropy does not change it.
        """
        axis, eps = self._checked_axis(z, cotangent), torch.finfo(z.dtype).eps
        dtype = compute_dtype(z.dtype)
        z, c = (t[:8].movedim(axis, -1).flatten(0, -2)[:64].to(dtype) for t in (z, cotangent))
        if len(z) < 4 or bool((z == z[0]).all()):
            return ""
        excess = z.sum(1) - 1
        if bool((z >= 0).all() & (excess.abs() <= min(32 * eps, 2**-6)).all()):
            return (
                "the outputs are probabilities, and Categorical takes logits. Leave the softmax "
                "out of the model: F.cross_entropy applies it"
            )
        s = (c.sum(1) @ excess) / excess.square().sum()
        y = z - c / s
        near = 64 * eps * (1 + z.abs().amax())
        one_hot = ((y - F.one_hot(y.argmax(1), y.shape[1])).abs() <= near).all()
        if bool((s > 0) & (near < 0.05) & one_hot):
            return (
                "its gradient is that of a squared error, and Categorical is the metric of "
                "F.cross_entropy. Use likelihood=nn.MSELoss()"
            )
        return ""

    def _checked_axis(self, z: Tensor, cotangent: Tensor) -> int:
        """The class axis, held against the first gradients of the loss until one tells."""
        if z.ndim > 2 and not self._checked:
            self._checked = self._check_axis(cotangent[:8], self._axis(z))
        return self._axis(z)

    def _check_axis(self, cotangent: Tensor, axis: int) -> bool:
        """Hold the axis against a gradient; False where that is zero or not finite.

        Where it adds up to zero along another axis, not along ours, that one is taken if `dim` is
        None and there is but one; else it is an error. So is an axis None that nothing shows.
        """
        c = cotangent.to(compute_dtype(cotangent.dtype))
        axes = [a for a in range(1 - c.ndim, 0) if c.shape[a] > 1]
        total = torch.linalg.vector_norm(c, 1)
        shares = torch.stack([torch.linalg.vector_norm(c.sum(a), 1) for a in axes]) / total
        left = dict(zip(axes, shares.tolist(), strict=True))  # NaN where the loss ignored all
        # half precision leaves an ε; random signs leave 1/√T along T places, which must be more
        limit = min(100 * torch.finfo(cotangent.dtype).eps, 0.005)
        zero = [a + c.ndim for a in axes if left[a] <= limit]
        wrong = bool(zero) and left[axis] > 5 * limit
        if wrong and self.dim is None and len(zero) == 1:
            self._shown = zero[0] - c.ndim
        elif wrong:
            raise PullbackError(
                "Categorical does not fit the loss",
                f"the loss's gradient adds up to zero along axis {zero[0]} of the output, samples "
                f"first, as over classes, but not along axis {axis + c.ndim}",
                f"Set Categorical(dim={zero[0]})",
            )
        elif self.dim is None and min(left.values()) > 5 * limit:
            raise PullbackError(
                "The loss does not show which axis has the classes",
                "its gradient adds up to zero along no axis of the output, so that it has other "
                "terms beside a cross entropy",
                "Set likelihood=Categorical(dim=...): 1 for (N, classes, ...), -1 for classes last",
            )
        return left[axis] >= 0


def _silent(cotangent: Tensor, axis: int) -> Tensor:
    """The positions that received no gradient."""
    return torch.linalg.vector_norm(cotangent, torch.inf, axis, keepdim=True) == 0
