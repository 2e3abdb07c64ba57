"""Networks for log ψ: a restricted Boltzmann machine, a convolutional one, and a transformer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._core.errors import PullbackError, require
from .lattice import Chain, Lattice, Square


def log_cosh(x: Tensor) -> Tensor:
    """log cosh x without overflow."""
    size = x.abs()
    return size + F.softplus(-2 * size) - math.log(2)


#: each is at most 2, so that the product stays far below the largest number in float32
_FACTORS_OF_A_PRODUCT = 120


def sum_log_cosh(x: Tensor) -> Tensor:
    """Σ log cosh over the last axis, (N, k) -> (N,).

    Without gradients it is Σ |x| + Σ log Π (1 + e^{-2|x|})/2, which takes one logarithm for many
    factors and no memory for intermediate results. Most forward passes are such.
    """
    has_wide_exponent = torch.finfo(x.dtype).max > 2.0**_FACTORS_OF_A_PRODUCT
    if torch.is_grad_enabled() or not has_wide_exponent:
        return log_cosh(x).sum(1)
    size = x.abs()
    total_size = size.sum(1)
    factors = size.mul_(-2).exp_().add_(1)
    logarithms = torch.zeros_like(total_size)
    for part in factors.split(_FACTORS_OF_A_PRODUCT, 1):
        logarithms += part.prod(1).mul_(2.0 ** -part.shape[1]).log_()
    return total_size + logarithms


class Rbm(nn.Module):
    r"""log ψ(s) = Σ_j log cosh(b_j + Σ_i W_ji s_i), real, with `features` hidden units per site.

    With a lattice the hidden units are the translates of `features` filters as large as the
    lattice, so that ψ does not change under translations.

    Args:
        lattice: a lattice for a translation-invariant machine, or the number of sites.
        features: filters, or hidden units per site.
        bias: whether there are b_j. Without them ψ(−s) = ψ(s).
    """

    permutations: Tensor | None
    inverses: Tensor | None

    def __init__(self, lattice: Lattice | int, features: int = 1, bias: bool = True) -> None:
        super().__init__()
        permutations = None
        sites = lattice
        hidden = features
        if isinstance(lattice, Lattice):
            sites = lattice.sites
            permutations = lattice.translations()
        elif isinstance(lattice, int):
            hidden = features * lattice
        require(isinstance(sites, int) and sites > 0, "Rbm(lattice)", lattice, "Pass a lattice")
        assert isinstance(sites, int)
        self.hidden = nn.Linear(sites, hidden, bias=bias)
        nn.init.normal_(self.hidden.weight, std=0.1 / math.sqrt(sites))
        if bias:
            nn.init.normal_(self.hidden.bias, std=0.01)
        inverses = None
        if permutations is not None:
            inverses = permutations.argsort(1)
        self.register_buffer("permutations", permutations, persistent=False)
        self.register_buffer("inverses", inverses, persistent=False)

    def forward(self, configurations: Tensor) -> Tensor:
        if self.permutations is None:
            hidden = self.hidden(configurations)
        elif torch.is_grad_enabled() or self.inverses is None:
            # one layer at all translates: the library knows the rows of a shared weight
            hidden = self.hidden(configurations[:, self.permutations])
        else:
            # the same as one product with the translated filters, which is faster
            filters = self.hidden.weight[:, self.inverses].flatten(0, 1)
            bias = self.hidden.bias
            if bias is not None:
                bias = bias.repeat_interleave(len(self.inverses))
            hidden = F.linear(configurations, filters, bias)
        return sum_log_cosh(hidden.flatten(1))


class Convolutional(nn.Module):
    """Residual convolutions with periodic edges, summed over the sites: (N,), or (N, 2) if phased.

    log ψ does not change under translations.

    Args:
        lattice: a chain or a square lattice.
        channels: of every layer.
        layers: number of convolutions.
        kernel: sites of a filter along one direction, odd.
        phase: whether to return a phase beside the log-amplitude.
    """

    def __init__(
        self,
        lattice: Chain | Square,
        channels: int = 8,
        layers: int = 3,
        kernel: int = 5,
        phase: bool = False,
    ) -> None:
        super().__init__()
        convolution: type[nn.Conv1d | nn.Conv2d] = nn.Conv1d
        self.shape: tuple[int, ...] = (lattice.n,)
        if isinstance(lattice, Square):
            convolution = nn.Conv2d
            self.shape = (lattice.n, lattice.m)
        fits = kernel % 2 == 1 and kernel <= min(self.shape)
        require(fits, "kernel=", kernel, f"Use an odd number up to {min(self.shape)}")
        sizes = [1] + [channels] * layers
        self.convolutions = nn.ModuleList(
            convolution(sizes[i], channels, kernel, padding=kernel // 2, padding_mode="circular")
            for i in range(layers)
        )
        self.head = nn.Linear(channels, 2 if phase else 1)
        # layers outside the last one keep the size of their input
        with torch.no_grad():
            self.head.weight.mul_(0.1)

    def forward(self, configurations: Tensor) -> Tensor:
        x = configurations.unflatten(1, (1, *self.shape))
        first, *others = self.convolutions
        x = F.silu(first(x))
        for convolution in others:
            x = x + F.silu(convolution(x))
        total = log_cosh(x).flatten(2).sum(2)
        out = self.head(total)
        if self.head.out_features == 1:
            return out[:, 0]
        return out


class FactoredTransformer(nn.Module):
    r"""A vision transformer with factored attention for a square lattice: (N, 2).

    Patches of 2 × 2 spins are embedded as tokens. In every block head h mixes the values v of all
    tokens by weights that depend on their distance alone, Σ_j α_h(i − j) v_j, and a feed-forward
    layer of four times the width follows; both are residual, after a layer normalization. The sum
    z over tokens gives log ψ = Σ_k log cosh(w_k·z + i w'_k·z) after normalizations, as in
    Viteritti, Rende and Becca (2023) and Rende and Viteritti (2025). The state does not change
    under translations by whole patches.

    Args:
        lattice: of even lengths.
        width: of the tokens.
        heads: that share the width.
        blocks: number of blocks.
        patch: side of a patch.
    """

    def __init__(
        self, lattice: Square, width: int = 60, heads: int = 10, blocks: int = 4, patch: int = 2
    ) -> None:
        super().__init__()
        if lattice.n % patch or lattice.m % patch or width % heads:
            raise PullbackError(
                "The transformer does not fit the lattice",
                f"{lattice!r} has no patches of side {patch}, or width {width} no {heads} heads",
                "Use lengths that patch= divides, and a width that heads= divides",
            )
        self.lattice_shape = (lattice.n, lattice.m)
        self.patch = patch
        grid = (lattice.n // patch, lattice.m // patch)
        self.embedding = nn.Linear(patch * patch, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, grid) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.real_part = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        self.imaginary_part = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, configurations: Tensor) -> Tensor:
        rows, columns = self.lattice_shape
        p = self.patch
        patches = configurations.reshape(-1, rows // p, p, columns // p, p).transpose(2, 3)
        tokens = self.embedding(patches.reshape(len(configurations), -1, p * p))
        for block in self.blocks:
            tokens = block(tokens)
        z = self.norm(tokens.sum(1))
        return _sum_complex_log_cosh(self.real_part(z), self.imaginary_part(z))


class TransformerBlock(nn.Module):
    """Factored attention and a feed-forward layer, both residual after a normalization.

    Args:
        width: of the tokens.
        heads: that share the width.
        grid: rows and columns of tokens.
    """

    circulant: Tensor

    def __init__(self, width: int, heads: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.heads = heads
        self.grid = grid
        self.attention_norm = nn.LayerNorm(width)
        self.value = nn.Linear(width, width)
        # α_h(i − j) as a periodic convolution that all channels of a head share
        self.attention = nn.Conv2d(heads, heads, grid, groups=heads, bias=False)
        bound = math.sqrt(6 / (heads + grid[0] * grid[1]))
        nn.init.uniform_(self.attention.weight, -bound, bound)
        self.output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.register_buffer("circulant", _compute_circulant_index(grid), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.value(self.attention_norm(tokens))
        # The layer is a convolution where its derivatives are taken, since the library knows the
        # rows of convolutions. As a product with a circulant matrix it is faster.
        if torch.is_grad_enabled():
            mixed = self._convolve(values)
        else:
            mixed = self._multiply(values)
        tokens = tokens + self.output(mixed)
        hidden = F.gelu(self.expand(self.feed_forward_norm(tokens)))
        return tokens + self.contract(hidden)

    def _convolve(self, values: Tensor) -> Tensor:
        """Σ_j α_h(i − j) v_j by a convolution over images of one channel per head."""
        samples, tokens, width = values.shape
        rows, columns = self.grid
        channels = width // self.heads
        images = values.reshape(samples, rows, columns, self.heads, channels)
        images = images.permute(0, 4, 3, 1, 2).flatten(0, 1)
        images = F.pad(images, (0, columns - 1, 0, rows - 1), mode="circular")
        mixed = self.attention(images).unflatten(0, (samples, channels))
        return mixed.permute(0, 3, 4, 2, 1).reshape(samples, tokens, width)

    def _multiply(self, values: Tensor) -> Tensor:
        """The same by one matrix product per head."""
        samples, tokens, width = values.shape
        matrices = self.attention.weight.flatten(1)[:, self.circulant]
        split = values.reshape(samples, tokens, self.heads, -1)
        mixed = torch.einsum("hij,njhc->nihc", matrices, split)
        return mixed.reshape(samples, tokens, width)


def _compute_circulant_index(grid: tuple[int, int]) -> Tensor:
    """Which weight of the convolution multiplies token j in the output i, (tokens, tokens)."""
    rows, columns = grid
    row = torch.arange(rows).repeat_interleave(columns)
    column = torch.arange(columns).repeat(rows)
    down = (row[None] - row[:, None]) % rows
    right = (column[None] - column[:, None]) % columns
    return down * columns + right


def _sum_complex_log_cosh(real: Tensor, imaginary: Tensor) -> Tensor:
    """Σ log cosh(a + ib) over the last axis as (N, 2): log-modulus and argument.

    |cosh(a + ib)|² = cosh²a − sin²b and arg = atan2(tanh a · sin b, cos b).
    """
    size = real.abs()
    decay = (-2 * size).exp()
    inside = 1 + decay.square() + 2 * decay * (2 * imaginary).cos()
    log_modulus = size - math.log(2) + 0.5 * inside.clamp(min=1e-30).log()
    argument = torch.atan2(real.tanh() * imaginary.sin(), imaginary.cos())
    return torch.stack([log_modulus.sum(-1), argument.sum(-1)], -1)
