"""Weights that are used by products: rows, Gram and both products agree."""

import torch
from torch import Tensor, nn

from pullback.maps import Call, ModuleMap
from pullback.testing import assert_close


class Products(nn.Module):
    """x @ A, a stack of matrices, and one that is summed over the stack."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        shapes = {"a": (3, 8), "b": (2, 4, 5), "c": (2, 5, 3)}
        for name, shape in shapes.items():
            value = torch.randn(*shape, generator=random, dtype=torch.float64)
            setattr(self, name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.a).unflatten(1, (2, 4))  # (N, 2, 4)
        h = torch.tanh(torch.einsum("ngi,gio->ngo", h, self.b))
        return torch.einsum("ngi,gio->no", h, self.c)


def test_both_products_and_the_gram_are_those_of_the_rows() -> None:
    model = Products()
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)
    linear = ModuleMap(model, Call.of(x)).linearize(dict(model.named_parameters()))
    random = torch.Generator().manual_seed(1)
    u = torch.randn(2, 6, 3, generator=random, dtype=torch.float64)
    pulled = linear.pullback(u)
    assert all("vmap" not in c.route for c in pulled.coverage)
    separate = torch.eye(6, dtype=torch.float64)[:, :, None]
    rows = torch.stack([linear.vjp(e * one) for e in separate for one in u])
    v = torch.randn(rows.shape[1], generator=random, dtype=torch.float64)
    c = torch.randn(6, 2, generator=random, dtype=torch.float64)
    assert_close(pulled.rows(), rows, 1e-13, "rows")
    assert_close(pulled.project(v).flatten(), rows @ v, 1e-13, "A v")
    assert_close(pulled.lift(c), rows.T @ c.flatten(), 1e-13, "Aᵀc")
    assert_close(pulled.kernel(), rows @ rows.T, 1e-12, "A Aᵀ")
    assert_close(pulled.narrow(1, 4).kernel(pulled), rows[2:8] @ rows.T, 1e-12, "some samples")
