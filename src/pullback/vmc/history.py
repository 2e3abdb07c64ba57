"""What happened along a minimization, step by step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class History:
    """One entry per step.

    Attributes:
        energy, error, variance: of the samples before the step.
        acceptance: share of the proposals that were accepted.
        rhat: R̂ of the chains; NaN where each gave one sample.
        lr: learning rate of the step.
        damping: of the solve.
        momentum: μ of SPRING; 0 where the step has none.
        seconds: spent so far, without the final measurement.
        sampling_seconds, energy_seconds, solving_seconds: of the step's chains, of its local
            energies, and of its natural gradient.
    """

    energy: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    variance: list[float] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)
    rhat: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    damping: list[float] = field(default_factory=list)
    momentum: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sampling_seconds: list[float] = field(default_factory=list)
    energy_seconds: list[float] = field(default_factory=list)
    solving_seconds: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.energy)

    @property
    def spent(self) -> float:
        """Seconds in steps."""
        return self.seconds[-1] if self.seconds else 0.0

    def append(self, **numbers: float) -> None:
        """Add one step; every attribute gets a number."""
        for name in (f.name for f in fields(self)):
            getattr(self, name).append(numbers[name])

    def as_dict(self) -> dict[str, list[Any]]:
        """Plain lists, to save."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, list[Any]]) -> History:
        """What `as_dict` gave."""
        return cls(**{f.name: list(state[f.name]) for f in fields(cls)})
