"""Gauss–Newton above the layers beside ordinary steps to the same loss."""

from __future__ import annotations

from ..benchmarks.gauss_newton_verdict import list_rows
from .numbers import Rows, record


def gauss_newton() -> Rows:
    """Return every inner solver's loss, and what others take to it.

    Passes of ordinary steps are left out: they follow from the steps and the batch.
    """
    rows = list_rows(list(record("gauss-newton-inner")["results"].values()))
    return [[*row[:5], row[6]] for row in rows]
