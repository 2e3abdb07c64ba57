"""Mismatch of networks and twins against steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ..framework.curves import Chart, Line, Series
from .checks import Found
from .methods import GROUPS
from .nets import Net
from .run import Record

_BOTTOM, _TOP = 1e-16, 1e3  # where exact equality and divergence are drawn


def charts(found: Found, nets: Sequence[Net]) -> list[Chart]:
    """One for each network."""
    return [
        Chart(
            net.name,
            "mismatch of network and twin",
            [_series(group, found[net.name, group]) for group in GROUPS],
            logx=False,
            note="medians over seeds and variants, between the best and the worst",
        )
        for net in nets
    ]


def _series(group: str, records: Sequence[Record]) -> Series | None:
    if not records:
        return None
    columns = list(
        zip(*([min(max(v, _BOTTOM), _TOP) for v in r.mismatch] for r in records), strict=True)
    )
    middle, low, high = ([f(c) for c in columns] for f in (median, min, max))
    # the first two lie upon each other
    style = "dashed" if GROUPS.index(group) == 1 else "solid"
    return Series(group, {"step": Line(list(range(len(columns))), middle, low, high)}, style=style)
