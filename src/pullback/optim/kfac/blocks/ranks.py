r"""Large layers and small batches: the gradient Δᵀā preconditioned from its own factors.

For P places and a weight (O, I) the product R⁻¹(Δᵀā)C⁻¹ takes O·I·(O + I) multiplications, while
(R⁻¹Δᵀ)(āC⁻¹) takes P·(O² + I² + O·I): less where the batch is smaller than the layer. `p.grad` is
the truth, so a random projection of it must be that of c·Δᵀā for some c (a clipped or unscaled
gradient) up to round-off, or the layer goes the usual way. So it does where gradients have 16 bits:
what a regularizer adds to them could not be told from round-off.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...._core.capture import plain
from ...._core.space import compute_dtype
from ..statistics.sums import Key
from .inverse import Inverse

_GAIN = 2  # how much cheaper the factors must be
_SMALLEST = 2**18  # entries of a weight from which it matters
_SMALLEST_CUDA = 2**25  # where to find out whether the factors hold is to wait for the device
_ROUNDING = 32  # ε that two ways to sum up a gradient differed by at most, with a factor of 2


@dataclass
class Factors:
    """What a weight met since the last step: inputs (P, I) and cotangents (P, O), call by call."""

    inputs: list[Tensor] = field(default_factory=list)
    cotangents: list[Tensor] = field(default_factory=list)

    @property
    def places(self) -> int:
        """P, over all calls."""
        return sum(len(a) for a in self.inputs)


def _large(weight: Tensor) -> bool:
    """Whether it matters at all."""
    return weight.numel() >= (_SMALLEST_CUDA if weight.is_cuda else _SMALLEST)


def pays(weight: Tensor, places: int) -> bool:
    """Whether there are few enough places."""
    if not _large(weight):
        return False
    o, i = weight.shape
    return _GAIN * places * (o * o + i * i + o * i) <= o * i * (o + i)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


@dataclass(frozen=True)
class Low:
    """Δ and ā of a block, with p.grad = scale·Δᵀā if `holds`, which is yet to be looked at."""

    delta: Tensor
    inputs: Tensor
    scale: Tensor
    holds: Tensor

    def __call__(self, inverse: Inverse) -> list[Tensor]:
        """R⁻¹ΔᵀāC⁻¹: weight (O, I), and bias (O,) where it is joined."""
        inverse = inverse.widened()
        left, right = inverse.left, inverse.right
        assert left is not None
        assert right is not None
        d = self.scale * (self.delta * left[0] if left.ndim == 2 else self.delta @ left[0])
        a = self.inputs * right[0] if right.ndim == 2 else self.inputs @ right[0]
        if inverse.border is None or inverse.corner is None:
            return [d.T @ a]
        q, s = inverse.border[0], inverse.corner[0]
        return [d.T @ (a + q), d.T @ (self.inputs @ q + s)]


class Hook:
    """Records a layer's use for `Ranks`, held weakly; copies and pickles leave it behind."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = None if ranks is None else weakref.ref(ranks)

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        ranks = self._ranks
        if torch.compiler.is_compiling() or ranks is None or len(args) != 1:
            return
        if not isinstance(output, Tensor) or not output.requires_grad or output.ndim < 2:
            return
        weight, precise = module.weight, compute_dtype(output.dtype) == output.dtype
        if not precise or not pays(weight, args[0].shape[:-1].numel()):
            return
        number, x = id(weight), args[0].detach()

        def receive(delta: Tensor) -> None:
            if (owner := ranks()) is not None:
                held = owner.factors.setdefault(number, Factors())
                held.inputs.append(x.flatten(0, -2))
                held.cotangents.append(delta.detach().flatten(0, -2))

        output.register_hook(receive)

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> Any:
        return Hook, ()


class Ranks:
    """Watches the large linear layers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.factors: dict[int, Factors] = {}
        large = [m for m in plain(model).modules() if type(m) is nn.Linear]
        self._handles = [m.register_forward_hook(Hook(self)) for m in large if _large(m.weight)]
        self._finish = weakref.finalize(self, _remove, self._handles)

    def close(self) -> None:
        """Remove the hooks."""
        self._finish()
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self.factors = {}

    def low(
        self, inverses: Mapping[Key, Inverse], parameters: Mapping[str, Tensor]
    ) -> dict[Key, Low]:
        """The blocks whose gradient is at hand in factors, and is cheaper so."""
        out = {}
        if not self.factors:
            return out
        for key, inverse in inverses.items():
            weight = parameters[key.names[0]]
            held = self.factors.get(id(weight))
            plain = inverse.scale is None and not inverse.factors
            usable = key.kind == "kronecker" and plain and weight.grad is not None
            if held is not None and usable and pays(weight, held.places):
                biases = [parameters[n].grad for n in key.names[1:]]
                if all(b is not None for b in biases) and inverse.left is not None:
                    out[key] = _low(held, weight.grad, biases, inverse.dtype)
        return out


def _low(held: Factors, weight: Any, biases: list[Any], dtype: torch.dtype) -> Low:
    delta = torch.cat(held.cotangents).to(dtype)
    inputs = torch.cat(held.inputs).to(dtype)
    gradient = weight.to(dtype)
    # a fixed vector with entries of all signs, so that no random state is touched
    probe = torch.cos(torch.arange(1, inputs.shape[1] + 1, device=delta.device, dtype=dtype))
    want, got = gradient @ probe, delta.T @ (inputs @ probe)
    if biases:
        want, got = want + biases[0].to(dtype), got + delta.sum(0)
    tiny = torch.finfo(dtype).tiny
    scale = (want @ got) / (got @ got).clamp(min=tiny)
    rounding = _ROUNDING * max(torch.finfo(d).eps for d in (dtype, weight.dtype))
    holds = (want - scale * got).norm() <= rounding * want.norm()
    return Low(delta, inputs, scale, holds)
