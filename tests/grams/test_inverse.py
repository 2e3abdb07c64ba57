"""Inverse blocks in every form are applied as their dense inverse."""

import pytest
import torch
from torch import Tensor

from pullback.grams.kronecker.inverse import Inverse, aligned, apply_inverse, rounded, widened
from pullback.symmetry.descent.transport import _LayerScales, _rescale_inverse

DOUBLE = torch.float64


def spd(groups: int, n: int, seed: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(groups, n, 2 * n, generator=g, dtype=dtype)
    return a @ a.mT / n + 0.1 * torch.eye(n, dtype=dtype)


def padded(side: Tensor) -> Tensor:
    more = aligned(side.shape[-1]) - side.shape[-1]
    return torch.nn.functional.pad(side, (0, more) * (side.ndim - 1))


def forms(left: Tensor, right: Tensor) -> dict[str, Inverse]:
    inverses = torch.linalg.inv(left), torch.linalg.inv(right)
    rows, u = torch.linalg.eigh(left)
    columns, w = torch.linalg.eigh(right)
    return {
        "inverse": Inverse(inverses[0], padded(inverses[1])),
        "factors": Inverse(*map(torch.linalg.cholesky, (left, right)), factors=True),
        "eigenbasis": Inverse(u, w, 1 / (rows[..., None] * columns[:, None])),
    }


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["inverse", "factors", "eigenbasis"])
def test_every_form_is_the_dense_inverse(form: str, bias: bool) -> None:
    left = spd(3, 4, 0)
    right = spd(3, 6, 1)
    g = torch.randn(3, 4, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    want = torch.linalg.inv(left) @ g @ torch.linalg.inv(right)
    if bias:
        given = [g[..., :5], g[..., 5]]
    else:
        given = [g]
    found = apply_inverse(forms(left, right)[form], given)
    if bias:
        joined = torch.cat([found[0], found[1][..., None]], 2)
    else:
        joined = found[0]
    torch.testing.assert_close(joined, want)
    assert all(t.is_contiguous() for t in found[:1])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("power", [0, 8, -8])
def test_float16_loses_no_more_than_tf32(bias: bool, power: int) -> None:
    """Sides of any range, and gradients of any range."""
    scale = torch.logspace(-2, 2, 16)
    left = spd(2, 16, 0, torch.float32) * scale[:, None] * scale * 10.0**power
    right = spd(2, 24, 1, torch.float32)
    inverse = Inverse(*(torch.linalg.inv(t.double()).float() for t in (left, right)))
    half = rounded(inverse)
    assert half.left is not None
    assert half.left.dtype == torch.float16
    g = torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(2)) * 1e-9
    if bias:
        given = [g[..., :23], g[..., 23]]
    else:
        given = [g]
    want = [t.double() for t in apply_inverse(inverse, given)]
    for found, exact in zip(apply_inverse(half, given), want, strict=True):
        assert (found - exact).norm() < 5e-3 * exact.norm()
    for found, exact in zip(apply_inverse(widened(half), given), want, strict=True):
        assert (found - exact).norm() < 5e-3 * exact.norm()


def test_float16_keeps_what_unlike_units_contribute() -> None:
    """In the length of the metric, where all units count alike: √⟨x, R X C⟩ of the error."""
    factors = []
    for n, seed in ((64, 0), (96, 1)):
        scale = torch.logspace(0, 4, n, dtype=DOUBLE)
        factors.append(torch.linalg.cholesky(spd(1, n, seed) * scale[:, None] * scale))
    left, right = factors
    half = rounded(Inverse(*(torch.cholesky_inverse(f).float() for f in factors)))
    white = torch.randn(1, 64, 96, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    found = apply_inverse(half, [(left @ white @ right.mT).float()])[0].double()
    assert (left.mT @ found @ right - white).norm() < 5e-3 * white.norm()


def test_a_rescaled_inverse_in_float16() -> None:
    wide = Inverse(*(torch.linalg.inv(spd(1, 8, i, torch.float32)) for i in (0, 1)))
    half = rounded(wide)
    left = torch.rand(1, 8) + 0.5
    right = torch.rand(1, 8) + 0.5
    _rescale_inverse(half, _LayerScales(left, right))
    _rescale_inverse(wide, _LayerScales(left, right))
    g = [torch.randn(1, 8, 8)]
    torch.testing.assert_close(
        apply_inverse(half, g)[0], apply_inverse(wide, g)[0], rtol=5e-3, atol=5e-2
    )
