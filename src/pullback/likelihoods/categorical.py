"""Softmax classification: the Fisher metric of `F.cross_entropy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.errors import PullbackError
from .._core.factor import Factor, Whitened
from .._core.space import compute_dtype
from .base import Likelihood


@dataclass(frozen=True)
class CategoricalLimits:
    """How classes are drawn, and when a gradient shows a mistake."""

    #: classes of a run, whose probabilities are added up first: a vocabulary of 65,536 is as many
    #: runs as a run has classes, which makes both sums shortest
    run: int = 256
    #: units of round-off, per class, that a g in the range of S may sum to: an exponential, a
    #: quotient and a scale round a few times each
    range_round_off: float = 10.0
    #: samples that are enough to judge a gradient, and positions of them
    judged_samples: int = 8
    judged_positions: int = 64
    fewest_positions: int = 4
    #: units of round-off by which probabilities may miss the sum one, and at most this number
    sum_round_off: float = 32.0
    largest_sum_error: float = 2**-6
    #: units of round-off by which a target may miss one-hot, and at most this number
    one_hot_round_off: float = 64.0
    largest_one_hot_error: float = 0.05
    #: units of round-off by which sums over classes may miss zero, at most 0.005: random signs
    #: leave 1/√T along T positions, which must be more
    zero_round_off: float = 100.0
    largest_zero_error: float = 0.005
    #: a sum of this many times the limit is certainly not zero
    certainly_nonzero: float = 5.0


_LIMITS = CategoricalLimits()


class SoftmaxFactor(Factor):
    """S = diag(√p) − p √pᵀ, so that S Sᵀ = diag(p) − p pᵀ, from log-probabilities."""

    def __init__(self, log_p: Tensor, dim: int) -> None:
        self._log_p = log_p
        self._dim = dim
        self._p = log_p.exp()
        self._root = (0.5 * log_p).exp()
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
        round_off = _LIMITS.range_round_off * (eps or torch.finfo(g.dtype).eps)
        limit = round_off * g.shape[self._dim] * g.abs().max()
        return Whitened.if_valid(r, excess <= limit)


def draw_classes(p: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return one class per row of probabilities (R, C), never one of probability 0: (R,).

    Many classes are cut into runs of neighbours. A run is drawn first, then one of its classes: p
    is read once, and nothing of its size is written. Rows with NaN give some class.
    """
    class_count = p.shape[1]
    dtype = compute_dtype(p.dtype)
    run_length = _LIMITS.run
    if class_count <= 2 * run_length:
        return _draw_by_race(p.to(dtype), generator)
    in_full_runs = class_count // run_length * run_length
    run_sums = p[:, :in_full_runs].unflatten(1, (-1, run_length)).sum(2, dtype=dtype)
    if in_full_runs < class_count:
        last_sum = p[:, in_full_runs:].sum(1, keepdim=True, dtype=dtype)
        run_sums = torch.cat([run_sums, last_sum], 1)
    first_class = run_length * _draw_by_race(run_sums, generator)[:, None]
    run_classes = first_class + torch.arange(run_length, device=p.device)
    run_probabilities = p.gather(1, run_classes.clamp(max=class_count - 1)).to(dtype)
    run_probabilities = run_probabilities.where(run_classes < class_count, 0.0)
    return first_class[:, 0] + _draw_by_race(run_probabilities, generator)


