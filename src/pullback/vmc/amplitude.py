"""A network as log ψ: one form for the three kinds of output, evaluated in chunks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError, require


@dataclass(frozen=True)
class EvaluationOptions:
    """How amplitudes are evaluated while samples and local energies are computed.

    Attributes:
        chunk: configurations of one forward pass.
        dtype: of the network while it is evaluated; by default its own. A network in float64 whose
            amplitudes are evaluated in float32 has natural gradients in float64, which small
            dampings need, at nearly the cost of float32: most forward passes are evaluations.
        tf32: on a GPU, round the factors of float32 products to TF32. log ψ then has relative
            errors of about 1e-3; the natural gradient itself is computed in full precision.
        compiled: evaluate whole chunks by `torch.compile`, and what is left without it.
        graphed: on a GPU, record the operations of a chunk once and launch them together (a CUDA
            graph). The network has to do the same operations for all configurations.
    """

    chunk: int = 2**14
    dtype: torch.dtype | None = None
    tf32: bool = False
    compiled: bool = False
    graphed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, int) or self.chunk < 1:
            raise PullbackError(
                "A chunk holds at least one configuration",
                f"chunk is {self.chunk!r}",
                "Take as many as fit into memory, such as chunk=2**14",
            )
        require(
            self.dtype in (None, torch.float32, torch.float64),
            "EvaluationOptions(dtype=)",
            self.dtype,
            "Use torch.float32, torch.float64, or None for the network's own",
        )


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
            raise _make_output_error(type(output).__name__, samples)
        if output.is_complex() and output.shape in ((samples,), (samples, 1)):
            return torch.view_as_real(output.reshape(samples).resolve_conj())
        if not output.is_complex() and output.is_floating_point():
            if output.shape == (samples, 2):
                return output
            if output.shape in ((samples,), (samples, 1)):
                return output.reshape(samples)
        raise _make_output_error(f"{output.dtype} of shape {tuple(output.shape)}", samples)


def _make_output_error(output: str, samples: int) -> PullbackError:
    return PullbackError(
        "The network's output is not log ψ",
        f"it returned {output} for {samples} configurations",
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
        if first is None:
            first = torch.empty(0)
        self.device = first.device
        #: the network's own dtype, in which its derivatives are taken
        self.dtype = first.dtype
        self._evaluation_dtype = options.dtype or first.dtype
        self._model = model
        self._evaluated_model = model
        if options.dtype not in (None, self.dtype):
            self._evaluated_model = copy.deepcopy(model).to(options.dtype)
        self._chunk_function: Any = self._evaluated_model
        if options.compiled:
            self._chunk_function = torch.compile(self._evaluated_model)
        #: recorded passes by their number of configurations
        self._recorded: dict[int, GraphedFunction] = {}

    def refresh(self) -> None:
        """Copy the network's present parameters to the one that is evaluated, where they differ."""
        if self._evaluated_model is self._model:
            return
        source = [*self._model.parameters(), *self._model.buffers()]
        target = [*self._evaluated_model.parameters(), *self._evaluated_model.buffers()]
        with torch.no_grad():
            for evaluated, trained in zip(target, source, strict=True):
                evaluated.copy_(trained)

    def log_psi(self, configurations: Tensor) -> Tensor:
        """log ψ, (N,): real, or complex where the network has a phase."""
        chunks = configurations.split(self._options.chunk)
        with torch.no_grad(), allow_tf32(self.device, self._options.tf32):
            outputs = torch.cat([self._evaluate(chunk) for chunk in chunks])
        if outputs.ndim == 1:
            return outputs
        return torch.view_as_complex(outputs.contiguous())

    def log_modulus(self, configurations: Tensor) -> Tensor:
        """log |ψ|, (N,), real."""
        return self.log_psi(configurations).real

    def _evaluate(self, configurations: Tensor) -> Tensor:
        if self._options.graphed and self.device.type == "cuda":
            return self._replay(configurations)
        inputs = configurations.to(self._evaluation_dtype)
        return self._choose_function(len(inputs))(inputs)

    def _choose_function(self, size: int) -> Callable[[Tensor], Tensor]:
        """The compiled network for whole chunks: it would be compiled anew for every other size."""
        if size == self._options.chunk:
            return self._chunk_function
        return self._evaluated_model

    def _replay(self, configurations: Tensor) -> Tensor:
        """The outputs by a recorded pass over the next power of two, or over a whole chunk."""
        power_of_two = 2 ** math.ceil(math.log2(max(2, len(configurations))))
        size = min(self._options.chunk, power_of_two)
        if size not in self._recorded:
            shape = (size, configurations.shape[1])
            inputs = torch.ones(shape, dtype=self._evaluation_dtype, device=self.device)
            self._recorded[size] = GraphedFunction(self._choose_function(size), inputs)
        return self._recorded[size](configurations)


class GraphedFunction:
    """A function whose GPU operations are recorded once and then launched together.

    Args:
        function: does the same operations for all inputs.
        inputs: of the recorded call; the memory that later inputs are copied to.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
        self._inputs = inputs
        side_stream = torch.cuda.Stream(inputs.device)
        side_stream.wait_stream(torch.cuda.current_stream(inputs.device))
        with torch.cuda.stream(side_stream):
            for _ in range(3):  # libraries allocate their workspaces, compilers compile
                function(inputs)
        torch.cuda.current_stream(inputs.device).wait_stream(side_stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = function(inputs)

    def __call__(self, rows: Tensor) -> Tensor:
        """The outputs of at most as many rows as were recorded."""
        count = len(rows)
        self._inputs[:count].copy_(rows)
        self._graph.replay()
        return self._outputs[:count].clone()


@contextmanager
def allow_tf32(device: torch.device, enabled: bool) -> Iterator[None]:
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
