"""What the machinery behind a module's linearization needs to know of it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from .._core.space import ParameterSpace


class Replay(Protocol):
    """A forward pass run again, with its graph kept for many reverse passes."""

    #: the map: its `call`, `batch_dim`, and `call_with(params, *args, **kwargs)`
    map: Any
    space: ParameterSpace
    #: z, detached, in the precision of linear algebra
    value: Tensor
    #: z, with its graph
    graph: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The parameters the graph was built on."""
        ...

    def gradients(
        self, u: Tensor, inputs: list[Any], *, batched: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Autograd's answer for parameters or for the layers' outputs."""
        ...
