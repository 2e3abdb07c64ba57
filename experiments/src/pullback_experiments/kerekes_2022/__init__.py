r"""Kerekes, Mészáros and Huszár (2022): what depth does to the solutions that training finds.

Gradient descent in β = w₁∘⋯∘w_L finds ℓ_{2/L} margins, in β = W₁⋯W_L matrices of low rank. Natural
gradient descent finds the same β at any depth. The paper shows

    Figure 2   separable points of the plane                        `planar`
    Figure 3   what moves when one entry of a matrix is observed    `tangents`
    Figure 4   sparse classification in 1000 dimensions             `sparse`
    Figure 5   completing a matrix of rank 5, and a search for NGD that does      `completion`
    Figure 6   figure 4 in 50 dimensions                            `sparse`
    Theorems 1–4, Appendices D, E and G                             `theorems`
    Section 3  support vectors                                      `support`

The paper takes millions of steps of gradient descent and states no learning rate, start or time.
Here Euclidean runs are flows in coordinates in which logits of 10⁴ are near (`margins`), or steps
at a fixed share of the local stability limit (`factorization`). Losses and Fisher matrices are both
sums: with a summed loss and a mean Fisher matrix, as printed, everything is N times faster.

What the seeds say is in `docs/reproductions/kerekes-2022.md`; the checks repeat it.
"""

from __future__ import annotations

from .completion import Completion
from .planar import Planar
from .sparse import Sparse
from .support import Support
from .tangents import Kernels
from .theorems import Theorems

EXPERIMENTS = (
    Planar(
        name="kerekes-2022-figure2",
        figure="Figure 2",
        claim="EGD's separator depends on depth, NGD's does not",
    ),
    Kernels(
        name="kerekes-2022-figure3",
        figure="Figure 3",
        claim="EGD moves entries that are not observed, NGD only the one that is",
    ),
    Sparse(
        name="kerekes-2022-figure4",
        figure="Figure 4",
        claim="NGD fails on sparse classification where EGD with some depth succeeds",
        dim=1000,
        nonzero=20,
        samples=(100, 250, 500, 750, 1000, 1500, 2000, 2500),
        depths=(1, 2, 3, 4),
        natural_depths=(1,),
        small=(100, 5, (25, 50, 80, 150, 250), (1, 2, 3)),
        lr=1 / 3,
        end=10.0,
        seeds=(0, 1, 2),
        expected_outcomes=(True, True, False, False, True, True, True, True, True, True),
    ),
    Completion(
        name="kerekes-2022-figure5",
        figure="Figure 5",
        claim="EGD with L ≥ 2 completes matrices of low rank, NGD never does",
        seeds=(0, 1, 2, 3, 4),
    ),
    Sparse(
        name="kerekes-2022-figure6",
        figure="Figure 6",
        claim="as Figure 4, in 50 dimensions",
        dim=50,
        nonzero=5,
        samples=(10, 25, 40, 50, 75, 100, 150, 250),
        depths=(1, 2, 3, 4, 5),
        natural_depths=(1, 2, 3),
        small=(30, 3, (10, 20, 60, 100), (1, 2, 3)),
        seeds=tuple(range(5)),
        expected_outcomes=(False, False, False, False, True, True, False, True, True, True),
    ),
    Theorems(
        name="kerekes-2022-theorems",
        figure="Theorems 1–4, Appendices D, E, G",
        claim="NGF is invariant, and its logits grow as t·y",
    ),
    Support(
        name="kerekes-2022-support",
        figure="Section 3",
        claim="under NGD every sample is a support vector as soon as D > N",
    ),
)

__all__ = [
    "EXPERIMENTS",
    "Planar",
    "Kernels",
    "Sparse",
    "Completion",
    "Theorems",
    "Support",
]
