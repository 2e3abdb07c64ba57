"""Attention as plain matrix products, which every mode of differentiation understands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextlib.contextmanager
def unfused_attention() -> Iterator[None]:
    """Neither fused attention kernels nor the inference-only path of transformer layers."""
    mha: Any = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        mha.set_fastpath_enabled(before)