def _draw_by_race(p: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the class whose exponential clock of rate p rings first: c with probability p_c."""
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

    scores_in_half_precision = True  # torch's softmax adds up in float32
    #: whether a gradient has shown that the axis is not the wrong one
    _is_axis_checked = False
    #: the axis where `dim` is None
    _inferred_dim = 1

    def __init__(self, dim: int | None = -1, ignore_index: int = -100) -> None:
        self.dim = dim
        self.ignore_index = ignore_index

    def _axis(self, z: Tensor) -> int:
        """Return the class axis, counted from the end; axis 0 is that of samples."""
        dim = self._inferred_dim if self.dim is None else self.dim
        axis = dim if dim < 0 else dim - z.ndim
        if z.ndim < 2 or not -z.ndim < axis < 0 or z.shape[axis] < 2:
            raise PullbackError(
                "Categorical does not fit the model's output",
                f"axis {dim} of shape {tuple(z.shape)} does not hold two or more classes",
                "Set Categorical(dim=...), or use Bernoulli for a single logit; if these are the "
                "classes of one sample, give the model a batch, x[None]",
            )
        return axis

    def constructor_arguments(self) -> dict[str, Any]:
        """Arguments of an equal likelihood; an axis that a gradient has shown is one of them."""
        dim = self.dim
        if dim is None and self._is_axis_checked:
            dim = self._inferred_dim
        return {"dim": dim, "ignore_index": self.ignore_index}

    def probabilities(self, z: Tensor) -> Tensor:
        """Return the class probabilities of logits, in the shape of z."""
        return torch.softmax(z, self._axis(z))

    def factor(self, z: Tensor) -> Factor:
        axis = self._axis(z)
        return SoftmaxFactor(torch.log_softmax(z, axis), axis)

    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        moved = z.movedim(self._axis(z), 1)
        return F.cross_entropy(moved, y, ignore_index=self.ignore_index, reduction="none")

    def sample(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        p = torch.softmax(z.movedim(self._axis(z), -1), -1)
        return draw_classes(p.flatten(0, -2), generator).view(p.shape[:-1])

    def score(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """p − e_y, from one softmax, in the precision of z."""
        axis = self._axis(z)
        p = torch.softmax(z.detach(), axis)
        rows = p.movedim(axis, -1)
        y = draw_classes(rows.flatten(0, -2), generator).view(rows.shape[:-1]).unsqueeze(axis)
        return p.scatter_add_(axis, y, p.new_full((), -1.0).expand(y.shape))

    def samples(self, z: Tensor) -> int:
        return z.numel() // z.shape[self._axis(z)]

    def counted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        axis = self._check_axis(z, cotangent)
        is_silent = _is_silent(cotangent, axis)
        if not bool(is_silent.any()):
            return None
        is_certain = torch.softmax(z, axis).amax(axis, keepdim=True) == 1
        is_counted = ~is_silent | is_certain
        if bool(is_counted.all()):
            return None
        return is_counted

    def has_uncounted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        return _is_silent(cotangent, self._check_axis(z, cotangent)).any()

    def mismatch(self, z: Tensor, cotangent: Tensor) -> str:
        """Recognize outputs of a softmax, and squared errors to one-hot targets.

        Other terms in a loss make its gradient any vector, so that only what cannot be an accident
        is reported: rows z ≥ 0 that all add up to one, or a number s for which all rows of
        z − ∂loss/∂z / s are one-hot. Later gradients show nothing: logits that are equal at first
        keep their sum, as cross-entropy does not change it.
        """
        axis = self._check_axis(z, cotangent)
        eps = torch.finfo(z.dtype).eps
        z = _take_positions(z, axis)
        c = _take_positions(cotangent, axis).to(z.dtype)
        if len(z) < _LIMITS.fewest_positions or bool((z == z[0]).all()):
            return ""
        excess = z.sum(1) - 1
        sum_error = min(_LIMITS.sum_round_off * eps, _LIMITS.largest_sum_error)
        if bool((z >= 0).all() & (excess.abs() <= sum_error).all()):
            return (
                "the outputs are probabilities, and Categorical takes logits. Leave the softmax "
                "out of the model: F.cross_entropy applies it"
            )
        s = (c.sum(1) @ excess) / excess.square().sum()
        y = z - c / s
        one_hot_error = _LIMITS.one_hot_round_off * eps * (1 + z.abs().amax())
        is_one_hot = ((y - F.one_hot(y.argmax(1), y.shape[1])).abs() <= one_hot_error).all()
        is_exact = one_hot_error < _LIMITS.largest_one_hot_error
        if bool((s > 0) & is_exact & is_one_hot):
            return (
                "its gradient is that of a squared error, and Categorical is the metric of "
                "F.cross_entropy. Use likelihood=nn.MSELoss()"
            )
        return ""

    def _check_axis(self, z: Tensor, cotangent: Tensor) -> int:
        """Return the class axis, compared with the first gradients until one is conclusive."""
        if z.ndim > 2 and not self._is_axis_checked:
            first = cotangent[: _LIMITS.judged_samples]
            self._is_axis_checked = self._settle_axis(first, self._axis(z))
        return self._axis(z)

    def _settle_axis(self, cotangent: Tensor, axis: int) -> bool:
        """Compare the axis with a gradient; return False if that is zero or not finite.

        If the gradient adds up to zero along another axis and not along ours, that one is taken,
        provided that `dim` is None and there is but one; otherwise it is an error. With `dim` None
        it is an error too if the gradient adds up to zero along no axis.
        """
        sums = _sum_along_axes(cotangent)
        round_off = _LIMITS.zero_round_off * torch.finfo(cotangent.dtype).eps
        zero = min(round_off, _LIMITS.largest_zero_error)
        nonzero = _LIMITS.certainly_nonzero * zero
        zero_axes = [a + cotangent.ndim for a, total in sums.items() if total <= zero]
        if zero_axes and sums[axis] > nonzero:
            if self.dim is None and len(zero_axes) == 1:
                self._inferred_dim = zero_axes[0] - cotangent.ndim
                return True
            raise PullbackError(
                "Categorical does not fit the loss",
                f"the loss's gradient adds up to zero along axis {zero_axes[0]} of the output, "
                f"samples first, as over classes, but not along axis {axis + cotangent.ndim}",
                f"Set Categorical(dim={zero_axes[0]})",
            )
        if self.dim is None and min(sums.values()) > nonzero:
            raise PullbackError(
                "The loss does not show which axis has the classes",
                "its gradient adds up to zero along no axis of the output, so that it has other "
                "terms beside a cross entropy",
                "Set likelihood=Categorical(dim=...): 1 for (N, classes, ...), -1 for classes last",
            )
        return sums[axis] >= 0


def _sum_along_axes(cotangent: Tensor) -> dict[int, float]:
    """Return |Σ cotangent| along each axis but the first, relative to Σ |cotangent|.

    The numbers are NaN where the loss ignored all positions. Axes are counted from the end.
    """
    c = cotangent.to(compute_dtype(cotangent.dtype))
    axes = [a for a in range(1 - c.ndim, 0) if c.shape[a] > 1]
    total = torch.linalg.vector_norm(c, 1)
    sums = [torch.linalg.vector_norm(c.sum(a), 1) for a in axes]
    return dict(zip(axes, (torch.stack(sums) / total).tolist(), strict=True))


def _take_positions(t: Tensor, axis: int) -> Tensor:
    """Return a few positions of the first samples, classes last: (positions, C)."""
    rows = t[: _LIMITS.judged_samples].movedim(axis, -1).flatten(0, -2)
    return rows[: _LIMITS.judged_positions].to(compute_dtype(t.dtype))


def _is_silent(cotangent: Tensor, axis: int) -> Tensor:
    """Return a mask of the positions that received no gradient."""
    return torch.linalg.vector_norm(cotangent, torch.inf, axis, keepdim=True) == 0
