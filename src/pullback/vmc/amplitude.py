"""A network as log ψ: one form for the three kinds of output, evaluated in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError


@dataclass(frozen=True)
class EvaluationOptions:
    """How amplitudes are evaluated while samples and local energies are computed.

    Attributes:
        chunk: configurations of one forward pass.
        tf32: on a GPU, round the factors of float32 products to TF32. log ψ then has relative
            errors of about 1e-3; the natural gradient itself is computed in full precision.
        compiled: evaluate by `torch.compile`.
    """

    chunk: int = 2**14
    tf32: bool = False
    compiled: bool = False


class LogAmplitude(nn.Module):
    """The user's network with real outputs: (N,) for a real log ψ, (N, 2) for u and φ.

    log ψ = u + iφ. The network returns (N,) or (N, 1) real, (N, 2) real, or (N,) complex. Which of
    them is established by the first call and has to stay.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, configurations: Tensor) -> Tensor:
        output = self.network(configurations)
        samples = len(configurations)
        if not isinstance(output, Tensor):
            raise _wrong_output(type(output).__name__, samples)
        if output.is_complex() and output.shape in ((samples,), (samples, 1)):
            return torch.view_as_real(output.reshape(samples).resolve_conj())
        if not output.is_complex() and output.is_floating_point():
            if output.shape == (samples, 2):
                return output
            if output.shape in ((samples,), (samples, 1)):
                return output.reshape(samples)
        raise _wrong_output(f"{output.dtype} of shape {tuple(output.shape)}", samples)


def _wrong_output(got: str, samples: int) -> PullbackError:
    return PullbackError(
        "The network's output is not log ψ",
        f"it returned {got} for {samples} configurations",
        "Return (N,) real, (N, 2) with log-amplitude and phase, or (N,) complex",
    )


class Evaluator:
    """log ψ of many configurations without gradients, a chunk at a time.

    Args:
        model: the network as real outputs.
        options: how it is evaluated.
    """

    def __init__(self, model: LogAmplitude, options: EvaluationOptions) -> None:
        first = next(iter(model.parameters()), None)
        self._options = options
        self._function: Any = torch.compile(model) if options.compiled else model
        self.dtype = torch.get_default_dtype() if first is None else first.dtype
        self.device = torch.device("cpu") if first is None else first.device

    def log_psi(self, configurations: Tensor) -> Tensor:
        """log ψ, (N,): real, or complex where the network has a phase."""
        parts = configurations.split(self._options.chunk)
        with torch.no_grad(), tensor_cores(self.device, self._options.tf32):
            outputs = torch.cat([self._evaluate(part) for part in parts])
        if outputs.ndim == 1:
            return outputs
        return torch.view_as_complex(outputs.contiguous())

    def log_modulus(self, configurations: Tensor) -> Tensor:
        """log |ψ|, (N,), real."""
        return self.log_psi(configurations).real

    def _evaluate(self, configurations: Tensor) -> Tensor:
        inputs = configurations.to(self.dtype)
        if not self._options.compiled:
            return self._function(inputs)
        # a compiled function is compiled anew for every other size
        size = min(self._options.chunk, 2 ** math.ceil(math.log2(len(inputs))))
        padding = inputs.new_ones(size - len(inputs), inputs.shape[1])
        return self._function(torch.cat([inputs, padding]))[: len(inputs)]


@contextmanager
def tensor_cores(device: torch.device, enabled: bool) -> Iterator[None]:
    """Let float32 products round their factors to TF32 on a GPU, where that was asked for."""
    if not enabled or device.type != "cuda":
        yield
        return
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before
