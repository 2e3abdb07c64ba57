"""Parts of a run on a GPU: scores of ResNet-9 by retraining on halves, and TRAK beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pullback.curvature import Relative, margin

from ..retraining.halves import (
    MULTIPLES,
    ExplainedModel,
    Halves,
    TunedScores,
    name_relative,
    split_subsets,
)
from ..retraining.image_training import (
    RECIPES,
    ImageTrainer,
    Recipe,
    compute_accuracy,
    compute_outputs,
    measure_margins,
    train_beside,
)
from ..retraining.scores import trak
from ..retraining.stacked_networks import draw_subsets
from ..retraining.two_classes import TwoClasses
from ..sizes import Sizes
from .parts import PartContext, cut_batches


def name_rounds(count: int) -> str:
    """Return the name under which the record has the scores of so many networks per half."""
    return f"networks per half: {count}"


#: multiples of each block's mean eigenvalue among which halves for tuning choose the damping
TUNED_DAMPINGS = {name_relative(k): Relative(k) for k in (0.001, 0.01, 0.1, 1.0, 10.0)}
#: what `score_cifar` leaves for `score_trak`
_HALVES_FILE = "cifar2-halves.pt"


@dataclass(frozen=True)
class Limits:
    """What the choice of a recipe and the rounds of trainings are held to.

    Attributes:
        least_accuracy: of a recipe on the queries; guessing has 0.5, and the longest training 0.79.
        least_agreement: correlation of margins of one training alone and beside others. Trainings
            differ by rounding alone; networks of different seeds have about 0.7.
        pilot_share: of the part's seconds after which no further recipe is tried.
        writing_seconds: that a last round of trainings leaves for writing its numbers.
    """

    least_accuracy: float = 0.7
    least_agreement: float = 0.9
    pilot_share: float = 0.4
    writing_seconds: float = 1.5


_LIMITS = Limits()


@dataclass(frozen=True)
class Pilot:
    """One recipe as networks for tuning see it.

    Attributes:
        recipe: its name in `RECIPES`.
        trainers: of its networks, to work side by side.
        model: trained on all images.
        accuracy: of that model on the queries.
        tuned: its scores, with the damping that the halves for tuning chose.
    """

    recipe: str
    trainers: Sequence[ImageTrainer]
    model: nn.Module
    accuracy: float
    tuned: TunedScores

    @property
    def tuning_score(self) -> float:
        """The datamodeling score on the halves for tuning."""
        return self.tuned.by_damping[self.tuned.damping]

    @property
    def is_accurate(self) -> bool:
        """Whether the recipe trains networks that predict."""
        return self.accuracy >= _LIMITS.least_accuracy


def shorten(recipe: Recipe, sizes: Sizes) -> Recipe:
    """Return the recipe with as many epochs as the sizes allow."""
    epochs = max(1, round(recipe.schedule.epochs * sizes.epoch_factor))
    return replace(recipe, schedule=replace(recipe.schedule, epochs=epochs))


def make_trainers(
    images: TwoClasses, recipe: Recipe, context: PartContext
) -> Sequence[ImageTrainer]:
    """Return trainers for side by side, or a single one where they would disturb each other."""
    width = context.sizes.width
    first = ImageTrainer(images, width, recipe)
    if context.device.type != "cuda":
        return [first]
    count = context.sizes.side_by_side
    trainers = [first, *(ImageTrainer(images, width, recipe) for _ in range(count - 1))]
    subsets = list(draw_subsets(len(images.x), count, seed=99))
    seeds = list(range(90, 90 + count))
    lone_outputs = compute_outputs(
        trainers[-1].train(subsets[-1], seeds[-1]), images.query_x
    ).clone()
    group_outputs = compute_outputs(train_beside(trainers, subsets, seeds)[-1], images.query_x)
    margins = torch.stack([lone_outputs.diff(dim=1)[:, 0], group_outputs.diff(dim=1)[:, 0]])
    agreement = float(torch.corrcoef(margins)[0, 1])
    context.record.add(agreement=round(agreement, 4))
    if agreement >= _LIMITS.least_agreement:
        return trainers
    return [first]


def run_pilot(name: str, images: TwoClasses, subsets: Tensor, context: PartContext) -> Pilot:
    """Train on all images and on the halves for tuning, and choose a damping there."""
    trainers = make_trainers(images, shorten(RECIPES[name], context.sizes), context)
    everything = torch.arange(len(images.x))
    model, trained = context.measure(partial(trainers[0].train_copy, everything, 0))
    accuracy = compute_accuracy(model, images.query_x, images.query_y)
    numbers: dict[str, Any] = {
        "accuracy": accuracy,
        "accuracy on training data": compute_accuracy(model, images.x, images.y),
        "training": trained,
    }
    measured = torch.zeros(len(subsets), len(images.query_x), device=context.device)
    for number in range(context.sizes.tuning_rounds):
        measured += measure_margins(trainers, images, subsets, 50_000 + 100 * number)
    training = cut_batches(images.x, images.y, context.sizes.batch)
    fit = partial(ExplainedModel.fit, model, images.queries, training, margin)
    explained, numbers["fit"] = context.measure(fit)
    tuned = explained.tune(TUNED_DAMPINGS, Halves(subsets, measured))
    numbers.update(tuning=tuned.by_damping, damping=tuned.damping)
    context.record.add(**{f"pilot {name}": numbers})
    return Pilot(name, trainers, model, accuracy, tuned)


def run_pilots(images: TwoClasses, tuning: Tensor, context: PartContext) -> Pilot:
    """Return the recipe with the best score on the halves for tuning, of those that predict."""
    pilots: list[Pilot] = []
    limit = _LIMITS.pilot_share * (context.record.seconds + context.record.seconds_left)
    for name in list(RECIPES)[: context.sizes.recipes]:
        if pilots and context.record.seconds > limit:
            break
        pilots.append(run_pilot(name, images, tuning, context))
    return max(pilots, key=lambda pilot: (pilot.is_accurate, pilot.tuning_score))


class MarginRounds:
    """Mean margins of networks trained on the same halves with other seeds.

    Rounds are added up in two sums by turns, whose agreement says how much of the mean is noise.
    """

    def __init__(self, subsets: Tensor) -> None:
        self._subsets = subsets
        self._rounds: list[Tensor] = []

    def add(self, margins: Tensor) -> None:
        """Add the margins of one more network per half, (halves, queries)."""
        self._rounds.append(margins)

    @property
    def margins(self) -> Tensor:
        """The margins of all rounds, (rounds, halves, queries)."""
        return torch.stack(self._rounds)

    @property
    def halves(self) -> Halves:
        """The halves and the means of all rounds."""
        return Halves(self._subsets, self.margins.mean(0))

    def reliability(self) -> float | None:
        """Return the share of the variance over halves that is not noise; None for one round.

        The correlation r of the means of two disjoint sets of rounds, averaged over queries, gives
        2r/(1 + r) for the mean of both (Spearman and Brown).
        """
        count = len(self._rounds) // 2
        if count == 0:
            return None
        first = torch.stack(self._rounds[0 : 2 * count : 2]).mean(0)
        second = torch.stack(self._rounds[1 : 2 * count : 2]).mean(0)
        first = first - first.mean(0)
        second = second - second.mean(0)
        norms = first.norm(dim=0) * second.norm(dim=0)
        correlation = float(((first * second).sum(0) / norms).mean())
        return round(2 * correlation / (1 + correlation), 4)


def score_cifar(context: PartContext) -> None:
    """Measure how well influence predicts ResNet-9 retrained on halves of two classes."""
    sizes = context.sizes
    images = TwoClasses.load(sizes, context.device)
    subsets = draw_subsets(len(images.x), sizes.tuning + sizes.subsets, seed=0)
    tuning, judging = split_subsets(subsets, sizes.tuning)
    pilot = run_pilots(images, tuning, context)
    schedule = asdict(shorten(RECIPES[pilot.recipe], sizes).schedule)
    context.record.add(recipe=pilot.recipe, schedule=schedule, damping=pilot.tuned.damping)
    rounds = MarginRounds(judging)
    for number in range(sizes.rounds):
        start = context.record.seconds
        rounds.add(measure_margins(pilot.trainers, images, judging, 1000 * (number + 1)))
        numbers: dict[str, Any] = {
            **pilot.tuned.judge(rounds.halves), "reliability": rounds.reliability()
        }  # fmt: skip
        context.record.add(**{name_rounds(number + 1): numbers})
        _save_halves(context, pilot, judging, rounds.margins)
        seconds_per_round = context.record.seconds - start
        if context.record.seconds_left < seconds_per_round + _LIMITS.writing_seconds:
            return


def _save_halves(context: PartContext, pilot: Pilot, subsets: Tensor, margins: Tensor) -> None:
    contents = {
        "recipe": pilot.recipe,
        "state": pilot.model.state_dict(),
        "subsets": subsets,
        "margins": margins.cpu(),
    }
    torch.save(contents, context.folder / _HALVES_FILE)


@dataclass(frozen=True)
class SavedHalves:
    """What `score_cifar` leaves for later parts.

    Attributes:
        images: of both classes.
        recipe: of the trainings.
        model: the explained network.
        halves: subsets, and the mean margins of the networks trained on them.
    """

    images: TwoClasses
    recipe: Recipe
    model: nn.Module
    halves: Halves

    @classmethod
    def load(cls, context: PartContext) -> SavedHalves:
        """Return what is in the folder of the parts."""
        sizes = context.sizes
        contents = torch.load(context.folder / _HALVES_FILE, weights_only=True)
        images = TwoClasses.load(sizes, context.device)
        measured = contents["margins"].mean(0).to(context.device)
        recipe = shorten(RECIPES[contents["recipe"]], sizes)
        model = recipe.make(2, sizes.width).to(context.device).eval()
        model.load_state_dict(contents["state"])
        return cls(images, recipe, model, Halves(contents["subsets"], measured))


def score_dampings(context: PartContext) -> None:
    """Measure EK-FAC with every damping on the same halves."""
    saved = SavedHalves.load(context)
    images = saved.images
    training = cut_batches(images.x, images.y, context.sizes.batch)
    explained = ExplainedModel.fit(saved.model, images.queries, training, margin)
    for multiple in MULTIPLES:
        score = saved.halves.score(explained.score(Relative(multiple)))
        context.record.add(**{name_relative(multiple): score})
    dot_products = explained.score_dot_products()
    context.record.add(**{"gradient dot product": saved.halves.score(dot_products)})


def score_trak(context: PartContext) -> None:
    """Measure TRAK with one and with several networks on the same halves."""
    sizes = context.sizes
    saved = SavedHalves.load(context)
    images = saved.images
    trainer = ImageTrainer(images, sizes.width, saved.recipe)
    torch.set_float32_matmul_precision("high")
    models: list[nn.Module] = [saved.model]
    _add_trak(context, images, saved.halves, models)
    everything = torch.arange(len(images.x))
    for seed in range(1, sizes.trak_models):
        models.append(trainer.train_copy(everything, seed))
    _add_trak(context, images, saved.halves, models)


def _add_trak(
    context: PartContext, images: TwoClasses, halves: Halves, models: Sequence[nn.Module]
) -> None:
    attribute = partial(
        trak, models, images.queries, (images.x, images.y), context.sizes.trak_dimension, seed=0,
        batch=250,
    )  # fmt: skip
    scores, seconds = context.measure(attribute)
    numbers: dict[str, Any] = {"score": halves.score(scores), **seconds}
    context.record.add(**{f"TRAK, {len(models)} models": numbers})
