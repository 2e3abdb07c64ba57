r"""Van Oostrum, Müller and Ay (2023): the natural parameter gradient where parameters are too many.

The paper asks when dφ·G⁺∇L, the move that a natural gradient step makes of the model, is the
natural gradient, and what of it depends on the parametrization. It has no experiments. Here its
examples are computed and drawn, and its theorems checked on random maps R⁸ → R⁵ of rank 3:

    Theorem 1      dφ·G⁻∇L is the projection of grad L on the image of dφ, for any G⁻
    Theorem 2      with ψ = φ∘f it is the same move, though not the same parameter vector
    Example 1      two parametrizations of a plane whose tangent vectors span different lines
    Example 2, A.2 the crossing of a figure eight, reached from two parameters
    A.3            φ = (ξ₁ + ξ₂, 0) and f = (2θ₁, θ₂): y_Ξ = (3, 3), y_Θ = (4⅘, 1⅕)
    Proposition 2  a homeomorphism whose differential is zero leaves no move at all
    section 4      steps of finite size end elsewhere in other coordinates

The figure eight of A.2 crosses itself at ξ = 0 and ξ = π, not at π/2 as printed, so the interval
has to be (−π/4, 5π/4) and f(θ) = π − θ; the printed tangent vectors and moves are then right.
`invariance-audit` asks the same of optimizers and networks.
"""

from __future__ import annotations

from .experiment import Examples

__all__ = ["EXPERIMENTS", "Examples"]

EXPERIMENTS = (Examples(),)
