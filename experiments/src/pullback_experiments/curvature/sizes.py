"""How large the parts of the influence experiments are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """How large every part is.

    Attributes:
        samples, queries: of the ResNet-9 timing.
        width: of ResNet-9, 64 for the one in print.
        batch: samples that are linearized at once.
        sequences, length, text_queries: of the GPT-2 timing.
        decoder: words, width, layers and heads of that decoder.
        subsets, tuning: halves retrained for the score, and for the choice of settings.
        recipes: how many ways of training ResNet-9 are tried.
        rounds, tuning_rounds: how many networks are trained on each half at most, and on each half
            for the choice of settings.
        side_by_side: how many of them train at the same time on a GPU.
        images, cifar_queries: of two classes of CIFAR-10.
        epoch_factor: multiplies the epochs of ResNet-9's schedules.
        trak_models, trak_dimension: networks and projected gradients of TRAK.
        text_samples, text_length, text_epochs, text_rounds: of the small decoder.
        text_trak_dimension: of TRAK's projected gradients there.
        is_generated: whether images and text are made up.
    """

    samples: int = 25_000
    queries: int = 2_000
    width: int = 64
    batch: int = 500
    sequences: int = 1_000
    length: int = 256
    text_queries: int = 100
    decoder: tuple[int, int, int, int] = (50_257, 768, 12, 12)
    subsets: int = 50
    tuning: int = 16
    recipes: int = 4
    rounds: int = 60
    tuning_rounds: int = 4
    side_by_side: int = 4
    images: int = 5_000
    cifar_queries: int = 500
    epoch_factor: float = 1.0
    trak_models: int = 10
    trak_dimension: int = 2048
    text_samples: int = 2_000
    text_length: int = 64
    text_epochs: int = 10
    text_rounds: int = 4
    text_trak_dimension: int = 512
    is_generated: bool = False


#: as the records have them
FULL = Sizes()
#: for a minute on a CPU
TINY = Sizes(
    samples=64,
    queries=16,
    width=4,
    batch=32,
    sequences=8,
    length=16,
    text_queries=2,
    decoder=(50, 16, 2, 2),
    subsets=4,
    tuning=2,
    recipes=1,
    rounds=2,
    tuning_rounds=1,
    images=200,
    cifar_queries=20,
    epoch_factor=0.1,
    trak_models=2,
    trak_dimension=32,
    text_samples=40,
    text_length=16,
    text_epochs=1,
    text_rounds=2,
    text_trak_dimension=16,
)
