"""What an import may load."""

import subprocess
import sys

import pullback as pb

LIBRARY = """
import sys
import pullback

loaded = {"torch", "numpy", "scipy"} & set(sys.modules)
assert not loaded, f"`import pullback` loads {loaded}"
for name in pullback.__all__:
    getattr(pullback, name)
slow = ("scipy.integrate", "scipy.linalg", "scipy.ndimage", "scipy.optimize", "scipy.sparse",
        "scipy.special", "matplotlib", "pandas", "rich", "sklearn", "typer")
loaded = set(slow) & set(sys.modules)
assert not loaded, f"the library loads {loaded}"
"""

COMMAND = """
import sys
import pullback.cli.app
import pullback_experiments.cli

slow = ("torch", "numpy", "scipy", "matplotlib")
loaded = set(slow) & set(sys.modules)
assert not loaded, f"the command line loads {loaded}"
"""


def test_slow_modules_wait_until_they_are_used() -> None:
    for code in (LIBRARY, COMMAND):
        process = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr


def test_a_name_that_does_not_exist_is_refused() -> None:
    assert not hasattr(pb, "NaturalGradiant")
    assert set(pb.__all__) <= set(dir(pb))
    assert pb.KFAC is pb.optim.KFAC
