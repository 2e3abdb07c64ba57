"""Programs of the PDE gallery: short, distinct, and each of them runs."""

from __future__ import annotations

import warnings

import pytest
import torch

from pullback_experiments.benchmarks.pde_gallery import (
    REFERENCES,
    operator,
    programs,
    reaction,
)

PROGRAMS = programs()


def test_the_page_has_what_it_says() -> None:
    assert len(PROGRAMS) == 17
    assert set(REFERENCES) <= set(PROGRAMS)
    long = {name: p.lines for name, p in PROGRAMS.items() if p.lines >= 15}
    assert not long
    for program in PROGRAMS.values():
        compile(program.code, program.name, "exec")


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("polygon", "operator") else pytest.param(n, marks=pytest.mark.slow)
        for n in PROGRAMS
    ],
)
def test_programs_run(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = PROGRAMS[name].run(steps=2)
    assert len(names["solution"].history) == 2
    assert names["solution"].network is names["network"]
    assert names["problem"].known or name in REFERENCES


@pytest.mark.slow
def test_references() -> None:
    """Zero is off by all; the linear answer to small sources is nearly right."""
    assert reaction(lambda x: torch.zeros(len(x), 2)) == 1.0
    assert operator(lambda z: torch.zeros(len(z), 1)) == 1.0

    def linear(z: torch.Tensor) -> torch.Tensor:
        x, a, b = z.T
        pi = torch.pi
        u = a * torch.sin(pi * x) / pi**2 + b * torch.sin(2 * pi * x) / (4 * pi**2)
        return 10 * u[:, None]

    assert operator(linear) < 0.1
