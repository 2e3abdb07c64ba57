"""A tensor with its derivatives in the network's inputs, for any module made of known operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .scheme import Scheme


class Unsupported(Exception):
    """An operation without a rule for jets."""


@dataclass(frozen=True)
class Used:
    """One use of a linear layer: the channels of its input and output, the bias in the value."""

    weight: str | None
    bias: str | None
    input: Jet
    output: Jet


@dataclass
class Tape:
    """Linear layers met on the way, by the names of their parameters."""

    names: dict[int, str]
    uses: list[Used] = field(default_factory=list)

    def name(self, tensor: Tensor | None) -> str | None:
        """The parameter that this tensor is, if any."""
        return None if tensor is None else self.names.get(id(tensor))


Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}


def rule(*functions: Any):
    """Decorator: how these functions of torch act on jets."""

    def enter(act: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, act))
        return act

    return enter


class Jet:
    """A value, its first derivatives (m, *shape) and the higher ones, in the scheme's order.

    Modules see an ordinary tensor of the value's shape: torch's functions are sent to the rules of
    this package.
    """

    def __init__(
        self,
        value: Tensor,
        first: Tensor,
        higher: Sequence[Tensor],
        scheme: Scheme,
        tape: Tape | None = None,
    ) -> None:
        self.value, self.first, self.higher = value, first, tuple(higher)
        self.scheme, self.tape = scheme, tape

    @classmethod
    def input(cls, x: Tensor, scheme: Scheme, tape: Tape | None = None) -> Jet:
        """The coordinates themselves: ∂_i x = e_i, and nothing above."""
        axes = [index[0] for index in scheme.indices[scheme.first]]
        units = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)[axes]
        # the same at every point: held once, until an operation tells the points apart
        zeros = [torch.zeros_like(x[:1])] * (len(scheme) - 1 - len(axes))
        return cls(x, units[:, None], zeros, scheme, tape)

    def full(self) -> Jet:
        """Every channel in the value's shape."""
        return self.each(lambda x, n: x.expand(*x.shape[:n], *self.value.shape))

    def like(self, value: Tensor, first: Tensor, higher: Sequence[Tensor]) -> Jet:
        """The same kind of jet with other channels."""
        return Jet(value, first, higher, self.scheme, self.tape)

    def each(self, op: Callable[[Tensor, int], Tensor]) -> Jet:
        """A linear operation on every channel; it is told how many axes lie in front."""
        return self.like(op(self.value, 0), op(self.first, 1), [op(h, 0) for h in self.higher])

    @property
    def tensors(self) -> list[Tensor]:
        """Value, first derivatives where there are any, higher ones."""
        return [self.value, *([self.first] if len(self.first) else []), *self.higher]

    def channel(self, i: int) -> Tensor:
        """One channel, by its position in the scheme."""
        m = len(self.first)
        return self.value if i == 0 else self.first[i - 1] if i <= m else self.higher[i - 1 - m]

    def stacked(self) -> Tensor:
        """All channels, (T, *shape)."""
        jet = self.full()
        return torch.cat([jet.value[None], jet.first, *(h[None] for h in jet.higher)])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        act = RULES.get(func)
        if act is None:
            raise Unsupported(getattr(func, "__name__", repr(func)))
        return act(*args, **(kwargs or {}))

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def device(self) -> torch.device:
        return self.value.device

    @property
    def requires_grad(self) -> bool:
        return self.value.requires_grad

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        """Methods of tensors: jet.sin() is torch.sin(jet)."""
        act = RULES.get(getattr(Tensor, name, None)) if not name.startswith("_") else None
        if act is None:
            if name.startswith("_"):
                raise AttributeError(name)
            raise Unsupported(f"Tensor.{name}")
        return lambda *args, **kwargs: act(self, *args, **kwargs)

    def __getitem__(self, index: Any) -> Jet:
        index = index if isinstance(index, tuple) else (index,)
        alike = index[0] is Ellipsis or index[0] == slice(None)
        return (self if alike else self.full()).each(
            lambda x, front: x[(slice(None),) * front + index]
        )

    def __neg__(self) -> Jet:
        return self.each(lambda x, _: -x)

    def __add__(self, other: Any) -> Any:
        return torch.add(self, other)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __sub__(self, other: Any) -> Any:
        return torch.sub(self, other)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        return torch.mul(self, other)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __truediv__(self, other: Any) -> Any:
        return torch.div(self, other)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __rtruediv__(self, other: Any) -> Any:
        return RULES[torch.reciprocal](self) * other

    def __pow__(self, exponent: Any) -> Any:
        return RULES[torch.pow](self, exponent)

    def __matmul__(self, other: Any) -> Any:
        return torch.matmul(self, other)  # pyright: ignore[reportCallIssue, reportArgumentType]

    __radd__, __rmul__ = __add__, __mul__
