"""Matrices with a chosen spectrum, in every form."""

from __future__ import annotations

import torch
from torch import Tensor

from pullback.grams import Dense, FactoredGram, Gram, Kernel, Operator, Rows

FORMS = ("rows", "kernel", "dense", "matrix_free")


def with_spectrum(sigma: Tensor, n: int, p: int, seed: int = 0) -> Tensor:
    """A of shape (n, p) with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    k = len(sigma)
    u = torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(p, k, generator=generator, dtype=torch.float64)).Q
    return (u * sigma) @ v.T


def random(n: int, p: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, p, generator=generator, dtype=torch.float64)


def vector(n: int, seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator, dtype=torch.float64)


def hold(a: Tensor, form: str) -> Gram:
    if form == "rows":
        return Rows(a)
    if form == "dense":
        return Dense(a.T @ a, len(a))
    return factored_gram(a, form)


def factored_gram(a: Tensor, form: str) -> FactoredGram:
    if form == "rows":
        return Rows(a)
    if form == "kernel":
        return Kernel(a @ a.T, a.matmul, a.T.matmul, a.shape[1])
    return Operator(a.matmul, a.T.matmul, (a.shape[0], a.shape[1]), a.dtype, a.device)
