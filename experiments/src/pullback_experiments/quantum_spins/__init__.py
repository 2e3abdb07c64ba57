"""Neural quantum states: ground energies of spin chains, and J1–J2 on a GPU (`device`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .experiment import EXPERIMENTS, QuantumSpins

__all__ = ["EXPERIMENTS", "QuantumSpins"]


def __getattr__(name: str) -> Any:
    """Import the experiment when it is asked for: `device` works where torch alone is installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import experiment

    return getattr(experiment, name)
