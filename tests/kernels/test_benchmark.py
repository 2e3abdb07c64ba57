"""The benchmark's routes compute one kernel."""

from __future__ import annotations

import pytest
import torch

from pullback.testing import assert_close
from pullback_experiments.benchmarks import kernels
from tests.laws.models import conv1d, mlp


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("net", ["mlp", "conv"])
def test_the_routes_agree(net: str) -> None:
    torch.manual_seed(0)
    model = (mlp(3, 5, 2) if net == "mlp" else conv1d()).double()
    if net == "mlp":
        x = torch.randn(3, 3)
    else:
        x = torch.randn(3, 2, 8)
    want = kernels.contraction(model, x.double())
    for name, route in kernels.ROUTES.items():
        assert_close(route(model, x.double()), want, 1e-12, name)


@pytest.mark.slow
def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--quick", "--only", "attention"])
    out = capsys.readouterr().out
    assert "pullback" in out
    assert "contraction" in out
