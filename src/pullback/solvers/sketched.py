"""Randomized solves: fewer rows, fewer columns."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from .._core.errors import PullbackError, Status
from .._core.products import add_at
from ..grams import FactoredGram, Gram, Rows
from .base import Damping, Path, Solution, Solver, resolve
from .pinv import PseudoInverse, Spectrum

_AT_ONCE = 2**26  # entries that are transformed at once: what is in between takes several of them


@dataclass(frozen=True)
class RowSketch:
    """Π: every row is added, with a random sign, to one of `count` buckets."""

    bucket: Tensor
    sign: Tensor
    count: int

    @classmethod
    def draw(cls, n: int, count: int, like: Tensor, generator: torch.Generator) -> RowSketch:
        """A random count sketch of n rows."""
        bucket = torch.randint(0, count, (n,), generator=generator)
        sign = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
        return cls(bucket.to(like.device), sign.to(like), count)

    def __call__(self, x: Tensor) -> Tensor:
        """Π x for x of shape (n,) or (n, k)."""
        signed = self.sign.view(-1, *[1] * (x.ndim - 1)) * x
        return add_at(x.new_zeros(self.count, *x.shape[1:]), self.bucket, signed)


@dataclass(frozen=True)
class ColumnSketch:
    """Ω with orthonormal columns: random signs, an orthogonal cosine transform, a subset."""

    sign: Tensor
    chosen: Tensor

    @classmethod
    def draw(cls, p: int, count: int, like: Tensor, generator: torch.Generator) -> ColumnSketch:
        """A random subsampled transform of p columns."""
        sign = torch.randint(0, 2, (p,), generator=generator) * 2 - 1
        chosen = torch.randperm(p, generator=generator)[:count].sort().values
        return cls(sign.to(like), chosen.to(like.device))

    def compress(self, x: Tensor) -> Tensor:
        """x Ω for x of shape (..., p), some rows at a time."""
        rows = max(1, _AT_ONCE // len(self.sign))
        parts = x.reshape(-1, len(self.sign)).split(rows)
        # there is no transform of nothing on a GPU
        found = [dct(part * self.sign)[:, self.chosen] for part in parts if len(part)]
        none = x.new_zeros(0, len(self.chosen))
        return torch.cat([none, *found]).view(*x.shape[:-1], len(self.chosen))

    def expand(self, y: Tensor) -> Tensor:
        """Ω y for y of shape (..., count)."""
        full = y.new_zeros(*y.shape[:-1], len(self.sign))
        full[..., self.chosen] = y
        return idct(full) * self.sign


def dct(x: Tensor) -> Tensor:
    """The orthonormal cosine transform (type II) along the last axis, by one real FFT.

    Frequency n − k is −Im of what frequency k is Re of.
    """
    n = x.shape[-1]
    reordered = torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], -1)
    k = torch.arange(n // 2 + 1, dtype=x.dtype, device=x.device)
    size = torch.full_like(k, (2 / n) ** 0.5)
    size[0] = (1 / n) ** 0.5
    waves = torch.fft.rfft(reordered) * torch.polar(size, -torch.pi * k / (2 * n))
    return torch.cat([waves.real, -waves.imag[..., 1 : n - n // 2].flip(-1)], -1)


def idct(x: Tensor) -> Tensor:
    """The inverse (and transpose) of `dct`."""
    n = x.shape[-1]
    k = torch.arange(n, dtype=x.dtype, device=x.device)
    scaled = torch.cat([x[..., :1] * 2**0.5, x[..., 1:]], -1) * (n / 2) ** 0.5
    mirrored = torch.cat([torch.zeros_like(scaled[..., :1]), scaled[..., 1:].flip(-1)], -1)
    phase = torch.polar(torch.ones_like(k), torch.pi * k / (2 * n))
    reordered = torch.fft.ifft(torch.complex(scaled, -mirrored) * phase).real
    out = torch.empty_like(x)
    half = (n + 1) // 2
    out[..., ::2] = reordered[..., :half]
    out[..., 1::2] = reordered[..., half:].flip(-1)
    return out


@dataclass(frozen=True)
class Compressed:
    """The sketch's spectrum with the way back to parameters."""

    gram: Gram
    sketch: Rows
    spectrum: Spectrum
    rows: RowSketch | None
    columns: ColumnSketch | None


