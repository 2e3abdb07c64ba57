"""The terminal that a command speaks to."""

from __future__ import annotations

import io
import sys

from rich.console import Console


def console() -> Console:
    """Rich's; wide enough for a table where the output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 140)


def forgiving() -> None:
    """Write "?" for a character that the output's encoding lacks, instead of breaking off."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
