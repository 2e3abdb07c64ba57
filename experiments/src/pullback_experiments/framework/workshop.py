"""The folder of checkpoints of items that are under way, for one configuration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pullback import PullbackError
from pullback.cli import files

from . import locks
from .configuration import changed
from .store import Store

_CONFIG = "configuration"


@contextmanager
def workshop(store: Store) -> Iterator[Path]:
    """NAME.work beside NAME.json; refused where its checkpoints are of another configuration.

    It goes once there are no checkpoints in it and no other process is about to write some.
    """
    place = store.path.with_suffix(".work")
    _check(place, store)
    with locks.inside(files.folder(place)) as last:
        files.write_text(place / _CONFIG, json.dumps(store.config, ensure_ascii=False))
        try:
            yield place
        finally:
            if last() and not any(p.is_dir() for p in place.glob("*")):
                shutil.rmtree(place, ignore_errors=True)


def _check(place: Path, store: Store) -> None:
    if not any(p.is_dir() for p in place.glob("*")):
        return
    try:
        old = json.loads((place / _CONFIG).read_text("utf-8"))
        differ = changed(old, store.config, store.open_parts)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        differ = [str(error)]
    if differ:
        raise PullbackError(
            f"{place} holds checkpoints of another configuration",
            f"{', '.join(differ)} differ",
            "Move it away to start these items over",
        )
