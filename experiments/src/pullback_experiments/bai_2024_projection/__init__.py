r"""Bai, Rosenberg and Xu (2024), sections 2–4: gradient steps as moves of the function.

A step in parameters moves the function f by dφ·v to first order, everywhere, also where there are
no data. That move can be known before the step, and it says what a method does:

    natural, Sobolev   the projection P∇ℓ of the functional gradient onto the tangent space T_fΦ
    standard           S∇ℓ = Θ c, the image under a surjection that is no projection: S² ≠ S

and why the functional gradient needs a space of its own: in L² an empirical loss has none, as its
norm grows without end when the grid is refined (section 3). The paper has no figure of this; the
networks, points and step sizes are ours.
"""

from __future__ import annotations

from .experiment import Projection

__all__ = ["EXPERIMENTS", "Projection"]

EXPERIMENTS = (
    Projection(
        name="bai-2024-projection",
        paper="Bai, Rosenberg and Xu (2024), Generalized Tangent Kernel",
        figure="sections 2–4",
        claim="Natural gradients are projections of the functional gradient onto the tangent "
        "space, which exists in a Sobolev space and not in L².",
        about="tanh networks with one input in float64; ℓ is half the mean square. Predictions are "
        "made before the step and compared at 201 points that are not trained on.",
    ),
)
