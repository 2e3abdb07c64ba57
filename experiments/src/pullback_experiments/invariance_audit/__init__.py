r"""Van Oostrum, Müller and Ay (2023), with Luk and Grosse (2018): who depends on coordinates?

A model φ(w) and its twin ψ = φ∘f start from the same function and take the same optimizer's steps:

    on the model (Definition 5):            dψ·O(ψ, θ) = dφ·O(φ, w),
    on the parameter space (Definition 6):  df·O(ψ, θ) = O(φ, w).

Theorem 2 of the first paper says that the natural gradient satisfies the one and, where parameters
are superfluous, not the other; the second paper, that K-FAC satisfies both for affine changes of
layers. Here `geometry.audit` asks twelve optimizers under eight transformations, on small networks.
"""

from __future__ import annotations

from .experiment import InvarianceAudit

__all__ = ["EXPERIMENTS", "InvarianceAudit"]

EXPERIMENTS = (InvarianceAudit(),)