class Sketched(Solver):
    r"""x = Ω (Π A Ω)⁺ Π r: least squares on random combinations of rows and columns.

    Args:
        rows: how many combined rows; None keeps all.
        columns: dimension of the random subspace of parameters; None keeps all.
        damping: absolute, or `Relative(c)`.
        rcond, double: as for `PseudoInverse`, for the sketched matrix.
        seed: of the random sketches. A sketch follows from the seed and its own number, which is
            that of the step, so that nothing random is saved.
    """

    prefers = "panels"

    def __init__(
        self,
        rows: int | None = None,
        columns: int | None = None,
        *,
        damping: Damping = 0.0,
        seed: int = 0,
        rcond: float | None = None,
        double: bool = False,
    ) -> None:
        for name, value in (("rows", rows), ("columns", columns)):
            if value is not None and value < 1:
                raise PullbackError(
                    f"Sketched(...) got {name}={value}", "it must be positive", "Use None for all"
                )
        self.rows, self.columns, self.damping = rows, columns, damping
        self.seed, self._draw = seed, 0
        self._inner = PseudoInverse(rcond, double=double)

    def init(self, gram: Gram) -> Compressed:
        if not isinstance(gram, FactoredGram):
            raise PullbackError(
                "Sketched needs the rows A",
                f"this Gram holds {gram.structure.holds} only",
                'Use gram="rows", "kernel" or "matrix_free"',
            )
        row = column = None
        generator = self._next_generator()
        like = torch.empty(0, dtype=gram.dtype, device=gram.device)
        if self.rows is not None and self.rows < gram.count:
            row = RowSketch.draw(gram.count, self.rows, like, generator)
        if self.columns is not None and self.columns < gram.size:
            column = ColumnSketch.draw(gram.size, self.columns, like, generator)
        a = gram.rows() if column is None else gram.compress(column.compress)
        sketch = Rows(a if row is None else row(a))
        return Compressed(gram, sketch, self._inner.init(sketch), row, column)

    def path(self, state: Compressed, rhs: Tensor, whitened: Tensor | None = None) -> Path:
        g = rhs if state.columns is None else state.columns.compress(rhs)
        r = whitened
        if r is not None and state.rows is not None:
            r = state.rows(r)
            g = state.sketch.lift(r)  # the sketched problem has a gradient of its own
        inner = self._inner.path(state.spectrum, g, r)
        columns = state.columns
        if columns is None:
            return inner
        beyond = None if inner.beyond is None else columns.expand(inner.beyond)
        return Path(
            inner.eigenvalues, inner.gamma, lambda c: columns.expand(inner.combine(c)), beyond
        )

    def solve(
        self,
        state: Compressed,
        rhs: Tensor,
        damping: Damping | None = None,
        *,
        whitened: Tensor | None = None,
    ) -> Solution:
        value = resolve(self.damping if damping is None else damping, state.gram)
        spectrum = state.spectrum
        if not spectrum.finite or (spectrum.rank == 0 and value == 0):
            return Solution(torch.zeros_like(rhs), value, 0, status=Status.SINGULAR)
        x = self.path(state, rhs, whitened).solution(value)
        return Solution(x, value, spectrum.rank)

    def seek(self, draw: int) -> None:
        self._draw = draw

    def _next_generator(self) -> torch.Generator:
        # torch's generators see 32 bits of a seed: both numbers are hashed into them
        bits = Random(f"{self.seed} {self._draw}").getrandbits(32)
        self._draw += 1
        return torch.Generator().manual_seed(bits)
