"""A forward pass in compiled code or of a sharded model, repeated where layers can be recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from ...._core.capture import Call, unwrap_model
from ...._core.shards import without_sharding_hooks
from ....maps.record import ForwardRecord


class RepeatedCall:
    """A forward pass in compiled code, repeated outside of it with its buffers and randomness.

    That of a sharded model is repeated with its whole parameters, `params`.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        kwargs: Any,
        params: Mapping[str, Tensor] | None = None,
    ) -> None:
        device = next((p.device for p in unwrap_model(model).parameters()), torch.device("cpu"))
        self._model = model
        self.params = params
        self._call = Call.record_start(model, args, kwargs, device)

    def __call__(self, record: ForwardRecord) -> Any:
        """Return the output, with the layers on the way in `record`."""
        call = self._call
        module = unwrap_model(self._model)
        buffers = _reparametrize_module(module, call.buffers or {}, tie_weights=True)
        with torch.enable_grad(), call.replay_context(), buffers, record:
            return self._model(*call.args, **call.kwargs)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Let a sharded model hold its whole parameters, as plain modules do."""
        module = unwrap_model(self._model)
        if self.params is None:
            yield
            return
        with (
            without_sharding_hooks(module),
            _reparametrize_module(module, dict(self.params), tie_weights=True),
        ):
            yield
