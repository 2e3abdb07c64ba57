"""The natural gradient beside torch's optimizers on three small problems."""

from __future__ import annotations

from .experiment import Demonstration

__all__ = ["EXPERIMENTS", "Demonstration"]

EXPERIMENTS = (Demonstration(),)
