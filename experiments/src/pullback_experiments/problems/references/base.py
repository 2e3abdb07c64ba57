"""What a reference solution is: a function of points, whose arrays are kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pullback._core.errors import PullbackError

Array = NDArray[Any]


class Reference(ABC):
    """x (N, d) ↦ u(x) (N, m), in the dtype and on the device of x, computed in float64.

    Coordinates are space first, time last. `domain` has one interval (low, high) for each.
    Points outside it are refused; what lies outside by rounding alone is moved onto it.
    """

    domain: tuple[tuple[float, float], ...]
    outputs: ClassVar[int] = 1

    @abstractmethod
    def values(self, points: Array) -> Array:
        """u at points (N, d) of the domain, (N, m); numpy float64 in and out."""

    def __call__(self, x: Tensor) -> Tensor:
        points = self._inside(x)
        return torch.from_numpy(self.values(points)).to(device=x.device, dtype=x.dtype)

    def _inside(self, x: Tensor) -> Array:
        dim = len(self.domain)
        if x.ndim != 2 or x.shape[1] != dim:
            raise PullbackError(
                f"{type(self).__name__} cannot be evaluated",
                f"the points have shape {tuple(x.shape)}",
                f"Pass points of shape (N, {dim}), space first, time last",
            )
        if not x.dtype.is_floating_point:
            raise PullbackError(
                f"{type(self).__name__} cannot be evaluated",
                f"the points have dtype {x.dtype}",
                "Pass floating-point points",
            )
        points = x.detach().cpu().double().numpy()
        low, high = np.array(self.domain).T
        slack = 4 * torch.finfo(x.dtype).eps
        outside = ~((points >= low - slack) & (points <= high + slack)).all(axis=1)
        if outside.any():
            raise PullbackError(
                f"{type(self).__name__} cannot be evaluated",
                f"{int(outside.sum())} of {len(points)} points are not in the domain, "
                f"the first is {points[outside][0].tolist()}",
                f"Keep each coordinate in its interval: {self.domain}",
            )
        return np.clip(points, low, high)


def relative(a: Array, b: Array) -> float:
    """‖a − b‖ / ‖b‖ in the Euclidean norm of all entries."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def require_resolved(error: float, what: str, limit: float = 1e-3) -> float:
    """The estimated error, if it is small enough to call the solution a reference."""
    if not error <= limit:
        raise PullbackError(
            f"{what} has no reference",
            f"two resolutions differ by {error:.1e} of the solution: it is not resolved",
            "Choose parameters with a smoother solution",
        )
    return error


def folder() -> Path:
    """$PULLBACK_CACHE, or `pullback` in the platform's folder for caches."""
    if named := os.environ.get("PULLBACK_CACHE"):
        return Path(named).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pullback"


def load_or_compute(
    name: str,
    parameters: Mapping[str, float],
    version: int,
    keys: tuple[str, ...],
    compute: Callable[[], dict[str, Array]],
) -> dict[str, Array]:
    """The arrays `keys` of compute(), from disk if they were computed before.

    The file is named after name, parameters and version. A file that cannot be read is computed
    again, and where nothing can be written nothing is kept.
    """
    text = json.dumps([name, version, sorted(parameters.items())])
    path = folder() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"
    arrays = _read(path, keys)
    if arrays is None:
        arrays = compute()
        with contextlib.suppress(OSError):
            _write(path, arrays)
    return arrays


def _read(path: Path, keys: tuple[str, ...]) -> dict[str, Array] | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in keys}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _write(path: Path, arrays: dict[str, Array]) -> None:
    """Write beside the target and rename: a reader never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
