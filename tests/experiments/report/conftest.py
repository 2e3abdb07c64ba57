"""A browser for all tests of a process, where the system has one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .browser import Browser, executable


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if executable() is None:
        pytest.skip("no Chromium: install it (apt-get install chromium) to test the report page")
    with Browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="session")
def records() -> Path:
    """The committed results."""
    return Path(__file__).parents[3] / "experiments" / "results"
