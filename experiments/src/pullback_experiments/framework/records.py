"""Records as JSON can hold them, with the arrays set aside.

    record  ⇄  (plain, arrays)

An array at the path `a.b` becomes {"array": "a.b"}, a float that is not finite {"float": "inf"}.
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
    """Return the record as JSON, and its arrays by their paths in the record.

    >>> split({"loss": [1.0, float("inf")], "x": np.zeros(2)})
    ({'loss': [1.0, {'float': 'inf'}], 'x': {'array': 'x'}}, {'x': array([0., 0.])})
    """
    arrays: Arrays = {}
    return _to_json(record, "", arrays), arrays


def join(plain: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return the record that `split` was given."""
    if isinstance(plain, dict):
        if plain.keys() == {"array"}:
            return arrays[plain["array"]]
        if plain.keys() == {"float"}:
            return float(plain["float"])
        return {k: join(v, arrays) for k, v in plain.items()}
    if isinstance(plain, list):
        return [join(v, arrays) for v in plain]
    return plain


def _to_json(value: Any, path: str, arrays: Arrays) -> Any:
    """Return a value of JSON; arrays go to `arrays` under their path."""
    if isinstance(value, Mapping):
        entries = {}
        for key, entry in value.items():
            entries[_check_name(key, path)] = _to_json(entry, _join_path(path, key), arrays)
        return entries
    if isinstance(value, (list, tuple)):
        return [_to_json(v, _join_path(path, i), arrays) for i, v in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return _number_to_json(value)
    return _array_to_json(value, path, arrays)


def _number_to_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _array_to_json(value: Any, path: str, arrays: Arrays) -> Record:
    import torch  # not above: results can be read and saved without it

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        arrays[path] = value
        return {"array": path}
    raise PullbackError(
        f"The record cannot be saved: {path or 'it'} is a {type(value).__name__}",
        "records are numbers, words, lists, mappings and arrays",
        "Return its numbers instead",
    )


def _join_path(path: str, name: object) -> str:
    if path:
        return f"{path}.{name}"
    return str(name)


def _check_name(key: object, path: str) -> str:
    """Return the key; raise if it is no word, or one that stands for what JSON lacks."""
    if not isinstance(key, str) or key in ("array", "float"):
        raise PullbackError(
            f"The record cannot be saved: {path or 'it'} has the name {key!r}",
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
    """Write the arrays, compressed; `numpy.savez` would give some names a meaning."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, array in arrays.items():
            with archive.open(f"{path}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)


def load(path: Path) -> Arrays:
    """Return the arrays by path; raise one of `DAMAGED` if the file cannot be read."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
