"""Errors that say what broke, why, and what to do; and statuses that are values, not exceptions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum


class PullbackError(RuntimeError):
    """A request that cannot be met.

    The message has three parts: *what* broke, *why*, and the *remedy*.
    """

    def __init__(self, what: str, why: str, remedy: str) -> None:
        super().__init__(f"{what}: {why}. {remedy}")
        self.what = what
        self.why = why
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[PullbackError], tuple[str, str, str]]:
        # Python rebuilds exceptions from their message alone; the three parts let this one be
        # pickled, which brings it back from another process
        return type(self), (self.what, self.why, self.remedy)


class Status(Enum):
    """How a computation ended; the value is the sentence a user reads, remedy included."""

    OK = "solved"
    GREW_DAMPING = (
        "the damped Gram was not positive definite, so the damping was increased; "
        "raise the damping, or use PseudoInverse for singular systems"
    )
    MAX_ITERATIONS = (
        "the iteration limit was reached before the tolerance; "
        "raise max_iterations, the damping, or pass a preconditioner"
    )
    INACCURATE = (
        "so small a damping lets no digits of x pass: those of G + damping or of g were lost in "
        "round-off, or the tolerance is too large; raise the damping, lower the tolerance, pass "
        "the whitened gradient, or hold rows"
    )
    SINGULAR = (
        "the Gram is zero or not finite, so no direction could be found; "
        "check the model's outputs, or add damping"
    )
    NOT_REPRESENTABLE = (
        "the whitened gradient r with S r = g overflows or g is outside the range of S; "
        "add damping: the solve then works from g alone"
    )

    @property
    def ok(self) -> bool:
        """Return True if the accompanying value can be used."""
        return self is not Status.SINGULAR and self is not Status.NOT_REPRESENTABLE


def describe_nearest_names(name: str, known: Iterable[str]) -> str:
    """Return a clause with the three known names that are most like an unknown one.

    >>> describe_nearest_names("poison", ["poisson", "heat", "wave", "prism"])
    'the nearest are poisson, prism, wave'
    """
    close = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.0)
    return f"the nearest are {', '.join(close)}"


def describe_value(value: object) -> str:
    """Return what a caller gave, in a few words: its repr, or what it is where that is long.

    >>> describe_value(0.1), describe_value(dict)
    ('0.1', 'the class dict itself, not an object of it')
    """
    if isinstance(value, type):
        return f"the class {value.__name__} itself, not an object of it"
    words = repr(value)
    if "\n" not in words:
        return words
    shape = getattr(value, "shape", None)
    if shape is None:
        return type(value).__name__
    return f"{type(value).__name__} of shape {tuple(shape)}"


def require(usable: bool, what: str, value: object, remedy: str) -> None:
    """Raise that `what` is not usable, unless it is."""
    if not usable:
        raise PullbackError(f"{what} is not usable", f"got {describe_value(value)}", remedy)


def require_type(name: str, value: object, required: type) -> None:
    """Raise unless the value of the argument `name` is None or of this type."""
    if value is not None and not isinstance(value, required):
        raise PullbackError(
            f"{name}= is not a {required.__name__}",
            f"got {describe_value(value)}",
            f"Pass an object of pullback.{name}s, or None for the default",
        )


def refuse_unknown(what: str, name: object, known: Iterable[object]) -> None:
    """Raise if a name is not among the choices that an option knows."""
    if name not in (choices := tuple(known)):
        words = ", ".join(map(repr, choices))
        raise PullbackError(
            f"Unknown {what} {name!r}", "it is not one of the choices", f"Use one of {words}"
        )


def reraise_fatal(error: Exception) -> None:
    """Raise again an error that no other route avoids: out of memory, or a `PullbackError`."""
    import torch  # not above: the command line shows errors and help without it

    if isinstance(error, (torch.OutOfMemoryError, PullbackError)):
        raise error


#: extra of the distribution ↦ the packages that it installs, and what needs them
EXTRAS = {
    "plots": (("matplotlib",), "figures are drawn by it"),
    "cli": (("rich", "typer"), "the command line is made of it"),
}


@contextmanager
def import_extra(name: str) -> Iterator[None]:
    """Import packages of an extra inside; if one is missing, the error says how to install it."""
    packages, purpose = EXTRAS[name]
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in packages:
            raise
        remedy = f"Install it: pip install 'pullback[{name}]'"
        raise PullbackError(f"{missing} is not installed", purpose, remedy) from None
