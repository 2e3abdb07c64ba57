"""Packages that the library can do without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import PullbackError

#: extra of the distribution ↦ the packages it installs, and what they are for
EXTRAS = {
    "plots": (("matplotlib",), "figures are drawn by it"),
    "cli": (("rich", "typer"), "the command line is made of it"),
}


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import what an extra installs; where it is missing, the refusal says how to install it."""
    packages, purpose = EXTRAS[name]
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in packages:
            raise
        remedy = f"Install it: pip install 'pullback[{name}]'"
        raise PullbackError(f"{missing} is not installed", purpose, remedy) from None
