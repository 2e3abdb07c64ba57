r"""Races: K-FAC's rules beside AdamW, Muon, NorMuon, SOAP and SGD, on text and on images.

Who trains a transformer fastest, in steps and in seconds? All optimizers of a race get the same
batches in the same order, the same network at the same weights, and a rate that rises for 5 % of
the run and then falls to zero along a line.

    race-text          bytes of Python files, 6 layers of width 384; --quick: 2 layers of width 64
    race-text-large    12 layers of width 768
    race-text-largest  24 layers of width 1024, 300 steps
    race-text-short    the same network, 150 steps
    race-images        CIFAR-10, ResNet-18 and a small ViT; --quick: digits

Every rival's rate is doubled and halved, in runs of full length, until the best has a worse one on
either side; `KFAC(model)` has its default rate. Seconds are steps times the pace of a run alone on
its device, so that others may share it. Text is not seen twice, and whole files are held out.

A loss falls fastest at the end of its schedule, so that some of K-FAC's entrants also run with
fewer steps and a schedule of their own: the claim "in 0.8 of the steps" holds if some run of ours
is at the rival's final loss by then, on its way or at its end. The networks have no biases, learned
positions, and separate layers for q, k and v; on CUDA they run in bfloat16 with fused attention.
"""

from __future__ import annotations

from dataclasses import replace

from .checks import Lead
from .experiment import Entrant, Race

__all__ = ["EXPERIMENTS", "Race"]

#: the default rate of KFAC
_DEFAULT_RATE = 6e-3
_ONE = (0,)
_TWO = (0, 1)
_THREE = (0, 1, 2)
_FOUR = (0, 1, 2, 3)
_FIVE = (0, 1, 2, 3, 4)

_OURS = Entrant(_DEFAULT_RATE, fixed=True, shares=(0.8,))
_TWO_SIDED = Entrant(_DEFAULT_RATE, fixed=True, shares=(0.85,))
#: refreshed more often at first, with less damping
_WARM_UP = Entrant(_DEFAULT_RATE, fixed=True, shares=(0.85,), shorter_seeds=_FIVE, is_even=False)
#: refreshed twice as often, and more often still at first
_OFTEN = Entrant(_DEFAULT_RATE, fixed=True, shares=(0.85,), is_even=False)
#: whether the default rate carries from one size to another
_OTHER_RATES = {
    "kfac-rate-0.5": Entrant(_DEFAULT_RATE / 2, fixed=True, seeds=_ONE, pace_of="kfac"),
    "kfac-rate-2": Entrant(2 * _DEFAULT_RATE, fixed=True, seeds=_ONE, pace_of="kfac"),
}

TEXT = {
    "kfac": replace(_OURS, shorter_seeds=_FIVE),
    "kfac-two-sided": _TWO_SIDED,
    "kfac-two-sided-warm-up": _WARM_UP,
    "kfac-gentle-start": Entrant(_DEFAULT_RATE, fixed=True, pace_of="kfac", is_drawn=False),
    "kfac-two-sided-gentle-start": replace(
        _TWO_SIDED, shorter_seeds=_FIVE, pace_of="kfac-two-sided", is_drawn=False
    ),
    "kfac-two-sided-often": replace(_OFTEN, shorter_seeds=_FIVE, is_drawn=False),
    "kfac-two-sided-often-gentle-start": replace(
        _OFTEN,
        seeds=_THREE,
        shorter_seeds=_FIVE,
        pace_of="kfac-two-sided-often",
        is_drawn=False,
    ),
    "soap": Entrant(2e-3),
    "normuon-0.9": Entrant(8e-3),
    "normuon-0.9-half": Entrant(8e-3, pace_of="normuon-0.9"),
    "normuon-0.9-muon-length": Entrant(8e-3, pace_of="normuon-0.9"),
    "normuon": Entrant(8e-3, pace_of="normuon-0.9", is_drawn=False),
    "muon-0.9": Entrant(8e-3),
    "muon": Entrant(8e-3, pace_of="muon-0.9", is_drawn=False),
    "adamw": Entrant(1e-3),
    "kfac-adapt-0.99": Entrant(_DEFAULT_RATE, fixed=True, seeds=_TWO, pace_of="kfac"),
    **_OTHER_RATES,
}
LARGE = {
    "kfac": _OURS,
    "kfac-two-sided": _TWO_SIDED,
    "kfac-two-sided-often": replace(_OFTEN, seeds=_ONE, shorter_seeds=_THREE),
    "kfac-gentle-start": Entrant(_DEFAULT_RATE, fixed=True, seeds=_ONE, pace_of="kfac"),
    "kfac-two-sided-gentle-start": Entrant(
        _DEFAULT_RATE, fixed=True, seeds=_ONE, pace_of="kfac-two-sided"
    ),
    "normuon-0.9": Entrant(8e-3),
    "normuon-0.9-half": Entrant(4e-3, seeds=_ONE, pace_of="normuon-0.9"),
    "normuon-0.9-muon-length": Entrant(8e-3, pace_of="normuon-0.9"),
    "normuon-muon-length": Entrant(4e-3, pace_of="normuon-0.9", is_drawn=False),
    "muon-0.9": Entrant(4e-3),
    "muon": Entrant(4e-3, pace_of="muon-0.9", is_drawn=False),
    "soap": Entrant(2e-3),
    "adamw": Entrant(1e-3),
    **_OTHER_RATES,
}
#: K-FAC where matrices start gently by default, and the same without gentle starts
_WIDE = {
    "kfac": Entrant(_DEFAULT_RATE, fixed=True),
    "kfac-two-sided": Entrant(_DEFAULT_RATE, fixed=True),
    "kfac-plain-start": Entrant(_DEFAULT_RATE, fixed=True, pace_of="kfac"),
    "kfac-two-sided-plain-start": Entrant(_DEFAULT_RATE, fixed=True, pace_of="kfac-two-sided"),
}
LARGEST = {
    **_WIDE,
    "normuon-0.9-half": Entrant(2e-3),
    "normuon-0.9-muon-length": Entrant(4e-3, pace_of="normuon-0.9-half"),
    "muon-0.9-half": Entrant(2e-3),
    "normuon-muon-length": Entrant(2e-3, pace_of="normuon-0.9-half", is_drawn=False),
    "muon-half": Entrant(2e-3, seeds=_ONE, pace_of="muon-0.9-half"),
    "adamw": Entrant(1e-3),
    **_OTHER_RATES,
}
SHORT = {
    **_WIDE,
    "normuon-0.9-half": Entrant(4e-3),
    "normuon-0.9-muon-length": Entrant(4e-3, pace_of="normuon-0.9-half"),
}

