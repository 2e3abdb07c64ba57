r"""Luk and Grosse (2018): K-FAC does not depend on affine coordinates of a network's layers.

The paper shows that K-FAC is the natural gradient of a metric that knows nothing of coordinates,
so that a network and its twin in other affine coordinates of activations and pre-activations,

    a† = Ωa + γ,    z = Φz† + τ    (random, or sigmoid → tanh, or whitened inputs),

compute the same function after every step. Here both are trained side by side, ten steps on fresh
batches in float64 with the exact Fisher metric, and their functions are compared at held-out
inputs, relative to how far the function has moved.

What is the paper's: Theorem 2.1 (networks of linear layers), 4.2 (convolutions), 5.2 (recurrent
nets), Remark 3.11 (other metrics on outputs), nondegeneracy in Theorems 3.6, 3.10, 4.4 and 5.4.
What is not: momentum, moving averages, the KL clip and `Invariant` damping, which keep invariance;
that Theorem 4.2 needs padding with γ instead of zeros, and 5.2 an a₀ that changes too.

What the seeds say is in `docs/reproductions/luk-grosse-2018.md`; the checks repeat it.
"""

from __future__ import annotations

from .experiment import Invariance

__all__ = ["EXPERIMENTS", "Invariance"]

EXPERIMENTS = (Invariance(),)
