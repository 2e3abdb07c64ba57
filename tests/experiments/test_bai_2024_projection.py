"""The projection view: moves against a dense Jacobian by torch alone."""

import math

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, jacrev

from pullback_experiments.bai_2024_projection import moves
from pullback_experiments.bai_2024_projection.experiment import slope
from pullback_experiments.bai_2024_projection.moves import SCALE, NetworkData

CPU = torch.device("cpu")


def scene(seed: int, width: int = 40, count: int = 7) -> NetworkData:
    torch.manual_seed(seed)
    return NetworkData.of(width, count, CPU)


def jacobian(actual: NetworkData, x: Tensor) -> Tensor:
    """(N, p), by torch alone."""
    params = {n: p.detach() for n, p in actual.net.named_parameters()}
    rows = jacrev(lambda p: functional_call(actual.net, p, (x,))[:, 0])(params)
    return torch.cat([rows[n].flatten(1) for n in params], 1)


def matern(x: Tensor, y: Tensor) -> Tensor:
    d = (x - y.T).abs() / SCALE
    return torch.exp(-d) * (1 + d)


def dense(actual: NetworkData, method: str) -> Tensor:
    """The move of the function at the grid, from explicit matrices."""
    j = jacobian(actual, actual.x)
    at = jacobian(actual, actual.grid)
    c = actual.residuals
    if method == "standard":
        return at @ (j.T @ (c / len(c)))
    if method == "Sobolev":
        k = matern(actual.x, actual.x)
    else:
        k = torch.eye(len(c), dtype=c.dtype)
    root = torch.linalg.inv(torch.linalg.cholesky(k))  # K⁻¹ = rootᵀ root
    return at @ torch.linalg.lstsq(root @ j, torch.linalg.solve(root.T, c), driver="gelsd").solution


@pytest.mark.parametrize("method", moves.METHODS)
@pytest.mark.parametrize("shape", [(40, 7), (3, 31)])
def test_predicted_moves_are_those_of_a_dense_jacobian(method: str, shape: tuple[int, int]) -> None:
    actual = scene(3, *shape)
    result = actual.change(method)(actual.grid)
    torch.testing.assert_close(result, dense(actual, method), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", moves.METHODS)
def test_an_optimizer_step_moves_as_predicted(method: str) -> None:
    actual = scene(1)
    record = moves.compare_moves(actual, method)
    assert abs(slope(record["size"], record["error"]) - 2) < 0.1
    torch.testing.assert_close(record["actual"], record["predicted"], rtol=0, atol=0.03)


def test_sobolev_moves_the_data_by_the_smoothed_residuals() -> None:
    actual = scene(2)
    want = matern(actual.x, actual.x) @ actual.residuals
    torch.testing.assert_close(actual.change("Sobolev")(actual.x), want, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(actual.change("natural")(actual.x), actual.residuals)
    torch.testing.assert_close(actual.gradient(actual.x), want, rtol=1e-12, atol=1e-12)


def test_no_point_of_the_grid_is_trained_on() -> None:
    actual = scene(0, 5, 41)
    assert torch.cdist(actual.grid, actual.x).min() > 1e-6
    assert len(actual.grid) > 150


def test_a_narrow_network_keeps_a_part_of_the_gradient() -> None:
    laws = moves.projections(scene(0, 2, 41))
    assert 0 < laws["kept"] < 1
    assert laws["P twice"] < 1e-8
    assert laws["S twice"] > 0.1
    projections = moves.projections(scene(0))
    assert math.isclose(projections["kept"], 1.0, rel_tol=1e-8)
