"""Per-sample gradients of a fitted model over data, in the blocks of its curvature."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.errors import require
from .capture import BatchTangent, GradientBlock
from .checks import refuse_inference_mode, refuse_nonfinite, refuse_other_outputs
from .curvature import Curvature
from .data import Batch, align_targets, iterate_batches, refuse_shuffled, sample_losses
from .measures import Measure, measure_gradient


@dataclass(frozen=True)
class ReadingLimits:
    """How data are cut."""

    #: samples of a batch where the data are one pair of tensors
    batch_samples: int = 128


READING_LIMITS = ReadingLimits()


class GradientReader:
    """Per-sample gradients of a curvature's model, in the blocks of the curvature."""

    def __init__(self, curvature: Curvature) -> None:
        require(
            isinstance(curvature, Curvature), "The curvature", curvature, "Pass what fit returned"
        )
        refuse_inference_mode()
        require(
            isinstance(curvature, Curvature), "The curvature", curvature, "Pass what fit returned"
        )
        curvature.check_model()
        self._curvature = curvature
        self._parameters = curvature.parameters
        self._device = curvature.space.device
        #: a model in evaluation mode was seen to be deterministic by the fit
        self._is_checked = not any(module.training for module in curvature.model.modules())

    def batches(self, data: Any) -> Iterator[Batch]:
        """Yield batches on the model's device, in an order that indices can count."""
        refuse_shuffled(data, "rows and columns of scores would not be in the order of the data")
        return iterate_batches(data, self._device, READING_LIMITS.batch_samples)

    def linearize(self, batch: Batch) -> BatchTangent:
        """Return the model linearized at a batch, with finite outputs."""
        tangent = self._linearize(batch)
        refuse_nonfinite("The model's outputs", tangent.outputs)
        if not self._is_checked:
            refuse_other_outputs(tangent.outputs, self._linearize(batch).outputs)
            self._is_checked = True
        return tangent

    def _linearize(self, batch: Batch) -> BatchTangent:
        curvature = self._curvature
        return BatchTangent(
            curvature.model, self._parameters, batch.inputs, curvature.output, curvature.plans
        )

    def loss(self, outputs: Tensor, targets: Any) -> Tensor:
        """Return the losses of the samples, (N,)."""
        return sample_losses(self._curvature.likelihood, outputs, targets)

    def gradients(self, batch: Batch, measure: Measure | None) -> list[GradientBlock]:
        """Return ∇f of every sample, block by block of the curvature."""
        tangent = self.linearize(batch)
        targets = align_targets(tangent.outputs, batch.targets)
        covector = measure_gradient(measure or self.loss, tangent.outputs, targets)
        refuse_nonfinite("The gradients of the measure", covector)
        return tangent.gradients(covector, self._curvature.forms)

    def flat_gradients(self, batch: Batch, measure: Measure | None) -> Tensor:
        """Return ∇f of every sample as flat vectors, (N, p)."""
        flat: dict[str, Tensor] = {}
        for gradient in self.gradients(batch, measure):
            matrices = gradient.matrices(slice(0, gradient.samples))[:, 0]
            flat.update(gradient.form.scatter(matrices))
        return torch.cat([flat[name] for name in self._curvature.space.names], -1)
