"""Seconds and memory of a fit and of scores: ResNet-9, a decoder of GPT-2's size, and growth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import pullback as pb
from pullback.curvature import margin

from ..retraining.networks import Decoder, resnet9
from .parts import PartContext, cut_batches


@dataclass(frozen=True)
class Precision:
    """In which numbers a run works.

    Attributes:
        name: in the record.
        products: of `torch.set_float32_matmul_precision`.
        dtype: of the preconditioned gradients that are multiplied; None for float32.
    """

    name: str
    products: str
    dtype: torch.dtype | None

    def enter(self) -> None:
        """Set torch's precision of products and convolutions."""
        torch.set_float32_matmul_precision(self.products)
        torch.backends.cudnn.allow_tf32 = self.products != "highest"


PRECISIONS = (
    Precision("float32", "highest", None),
    Precision("TF32", "high", None),
    Precision("TF32, bfloat16 scores", "high", torch.bfloat16),
)


@dataclass(frozen=True)
class ImageTask:
    """A network with random weights, and random images."""

    model: nn.Module
    training: list[Any]
    queries: list[Any]

    @classmethod
    def make(
        cls, context: PartContext, samples: int, queries: int, width: int, batch: int
    ) -> ImageTask:
        """Return ResNet-9 of a width with so many images, of which the first are the queries."""
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        model = resnet9(10, width).to(context.device).eval()
        x = torch.randn(samples, 3, 32, 32, device=context.device)
        y = torch.randint(0, 10, (samples,), device=context.device)
        few = cut_batches(x[:queries], y[:queries], batch)
        return cls(model, cut_batches(x, y, batch), few)

    @property
    def parameters(self) -> int:
        """How many numbers are attributed to."""
        return sum(p.numel() for p in self.model.parameters())

    def fit(self, draws: int | None = 1) -> pb.curvature.Curvature:
        """Return EK-FAC of the images."""
        return pb.curvature.fit(
            self.model, self.training, likelihood=pb.likelihoods.Categorical(), draws=draws
        )


def time_resnet(context: PartContext) -> None:
    """Fit ResNet-9 and score, in float32, with TF32 products, and with bfloat16 scores."""
    sizes = context.sizes
    task = ImageTask.make(context, sizes.samples, sizes.queries, sizes.width, sizes.batch)
    context.record.add(parameters=task.parameters)
    likelihood = pb.likelihoods.Categorical()
    for precision in PRECISIONS:
        precision.enter()
        # algorithms of convolutions are chosen here, outside of what is timed
        pb.curvature.fit(task.model, task.training[:2], likelihood=likelihood, draws=1)
        curvature, fitting = context.measure(task.fit)
        context.record.add(**{f"{precision.name}: fit": fitting})
        score = partial(
            pb.curvature.influence, curvature, task.queries, task.training, measure=margin,
            dtype=precision.dtype, query_bytes=2**36,
        )  # fmt: skip
        _, scoring = context.measure(score)
        context.record.add(**{f"{precision.name}: score": scoring})
    if context.record.seconds_left > 20:
        _, fitting = context.measure(partial(task.fit, None))
        context.record.add(**{"TF32: fit with the exact metric": fitting})


def time_growth(context: PartContext) -> None:
    """Fit and score for an eighth, a quarter and half of the samples, and for three widths."""
    sizes = context.sizes
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    queries = max(1, sizes.queries // 10)
    points = [(share, 1.0) for share in (0.125, 0.25, 0.5)]
    points += [(0.125, factor) for factor in (0.5, 2.0)]
    warming = ImageTask.make(context, sizes.batch, 1, sizes.width, sizes.batch)
    warming.fit()
    rows = []
    for share, factor in points:
        width = max(1, int(sizes.width * factor))
        samples = int(sizes.samples * share)
        task = ImageTask.make(context, samples, queries, width, max(1, sizes.batch // 2))
        curvature, fitting = context.measure(task.fit)
        score = partial(
            pb.curvature.influence, curvature, task.queries, task.training, query_bytes=2**35
        )
        _, scoring = context.measure(score)
        rows.append({"samples": samples, "parameters": task.parameters, "queries": queries,
                     "fit": fitting, "score": scoring})  # fmt: skip
        context.record.add(rows=rows)


def time_decoder(context: PartContext) -> None:
    """Fit a decoder of GPT-2's size with random weights and score its sequences."""
    sizes = context.sizes
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    words, width, layers, heads = sizes.decoder
    model = Decoder(words, width, layers, heads, sizes.length, is_tied=True)
    model = model.to(context.device).eval()
    context.record.add(parameters=sum(p.numel() for p in model.parameters()))
    # the small run leaves numbers if the large one is stopped, and warms the kernels up
    for sequences in (max(1, sizes.sequences // 8), sizes.sequences):
        numbers = time_sequences(model, sequences, context)
        context.record.add(**{f"{sequences} sequences": numbers})


def time_sequences(model: Decoder, sequences: int, context: PartContext) -> dict[str, Any]:
    """Return the seconds and the memory of a fit to random sequences and of their scores."""
    sizes = context.sizes
    shape = (sequences, sizes.length + 1)
    tokens = torch.randint(0, sizes.decoder[0], shape, device=context.device)
    # a pass over a batch starts about 5,000 operations, whatever its size
    size = max(1, sizes.batch // 30)
    training = cut_batches(tokens[:, :-1], tokens[:, 1:], size)
    query_count = min(sizes.text_queries, sequences)
    queries = cut_batches(tokens[:query_count, :-1], tokens[:query_count, 1:], size)
    fit = partial(
        pb.curvature.fit, model, training, likelihood=pb.likelihoods.Categorical(), progress=True
    )
    curvature, fitting = context.measure(fit)
    reasons = sorted({row.reason for row in curvature.table.rows})
    context.record.add(**{f"{sequences} sequences, fit": fitting, "reasons": reasons})
    score = partial(
        pb.curvature.influence, curvature, queries, training, dtype=torch.bfloat16,
        query_bytes=2**35, progress=True,
    )  # fmt: skip
    _, scoring = context.measure(score)
    return {
        "fit": fitting,
        "score": scoring,
        "queries": query_count,
        "metric": curvature.table.metric,
    }
