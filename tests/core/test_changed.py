"""`make check` runs the tests of what changed."""

from pathlib import Path

import pytest

from tests.changed import ROOT, nearest, sources


@pytest.mark.parametrize(
    ("file", "actual"),
    [
        ("src/pullback/solvers/cholesky.py", "tests/solvers"),
        ("src/pullback/optim/kfac/factors/damping.py", "tests/optim/kfac"),
        ("src/pullback/_core/lazy.py", "tests/core"),
        ("src/pullback/__init__.py", "tests/core"),
        (
            "experiments/src/pullback_experiments/yin_2024/table.py",
            "tests/experiments/test_yin_2024.py",
        ),
        ("src/pullback/maps/layers/conv.py", "tests/maps/layers"),
        ("tests/solvers/helpers.py", "tests/solvers"),
        ("tests/solvers/test_cg.py", "tests/solvers/test_cg.py"),
        ("docs/linear.md", "tests/docs/test_snippets.py::test_snippets_run[docs/linear.md]"),
        ("examples/poisson.py", "tests/examples"),
    ],
)
def test_a_file_has_the_tests_nearest_to_it(file: str, actual: str) -> None:
    assert actual in nearest([Path(file)])
    assert all((ROOT / test.partition("::")[0]).exists() for test in nearest([Path(file)]))


def test_what_is_no_code_has_none() -> None:
    assert nearest([Path("Makefile"), Path("docs/figures/demo.png")]) == []
    assert sources([Path("tests/changed.py"), Path("src/pullback/py.typed")]) == []
