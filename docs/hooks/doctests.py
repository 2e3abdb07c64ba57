"""A griffe extension: the examples of docstrings become code blocks of the reference.

A block of lines from ``>>>`` to the next empty line is fenced as ``pycon``, so that the page shows
it as it stands and does not read ``[1.0, 2.0]`` as a link.
"""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(?P<indent>[ ]*)>>> .*(?:\n(?!\s*\n|```).+)*", re.MULTILINE)


def fenced(text: str) -> str:
    """`text` with a fence around every block of examples."""

    def fence(match: re.Match[str]) -> str:
        indent = match["indent"]
        return f"{indent}```pycon\n{match[0]}\n{indent}```"

    return EXAMPLE.sub(fence, text)


class Doctests(griffe.Extension):
    """Fences the examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None and "```" not in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)
