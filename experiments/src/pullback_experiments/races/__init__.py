r"""Races: K-FAC's rules beside AdamW, Muon, SOAP and SGD, on text and on images.

Who trains a transformer fastest, in steps and in seconds? All optimizers of a race have equally
many rates to choose from, by runs of a third of the length on a seed that does not count otherwise,
and three seeds at the best one. All get the same batches in the same order, the same network at the
same weights, and a rate that rises for 5 % of the run and then falls to zero along a line.

    race-text         bytes of Python files, 6 layers of width 384; --quick: 2 layers of width 64
    race-text-large   12 layers of width 768
    race-vision       CIFAR-10, ResNet-18 and a small ViT; --quick: digits

Seconds are steps times the pace of a run alone on its device, so that others may share it.
Text is not seen twice, and whole files are held out. A loss falls fastest at the end of its
schedule, so that the best of K-FAC's rules also runs with fewer steps and a schedule of its own:
the claim "in 0.85 of the steps" holds if some run of ours is at the rival's final loss by then.
The networks have no biases, learned positions, and separate
layers for q, k and v; on CUDA they run in bfloat16 with fused attention.
"""

from __future__ import annotations

from .checks import Lead
from .experiment import Entrant, Race

__all__ = ["EXPERIMENTS", "Race"]

_NATURAL = {"kl_clip": 1e-4, "damping": 1e-2}

TEXT = {
    "adamw": Entrant((7.5e-4, 1.5e-3, 3e-3)),
    "muon": Entrant((3e-3, 6e-3, 1.2e-2)),
    "muon-0.9": Entrant((3e-3, 6e-3, 1.2e-2)),
    "soap": Entrant((2e-3, 4e-3, 8e-3)),
    "kfac-spectral": Entrant((4e-3, 8e-3, 1.2e-2), {"rest": 0.25}),
    "kfac-eigenbasis": Entrant((7.5e-4, 1.5e-3, 3e-3)),
    "kfac-natural": Entrant((0.03, 0.1, 0.3), _NATURAL),
}
LARGE = {
    "muon": Entrant((4e-3,)),
    "kfac-spectral": Entrant((6e-3,), {"rest": 0.25}),
}
VISION = {
    "sgd": Entrant((0.05, 0.2)),
    "adamw": Entrant((1e-3, 3e-3)),
    "kfac-spectral": Entrant((3e-3, 6e-3)),
    "kfac-eigenbasis": Entrant((1e-3, 3e-3)),
}


def _quick(entrants: dict[str, Entrant]) -> dict[str, Entrant]:
    """The larger rates, since runs are short."""
    return {name: Entrant(e.rates[-2:], e.settings) for name, e in entrants.items()}


_ABOUT = (
    "Three rates each, then three seeds at the best; the same batches, order and schedule. Muon "
    "and SOAP are written here, matrices of one shape handled together."
)

EXPERIMENTS = (
    Race(
        name="race-text",
        figure="a decoder of 10.9M parameters",
        claim="K-FAC's rules end below SOAP and Muon on text, and are where Muon and AdamW end "
        "in fewer steps and less time",
        about=_ABOUT,
        tasks=("text",),
        quick_tasks=("text-quick",),
        entrants=TEXT,
        quick_entrants=_quick(TEXT),
        leads=(
            Lead("soap", below=0.003),
            Lead("muon", below=0.01, steps=0.85, seconds=1.0),
            Lead("muon-0.9", below=0.01),
            Lead("adamw", steps=0.5, seconds=0.7),
        ),
    ),
    Race(
        name="race-text-large",
        figure="a decoder of 85.7M parameters",
        claim="K-FAC's rules are where Muon ends on text in 0.8 of its steps and in less time",
        about="One rate each, found by single runs; three seeds; the same batches and schedule.",
        tasks=("text-large",),
        quick_tasks=("text-quick",),
        entrants=LARGE,
        quick_entrants=_quick(LARGE),
        lengths=(1.0, 0.8),
        leads=(Lead("muon", steps=0.8, seconds=1.0),),
    ),
    Race(
        name="race-vision",
        figure="ResNet-18 and a ViT on CIFAR-10",
        claim="K-FAC's rules are where SGD and AdamW end on CIFAR-10 in 0.6 of their steps",
        about="Two rates each, then three seeds at the best; the same batches, order and schedule. "
        "Losses are of the 10,000 test images.",
        tasks=("resnet", "vit"),
        quick_tasks=("resnet-quick", "vit-quick"),
        entrants=VISION,
        quick_entrants=_quick(VISION),
        lengths=(1.0, 0.6),
        leads=(Lead("sgd", steps=0.6), Lead("adamw", steps=0.6)),
    ),
)
