"""Moments of convolution patches, against the patches themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pullback.maps.layers import patches as module_under_test
from pullback.maps.layers.patches import patch_moment, patches

Make = Callable[[], nn.Module]

CASES: dict[str, tuple[Make, tuple[int, ...]]] = {
    "1×1": (lambda: nn.Conv2d(5, 2, 1), (3, 5, 4, 6)),
    "1×1 strided, padded": (lambda: nn.Conv2d(5, 2, 1, stride=(2, 3), padding=1), (3, 5, 4, 6)),
    "3×3": (lambda: nn.Conv2d(3, 2, 3), (4, 3, 8, 7)),
    "3×3 padded": (lambda: nn.Conv2d(3, 2, 3, padding=1), (4, 3, 5, 6)),
    "5×5": (lambda: nn.Conv2d(2, 2, 5, padding=2), (3, 2, 9, 8)),
    "3×5, other paddings": (lambda: nn.Conv2d(2, 2, (3, 5), padding=(4, 1)), (3, 2, 6, 8)),
    "even, same": (lambda: nn.Conv2d(2, 2, (2, 4), padding="same"), (3, 2, 6, 7)),
    "dilated": (lambda: nn.Conv2d(2, 2, 3, dilation=(2, 3), padding=3), (3, 2, 9, 8)),
    "dilated beyond the window": (lambda: nn.Conv2d(2, 2, 3, dilation=4), (3, 2, 10, 9)),
    "one row of places": (lambda: nn.Conv2d(2, 2, 3), (3, 2, 3, 9)),
    "one place": (lambda: nn.Conv2d(2, 2, 4), (3, 2, 4, 4)),
    "kernel on one axis": (lambda: nn.Conv2d(3, 2, (1, 7), padding=(0, 3)), (3, 3, 4, 9)),
    "kernel on the other": (lambda: nn.Conv2d(3, 2, (7, 1), padding=(3, 0)), (3, 3, 9, 4)),
    "reflect": (lambda: nn.Conv2d(2, 2, 3, padding=2, padding_mode="reflect"), (3, 2, 6, 5)),
    "replicate": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="replicate"), (3, 2, 6, 5)),
    "circular": (
        lambda: nn.Conv2d(2, 2, (3, 4), padding="same", padding_mode="circular"),
        (3, 2, 6, 5),
    ),
    "groups": (lambda: nn.Conv2d(6, 4, 3, groups=2, padding=1), (3, 6, 7, 6)),
    "depthwise": (lambda: nn.Conv2d(5, 10, 3, groups=5, padding=1), (3, 5, 7, 6)),
    "strided": (lambda: nn.Conv2d(3, 2, 3, stride=2, padding=1), (3, 3, 8, 7)),
    "strided on one axis": (lambda: nn.Conv2d(3, 2, 5, stride=(3, 1), padding=2), (3, 3, 8, 9)),
    "disjoint": (lambda: nn.Conv2d(3, 2, 4, stride=4, groups=1), (3, 3, 9, 8)),
    "1d": (lambda: nn.Conv1d(3, 2, 5, padding=2), (4, 3, 11)),
    "1d dilated, grouped": (lambda: nn.Conv1d(4, 2, 3, dilation=3, groups=2), (4, 4, 11)),
    "1d causal": (lambda: nn.Conv1d(4, 2, 4, padding=3), (4, 4, 3)),
    "1d strided": (lambda: nn.Conv1d(3, 2, 5, stride=2), (4, 3, 11)),
    "3d": (lambda: nn.Conv3d(2, 2, 3, padding=1), (2, 2, 4, 5, 6)),
    "3d mixed": (
        lambda: nn.Conv3d(4, 2, (3, 2, 3), stride=(2, 1, 1), dilation=(1, 2, 1), groups=2),
        (2, 4, 5, 6, 5),
    ),
    "3d thin": (lambda: nn.Conv3d(2, 2, (3, 1, 3), stride=(1, 2, 1)), (2, 2, 5, 5, 5)),
}


def dense(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    a = patches(module, x)
    return torch.einsum("bgpi,bgpj->gij", a, a), a.sum((0, 2))


@pytest.fixture(params=["by size", "slide", "fold"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    gain = {"by size": module_under_test._GAIN, "slide": 0.0, "fold": float("inf")}
    monkeypatch.setattr(module_under_test, "_GAIN", gain[request.param])
    return request.param


@pytest.mark.parametrize("case", CASES)
def test_moments_are_those_of_the_patches(case: str, route: str) -> None:
    make, shape = CASES[case]
    module, x = make().double(), torch.randn(shape, dtype=torch.float64)
    for got, want in zip(patch_moment(module, x), dense(module, x), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
