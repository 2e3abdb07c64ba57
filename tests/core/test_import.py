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

#: goes on in a process that cannot import what extras install
WITHOUT_EXTRAS = """
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("matplotlib", "rich", "typer"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import pullback as pb

problem = pb.pde.Problem(pb.pde.Interval(0, 1), [pb.pde.Equation(lambda u: u.xx + 1)], name="Line")
solution = pb.pde.solve(problem, pb.pde.mlp(1, 3, 1, seed=0), steps=1, points=8)
assert "Audit" in str(pb.geometry.Audit(()))
try:
    solution.plot()
except pb.PullbackError as error:
    print(error)

from pullback.__main__ import main
main()
"""

COMMAND = """
import sys
import pullback.cli.app
import pullback_experiments.cli

slow = ("torch", "numpy", "scipy", "matplotlib")
loaded = set(slow) & set(sys.modules)
assert not loaded, f"the command line loads {loaded}"
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_library_waits_for_slow_modules_and_names_missing_ones() -> None:
    process = run_python(LIBRARY + WITHOUT_EXTRAS)
    assert "Traceback" not in process.stderr, process.stderr
    assert process.stdout.count("matplotlib is not installed") == 1
    assert process.stdout.count("pip install 'pullback[plots]'") == 1
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].endswith("pip install 'pullback[cli]'")


def test_the_command_waits_for_slow_modules() -> None:
    process = run_python(COMMAND)
    assert process.returncode == 0, process.stderr


def test_a_name_that_does_not_exist_is_refused() -> None:
    assert not hasattr(pb, "NaturalGradiant")
    assert set(pb.__all__) <= set(dir(pb))
    assert pb.KFAC is pb.optim.KFAC
