"""One group of processes for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .world import World


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    processes = World(3)
    yield processes
    processes.close()
