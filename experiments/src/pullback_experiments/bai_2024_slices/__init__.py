r"""Bai, Rosenberg and Xu (2024), section 5.2: does slice SGD get ahead of SGD?

A bias-free ReLU network does not change when one layer is multiplied by α > 0 and the next divided
by it. The paper cuts these orbits by the slice of layers of equal norm and descends there, by the
Riemannian gradient (approach I) or the gradient of a tangent kernel (approach II).

    Figure 2   bai-2024-slices-figure2; --quick is a narrow network on digits
    ours       bai-2024-slices-rescaled: starts that are badly scaled, by up to 10^±3 per unit

As in the paper: CIFAR-10, layers (2634, 2196, 1758, 1320, 882, 444, 10) without biases, ReLU,
batches of 128, 200 epochs, learning rate 0.01 for SGD and slices alike, neither momentum nor decay,
five seeds. The paper does not state initial weights (here torch's) nor preprocessing (here each
channel of mean 0 and variance 1). Approach II is the formula that the paper computes, the kernel of
{r, unit ∂_ψ}; the kernel of the polar basis that it states, {r, ∂_ψ}, is "polar GTK".

"SGD from the slice" is the control: moved to the slice once, then torch's SGD. Without biases
approach I is SGD and a retraction, so what it gains over SGD, the control must gain as well.

What the runs say is in `docs/reproductions/bai-2024-slices.md`.
"""

from __future__ import annotations

from .figure2 import Figure2
from .rescaled import Rescaling

__all__ = ["EXPERIMENTS", "Figure2", "Rescaling"]

EXPERIMENTS = (
    Figure2(
        name="bai-2024-slices-figure2",
        figure="Figure 2",
        claim="Slice SGD is ahead of SGD in test accuracy over time, at a negligible extra cost; "
        "approach II performs like approach I.",
        about="SGD, its control and slices with learning rate 0.01; the polar kernel and Adam with "
        "the best of four by held-out images.",
        expected_outcomes=(True, True, False, True, True, True, False, False, False, False),
        quick_expected_outcomes=(True, False, False, False, True, True, True, False, False, False),
    ),
    Rescaling(
        name="bai-2024-slices-rescaled",
        figure="beside Figure 2",
        claim="Rescaling a network along its orbits breaks or slows SGD and Adam; on a slice "
        "nothing changes.",
        about="Digits, float64; learning rates are the best on the network as it was.",
    ),
)
