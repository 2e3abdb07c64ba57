"""A small decoder of characters retrained on halves of its sequences."""

from __future__ import annotations

import copy
import gzip
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..retraining.halves import ExplainedModel, Halves, list_dampings, split_subsets
from ..retraining.networks import Decoder
from ..retraining.scores import trak
from ..retraining.stacked_networks import Schedule, draw_subsets, train_networks
from ..sizes import Sizes
from .parts import PartContext, cut_batches


@dataclass(frozen=True)
class Sequences:
    """Characters as numbers: inputs (N, T) and the next characters (N, T)."""

    x: Tensor
    y: Tensor
    query_x: Tensor
    query_y: Tensor
    letters: int

    @classmethod
    def load(cls, sizes: Sizes, device: torch.device) -> Sequences:
        """Return shuffled pieces of `tiny_shakespeare.txt.gz` in the folder of PULLBACK_DATA."""
        text = _read_text(sizes)
        letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
        length = sizes.text_length + 1
        needed = (sizes.text_samples + 100) * length
        tokens = torch.tensor([letters[letter] for letter in text[:needed]], device=device)
        rows = tokens.view(-1, length)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        training, queries = rows[order.to(device)].split([sizes.text_samples, 100])
        return cls(training[:, :-1], training[:, 1:], queries[:, :-1], queries[:, 1:], len(letters))

    @property
    def queries(self) -> tuple[Tensor, Tensor]:
        """Held-out sequences whose loss is explained."""
        return self.query_x, self.query_y


def _read_text(sizes: Sizes) -> str:
    """Return Shakespeare's plays, or a made-up text."""
    if sizes.is_generated:
        return "to be or not to be, that is the question. " * 400
    path = Path(os.environ.get("PULLBACK_DATA", "data")) / "tiny_shakespeare.txt.gz"
    return gzip.decompress(path.read_bytes()).decode()


def sum_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses of sequences, added up over positions: (N,)."""
    losses = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
    return losses.sum(1)


def compute_mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of all positions."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def score_text(context: PartContext) -> None:
    """Measure how well influence predicts the losses of decoders retrained on halves."""
    sizes = context.sizes
    data = Sequences.load(sizes, context.device)
    shape = (data.letters, 64, 2, 4, sizes.text_length)
    make = partial(Decoder, *shape, is_tied=False, is_fused=False)
    schedule = Schedule(
        epochs=sizes.text_epochs, batch=min(50, len(data.x) // 4), rate=3e-3, decay=1e-4,
        is_adaptive=True,
    )  # fmt: skip
    torch.set_float32_matmul_precision("high")
    train = partial(train_networks, make, data.x, data.y, measure=compute_mean_loss)
    everything = torch.arange(len(data.x)).expand(sizes.trak_models, -1)
    seeds = list(range(sizes.trak_models))
    networks, trained = context.measure(partial(train, everything, seeds, schedule))
    models = [copy.deepcopy(networks.network(number)).eval() for number in seeds]
    model = models[0]
    with torch.no_grad():
        held_out = float(sum_losses(model(data.query_x), data.query_y).mean())
    context.record.add(training=trained, loss=held_out / sizes.text_length)
    total = sizes.subsets + sizes.tuning
    subsets = draw_subsets(len(data.x), total, seed=1)
    measured = torch.zeros(total, len(data.query_x), device=context.device)
    for number in range(sizes.text_rounds):
        seeds = list(range(1000 * (number + 1), 1000 * (number + 1) + total))
        retrained, trained = context.measure(partial(train, subsets, seeds, schedule))
        outputs = retrained.outputs(data.query_x)
        measured += torch.stack([sum_losses(z, data.query_y) for z in outputs])
        context.record.add(retraining=trained, networks_per_half=number + 1)
    training = cut_batches(data.x, data.y, 200)
    torch.set_float32_matmul_precision("highest")
    explained, fitting = context.measure(
        partial(ExplainedModel.fit, model, data.queries, training, None)
    )
    # G adds up the positions of a sequence, and training takes their mean
    dampings = list_dampings(schedule.decay * sizes.text_length)
    tuning_subsets, judging_subsets = split_subsets(subsets, sizes.tuning)
    tuned = explained.tune(dampings, Halves(tuning_subsets, measured[: sizes.tuning]))
    context.record.add(fit=fitting, tuning=tuned.by_damping, damping=tuned.damping)
    judging = Halves(judging_subsets, measured[sizes.tuning :])
    context.record.add(**tuned.judge(judging))
    by_damping = {name: judging.score(scores) for name, scores in tuned.candidates.items()}
    context.record.add(**{f"EK-FAC, {name}": score for name, score in by_damping.items()})
    for count in (1, sizes.trak_models):
        scores = trak(
            models[:count], data.queries, (data.x, data.y), sizes.text_trak_dimension, seed=0,
            batch=200, measure=sum_losses,
        )  # fmt: skip
        context.record.add(**{f"TRAK, {count} models": judging.score(scores)})
