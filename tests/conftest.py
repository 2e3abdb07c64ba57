"""What a test changes in global state does not reach the next one."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis.internal.conjecture import providers

from pullback.maps.layers import REGISTRY


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    layers = dict(REGISTRY)
    yield
    torch.set_default_dtype(dtype)
    REGISTRY.clear()
    REGISTRY.update(layers)


def pytest_configure() -> None:
    """Leave out work of torch and hypothesis that no test needs.

    No device is seeded that is not here: torch writes down the stack each time, for milliseconds.
    Hypothesis draws no constants from the sources: to parse them took an eighth of the collection,
    and what a test draws would change with every file.
    """
    providers._get_local_constants = lambda: providers._local_constants
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = _seed_nothing


def _seed_nothing(seed: int) -> None:
    """Stand for `manual_seed_all` of a device that is not here."""


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[Any], list[Any]]:
    """Look for examples in docstrings of helpers, not of tests: these have none."""
    collectors = yield
    if not file_path.name.startswith("test_"):
        return collectors
    return [c for c in collectors if not isinstance(c, DoctestModule)]


def pytest_collection() -> None:
    """Collect no garbage while modules are imported: hardly any of it is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Look no more at what was imported: full collections took a fifth of the whole run.

    New objects are looked at less often than by default (700), which took a twentieth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()
