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


@dataclass(frozen=True)
class TransformLimits:
    """Sizes in `ColumnSketch`."""

    #: entries that are transformed at once: 512 MiB in float64, and intermediate results take
    #: several times as many
    most_entries: int = 2**26


_LIMITS = TransformLimits()


@dataclass(frozen=True)
class RowSketch:
    """Π: every row is added, with a random sign, to one of `count` buckets."""

    bucket: Tensor
    sign: Tensor
    count: int

    @classmethod
    def draw(cls, n: int, count: int, template: Tensor, generator: torch.Generator) -> RowSketch:
        """Return a random count sketch of n rows, on the template's device and in its dtype."""
        bucket = torch.randint(0, count, (n,), generator=generator)
        sign = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
        return cls(bucket.to(template.device), sign.to(template), count)

    def __call__(self, x: Tensor) -> Tensor:
        """Return Π x for x of shape (n,) or (n, k)."""
        signed = self.sign.view(-1, *[1] * (x.ndim - 1)) * x
        return add_at(x.new_zeros(self.count, *x.shape[1:]), self.bucket, signed)


@dataclass(frozen=True)
class ColumnSketch:
    """Ω with orthonormal columns: random signs, an orthogonal cosine transform, a subset."""

    sign: Tensor
    chosen: Tensor

    @classmethod
    def draw(cls, p: int, count: int, template: Tensor, generator: torch.Generator) -> ColumnSketch:
        """Return a random subsampled transform of p columns, like the template."""
        sign = torch.randint(0, 2, (p,), generator=generator) * 2 - 1
        chosen = torch.randperm(p, generator=generator)[:count].sort().values
        return cls(sign.to(template), chosen.to(template.device))

    def compress(self, x: Tensor) -> Tensor:
        """Return x Ω for x of shape (..., p); a chunk of rows is transformed at a time."""
        rows = max(1, _LIMITS.most_entries // len(self.sign))
        chunks = x.reshape(-1, len(self.sign)).split(rows)
        pieces = [x.new_zeros(0, len(self.chosen))]
        for chunk in chunks:
            if len(chunk):  # a GPU has no transform of an empty tensor
                pieces.append(dct(chunk * self.sign)[:, self.chosen])
        return torch.cat(pieces).view(*x.shape[:-1], len(self.chosen))

    def expand(self, y: Tensor) -> Tensor:
        """Return Ω y for y of shape (..., count)."""
        full = y.new_zeros(*y.shape[:-1], len(self.sign))
        full[..., self.chosen] = y
        return idct(full) * self.sign


def dct(x: Tensor) -> Tensor:
    """Return the orthonormal cosine transform (type II) along the last axis, by one real FFT.

    The real part of a shifted wave is frequency k, and its negative imaginary part n − k.
    """
    n = x.shape[-1]
    reordered = torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], -1)
    k = torch.arange(n // 2 + 1, dtype=x.dtype, device=x.device)
    size = torch.full_like(k, (2 / n) ** 0.5)
    size[0] = (1 / n) ** 0.5
    waves = torch.fft.rfft(reordered) * torch.polar(size, -torch.pi * k / (2 * n))
    return torch.cat([waves.real, -waves.imag[..., 1 : n - n // 2].flip(-1)], -1)


def idct(x: Tensor) -> Tensor:
    """Return the inverse (and transpose) of `dct`."""
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
        self.rows = rows
        self.columns = columns
        self.damping = damping
        self.seed = seed
        self._draw = 0
        self._inner = PseudoInverse(rcond, double=double)

    def init(self, gram: Gram) -> Compressed:
        if not isinstance(gram, FactoredGram):
            raise PullbackError(
                "Sketched needs the rows A",
                f"this Gram holds {gram.structure.holds} only",
                'Use gram="rows", "kernel" or "matrix_free"',
            )
        rows = None
        columns = None
        generator = self._next_generator()
        template = torch.empty(0, dtype=gram.dtype, device=gram.device)
        if self.rows is not None and self.rows < gram.count:
            rows = RowSketch.draw(gram.count, self.rows, template, generator)
        if self.columns is not None and self.columns < gram.size:
            columns = ColumnSketch.draw(gram.size, self.columns, template, generator)
        if columns is None:
            a = gram.rows()
        else:
            a = gram.compress(columns.compress)
        if rows is not None:
            a = rows(a)
        sketch = Rows(a)
        return Compressed(gram, sketch, self._inner.init(sketch), rows, columns)

    def path(self, state: Compressed, rhs: Tensor, whitened: Tensor | None = None) -> Path:
        g = rhs
        if state.columns is not None:
            g = state.columns.compress(rhs)
        r = whitened
        if r is not None and state.rows is not None:
            r = state.rows(r)
            g = state.sketch.lift(r)  # the sketched problem has a gradient of its own
        inner = self._inner.path(state.spectrum, g, r)
        columns = state.columns
        if columns is None:
            return inner
        beyond = None
        if inner.beyond is not None:
            beyond = columns.expand(inner.beyond)
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
        if damping is None:
            damping = self.damping
        value = resolve(damping, state.gram)
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
