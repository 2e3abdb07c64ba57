r"""Yin (2024): the natural gradient on a few greedily chosen tangent vectors, over ten seeds.

The paper asks whether the natural gradient h with G h = ∇L, whose Gram G is singular in practice,
can be replaced by one on a few tangent vectors ∂_i u that an orthogonal greedy algorithm (OGA)
selects, and shows

    Figure 1   least squares, 2-30-1, 10 vectors         ("shallow")
    Figure 2   least squares, 2-20-20-1, 20 vectors      ("deep")
    Figure 3   Poisson, 2-20-20-1, boundary weight 100, directions cut to ±1000

It names remedies where the energy natural gradient (E-NGD) sticks: cutting the direction,
first-order pre-training, backtracking instead of a grid of step sizes. All of these run here, with
the paper's settings where it states them. It does not state the number of points (here 1000 for
least squares; 600 inside and 120 on the boundary for Poisson; uniform, fixed along a run), the
number of steps, the greedy steps of Figure 3 (here 20), nor how many runs there were.

What is the paper's: the dense Gram, its minimum-norm solution, the grid of 30 step sizes. What is
not: the grid search accepts only a fall of the loss, and a run whose step is rejected has ended,
since the next step would be the same; "arg-min" is the search without that test. I ∪ {i} replaces
the printed I ∩ {i}. The L² Gram and the gradient use the same points.

What the seeds say is in `docs/reproductions/yin-2024.md`; the checks repeat it.
"""

from __future__ import annotations

from .experiment import Comparison
from .table import EXPERIMENTS

__all__ = ["EXPERIMENTS", "Comparison"]
