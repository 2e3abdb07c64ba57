"""Arrays in an npz file, under names of any kind."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from .plain import Arrays

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
