r"""Bai, Rosenberg and Xu (2024), appendix G.4: is the Sobolev natural gradient faster than K-FAC?

The paper trains VGG-16 on CIFAR-10 and CIFAR-100 for 50 epochs with learning rate 0.01, weight
decay 0.003 and damping 0.03, found by a grid search for K-FAC and used for both. The Sobolev
gradient has a schedule of its own (the rate is divided by 5 after 40 % and after 60 % of the
epochs; K-FAC's by 10 after every 40 %) and inputs divided by 20, and K-FAC is also run with either
and both.

    Figures 3, 5   bai-2024-sobolev-cifar10
    Figures 4, 6   bai-2024-sobolev-cifar100, where `cifar100.npz` is at hand

What the paper leaves open is taken from the code that it builds on (C. Wang's K-FAC for PyTorch):
batches of 128, random crops and flips, momentum 0.9, averages with 0.95, KL clip 0.01, statistics
every 10 and inverses every 100 steps, batch normalization, the initial weights. That code lets the
decay pass through the momentum, so that a step shrinks the weights by lr·0.003/(1 − 0.9) in the
long run; here decay is decoupled, and 0.03 is the same. What is different here: damping is factored
(Tikhonov; R ⊗ C + λ itself would need eigenvalues of matrices of size 4609), gains and shifts of
the normalizations have blocks of the metric too, decay does not wait for 200 steps, the last
incomplete batch is left out, inputs have variance 1 (there 1.5), and curves show losses on 10,000
training images without crops and flips. The Sobolev metric is estimated from four covectors that
the batch shares; its sums are Σ_o δ_oᵀK⁻¹δ_o, since the printed expectation is indefinite.

Ours is `bai-2024-sobolev-digits`: does it hold if every method has its own learning rate and
damping, and is it the kernel? `docs/reproductions/bai-2024-sobolev.md` has the results.
"""

from __future__ import annotations

from .digits import Tuned
from .vgg import METHODS, PAPER, VGGTraining, paper_claims

__all__ = ["EXPERIMENTS", "Tuned", "VGGTraining"]

FIGURES = ("Sobolev", "K-FAC", "Sobolev − schedule")
VARIANTS = ("Sobolev", *(m.name for m in METHODS if m.name.startswith("K-FAC")))

EXPERIMENTS = (
    VGGTraining(
        name="bai-2024-sobolev-cifar10",
        figure="Figures 3 and 5",
        claim="The Sobolev natural gradient converges clearly faster than K-FAC, to a similar "
        "test performance; K-FAC does not gain from its schedule and input scaling.",
        about="VGG-16, CIFAR-10, 50 epochs of batches of 128; the settings that the paper found "
        "for K-FAC, for all.",
        methods=METHODS,
        figures={"figure3": FIGURES, "figure5": VARIANTS},
        claims=paper_claims,
        expected_outcomes=(True, False, False, False, False, True, False, False),
    ),
    VGGTraining(
        name="bai-2024-sobolev-cifar100",
        figure="Figures 4 and 6",
        claim="The same on CIFAR-100.",
        about="As on CIFAR-10. Needs cifar100.npz, which was not at hand: not run yet.",
        methods=METHODS,
        figures={"figure4": FIGURES, "figure6": VARIANTS},
        claims=paper_claims,
        expected_outcomes=(True,) * 8,  # as the paper has it
        dataset="cifar100",
    ),
    Tuned(
        name="bai-2024-sobolev-digits",
        paper=PAPER,
        figure="in the small, beside Figure 3",
        claim="The Sobolev natural gradient converges faster than K-FAC: at K-FAC's settings, and "
        "if each has its own.",
    ),
)
