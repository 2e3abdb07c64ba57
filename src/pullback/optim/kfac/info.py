"""What a K-FAC step did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class KFACInfo:
    """What a step did.

    Attributes:
        accepted: whether the parameters moved.
        reason: why not, or empty.
        damping: λ in use.
        taken: whether statistics were taken up.
        notes: what went wrong or was left out when blocks were inverted, by parameters.
        ratio: actual over predicted reduction, where it was measured.
        step_size, momentum: the model's best factors, where they were computed.
        low_rank: blocks whose gradient was preconditioned from its factors.
    """

    accepted: bool = True
    reason: str = ""
    damping: float = 0.0
    taken: bool = False
    notes: dict[str, str] = field(default_factory=dict)
    ratio: float | None = None
    step_size: float | None = None
    momentum: float | None = None
    low_rank: int = 0
