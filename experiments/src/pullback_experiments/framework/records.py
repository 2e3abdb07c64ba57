"""Records as JSON can hold them, with the arrays set aside.

    record  ⇄  (plain, arrays)

An array at the place `a.b` becomes {"array": "a.b"}, a float that is not finite {"float": "inf"}.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from pullback import PullbackError

#: what an item returns: names to numbers, words, lists, mappings and arrays
Record = dict[str, Any]
Arrays = dict[str, np.ndarray]


def split(record: Mapping[str, Any]) -> tuple[Record, Arrays]:
    """The part that is JSON, and the arrays by place.

    >>> split({"loss": [1.0, float("inf")], "x": np.zeros(2)})
    ({'loss': [1.0, {'float': 'inf'}], 'x': {'array': 'x'}}, {'x': array([0., 0.])})
    """
    arrays: Arrays = {}
    return _plain(record, "", arrays), arrays


def join(plain: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The record again."""
    if isinstance(plain, dict):
        if plain.keys() == {"array"}:
            return arrays[plain["array"]]
        if plain.keys() == {"float"}:
            return float(plain["float"])
        return {k: join(v, arrays) for k, v in plain.items()}
    if isinstance(plain, list):
        return [join(v, arrays) for v in plain]
    return plain


def _plain(value: Any, place: str, arrays: Arrays) -> Any:
    if isinstance(value, Mapping):
        return {_name(k, place): _plain(v, _inside(place, k), arrays) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, _inside(place, i), arrays) for i, v in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    import torch  # not above: results can be read and kept without it

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        arrays[place] = value
        return {"array": place}
    raise PullbackError(
        f"The record cannot be saved: {place or 'it'} is a {type(value).__name__}",
        "records are numbers, words, lists, mappings and arrays",
        "Return its numbers instead",
    )


def _inside(place: str, name: object) -> str:
    if place:
        return f"{place}.{name}"
    return str(name)


def _name(key: object, place: str) -> str:
    if not isinstance(key, str) or key in ("array", "float"):
        raise PullbackError(
            f"The record cannot be saved: {place or 'it'} has the name {key!r}",
            'names are words other than "array" and "float", which stand for what JSON lacks',
            "Use another name",
        )
    return key


#: what numpy and zipfile make of a damaged file
DAMAGED = (
    OSError, ValueError, EOFError, KeyError, NotImplementedError, RuntimeError,
    zipfile.BadZipFile, zlib.error, tokenize.TokenError,
)  # fmt: skip


def save(file: IO[bytes], arrays: Arrays) -> None:
    """Compressed; `numpy.savez` would give some names a meaning."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as held:
        for place, array in arrays.items():
            with held.open(f"{place}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)


def load(path: Path) -> Arrays:
    """By name; raises one of `DAMAGED` where that cannot be."""
    with np.load(path, allow_pickle=False) as held:
        return {k: held[k] for k in held.files}