#: decoupled, and of weights alone
_DECAY = {"weight_decay": 0.1}
IMAGES = {
    "kfac": Entrant(_DEFAULT_RATE, _DECAY, fixed=True, shares=(0.6,)),
    "muon-0.9": Entrant(8e-3, _DECAY),
    "adamw": Entrant(1e-3, _DECAY),
    "sgd": Entrant(0.05, {"weight_decay": 5e-4}),
}

_ABOUT = (
    "Rates of rivals are doubled and halved until the best is inside, in runs of full length on "
    "seed 0, which counts; the same batches, order and schedule. Muon, NorMuon and SOAP are "
    "written here, matrices of one shape handled together."
)

EXPERIMENTS = (
    Race(
        name="race-text",
        figure="a decoder of 10.9M parameters",
        claim="KFAC(model) at its default rate ends below NorMuon, Muon, SOAP and AdamW on text, "
        "and reaches their losses in less time; the two-sided rule ends lower still. Neither is "
        "where NorMuon ends in 0.85 of its steps; by medians the two-sided rule is, with a warm-up "
        "and less damping",
        about=_ABOUT,
        tasks=("text",),
        quick_tasks=("text-quick",),
        entrants=TEXT,
        quick_entrants={name: TEXT[name] for name in ("kfac", "normuon-0.9", "adamw")},
        pace_steps=120,
        seeds=(0, 1, 2, 3, 4),
        shorter_seeds=_FOUR,
        leads=(
            Lead("normuon-0.9-half", below=0.003, steps=0.85, seconds=1.0, by="kfac-two-sided"),
            Lead("normuon-0.9-half", below=0.003, steps=0.85, seconds=1.0),
            Lead("normuon-0.9-half", below=0.003, steps=0.85, by="kfac-two-sided-warm-up"),
            Lead("normuon-0.9-half", steps=0.85, by="kfac-two-sided-often"),
            Lead("normuon-0.9-half", steps=0.85, by="kfac-two-sided-often-gentle-start"),
            Lead("normuon-0.9-muon-length", below=0.003, steps=0.85, seconds=1.0),
            Lead("normuon-0.9", below=0.003, steps=0.85, seconds=1.0),
            Lead("muon-0.9", below=0.01, steps=0.85, seconds=1.0),
            Lead("soap", below=0.01, steps=0.85, seconds=1.0),
            Lead("adamw", steps=0.5, seconds=0.7),
        ),
        expected_outcomes=(
            *(True, False, True),  # NorMuon with AdamW at half its rate, by the two-sided rule
            *(True, False, True),  # the same by `KFAC(model)`
            *(True, True),  # the same by the two-sided rule with a warm-up
            *(False, False),  # the same by the two-sided rule, refreshed often, without a gentle
            # start and with one
            *(True, False, True),  # NorMuon as long as Muon's steps
            *(True, False, True),  # NorMuon
            *(True, False, True),  # Muon
            *(True, True, True),  # SOAP
            *(True, True),  # AdamW
        ),
    ),
    Race(
        name="race-text-large",
        figure="a decoder of 85.7M parameters",
        claim="KFAC(model) at its default rate is where NorMuon ends in 0.9 of its steps, where "
        "Muon ends in 0.85, in less time; shorter runs of the two-sided rule are where NorMuon "
        "ends in 0.85",
        about=_ABOUT,
        tasks=("text-large",),
        quick_tasks=("text-quick",),
        entrants=LARGE,
        quick_entrants=LARGE,
        pace_steps=80,
        leads=(
            Lead("normuon-0.9-muon-length", below=0.003, steps=0.9, seconds=1.0),
            Lead(
                "normuon-0.9-muon-length", below=0.003, steps=0.85, seconds=1.0, by="kfac-two-sided"
            ),
            Lead("normuon-0.9-muon-length", below=0.003, steps=0.85, by="kfac-two-sided-often"),
            Lead("muon-0.9", below=0.003, steps=0.85, seconds=1.0),
            Lead("muon-0.9", below=0.003, steps=0.8, seconds=1.0, by="kfac-two-sided"),
            Lead("normuon-0.9", below=0.003, steps=0.8, seconds=1.0),
            Lead("normuon-0.9-half", below=0.003, steps=0.8, seconds=1.0),
            Lead("soap", steps=0.5, seconds=0.5),
            Lead("adamw", steps=0.5, seconds=0.5),
        ),
        expected_outcomes=(
            *(True, True, True),  # NorMuon as long as Muon's steps
            *(True, True, True),  # the same by the two-sided rule
            *(True, True),  # the same where it is refreshed often
            *(True, True, True),  # Muon
            *(True, True, True),  # the same by the two-sided rule
            *(True, True, True, True, True, True),  # the paper's NorMuon, by two rates of AdamW
            *(True, True, True, True),  # SOAP and AdamW
        ),
    ),
    Race(
        name="race-text-largest",
        figure="a decoder of 303M parameters",
        claim="KFAC(model) at its default rate is where NorMuon and Muon end in 0.85 of their "
        "steps, the two-sided rule in 0.8, both in less time",
        about=_ABOUT,
        tasks=("text-largest",),
        quick_tasks=("text-quick",),
        entrants=LARGEST,
        quick_entrants=LARGEST,
        pace_steps=40,
        leads=(
            Lead("normuon-0.9-muon-length", below=0.003, steps=0.85, seconds=1.0),
            Lead(
                "normuon-0.9-muon-length", below=0.003, steps=0.8, seconds=1.0, by="kfac-two-sided"
            ),
            Lead("muon-0.9-half", below=0.003, steps=0.85, seconds=1.0),
            Lead("muon-0.9-half", below=0.003, steps=0.8, seconds=1.0, by="kfac-two-sided"),
            Lead("normuon-0.9-half", below=0.003, steps=0.85, seconds=1.0),
            Lead("normuon-muon-length", below=0.003, steps=0.85, seconds=1.0),
            Lead("muon-half", below=0.003, steps=0.85, seconds=1.0),
            Lead("adamw", steps=0.5, seconds=0.5),
        ),
    ),
    Race(
        name="race-text-short",
        figure="a decoder of 303M parameters, few steps",
        claim="in 150 steps, too, KFAC(model) at its default rate is where tuned NorMuon ends in "
        "0.85 of its steps and less time",
        about=_ABOUT,
        tasks=("text-short",),
        quick_tasks=("text-quick",),
        entrants=SHORT,
        quick_entrants=SHORT,
        pace_steps=40,
        seeds=(0,),
        shorter_seeds=(0,),
        leads=(
            Lead("normuon-0.9-muon-length", below=0.003, steps=0.85, seconds=1.0),
            Lead("normuon-0.9-half", below=0.003, steps=0.85, seconds=1.0),
        ),
    ),
    Race(
        name="race-images",
        figure="ResNet-18 and a ViT on CIFAR-10, beside Muon",
        claim="KFAC(model) at its default rate is where SGD and AdamW end on CIFAR-10 in 0.6 of "
        "their steps, and where Muon ends in fewer steps",
        about=f"{_ABOUT} Losses are of the 10,000 test images, by which rates are chosen too.",
        tasks=("resnet", "vit"),
        quick_tasks=("resnet-quick", "vit-quick"),
        entrants=IMAGES,
        quick_entrants={name: IMAGES[name] for name in ("kfac", "muon-0.9", "sgd")},
        pace_steps=80,
        leads=(
            Lead("muon-0.9", steps=1.0, seconds=1.0),
            Lead("adamw", steps=0.6, seconds=1.0),
            Lead("sgd", steps=0.6, seconds=1.0),
        ),
    ),
)
