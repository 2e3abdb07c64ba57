"""What results depend on: as a file holds it, and how two of them differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pullback import PullbackError

from . import plain


def settled(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as it comes back from a file."""
    content, arrays = plain.split(config)
    if arrays:
        raise PullbackError(
            "The configuration cannot be saved",
            f"{', '.join(arrays)} are arrays",
            "Say how they are made instead",
        )
    return json.loads(json.dumps(content))


def changed(old: dict[str, Any], new: dict[str, Any], open_parts: frozenset[str]) -> list[str]:
    """What differs, by name."""
    out = []
    for part in sorted(old.keys() | new.keys()):
        one, two = old.get(part), new.get(part)
        if part in open_parts and isinstance(one, dict) and isinstance(two, dict):
            out += sorted(f"{part} {k!r}" for k in one.keys() & two.keys() if one[k] != two[k])
        elif one != two:
            out.append(part)
    return out
