"""The same kernels by neural-tangents, in an environment of its own.

    python -m venv nt && nt/bin/pip install "jax[cpu]==0.4.28" "neural-tangents==0.6.5" "scipy<1.13"
    nt/bin/python kernels_neural_tangents.py [--only mlp] [--out record.json]

neural-tangents does not import on current JAX, and no environment holds both it and a current
torch, so this file imports nothing of the rest. Run it with the same number of threads right after
`pullback bench kernels` and compare the seconds: both compute the full kernel (N, N, 10, 10)
in float32, here compiled and warm, by each of neural-tangents' implementations. With --cpu-time the
seconds are those of the processor (one thread: OMP_NUM_THREADS=1 and
XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1").
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import neural_tangents as nt  # pyright: ignore[reportMissingImports]
from jax._src import source_info_util  # pyright: ignore[reportMissingImports]
from jax.interpreters import ad  # pyright: ignore[reportMissingImports]

# neural-tangents 0.6.5 looks for these where jax 0.4.28 has them no more, and without them its best
# implementation, structured derivatives, fails
ad.source_info_util = source_info_util
ad.config = jax.config

SIZES = (128, 512, 2048)
Params = list[tuple[Any, Any]]
IMPLEMENTATIONS = {
    "jacobian contraction": nt.NtkImplementation.JACOBIAN_CONTRACTION,
    "NTK-vector products": nt.NtkImplementation.NTK_VECTOR_PRODUCTS,
    "structured derivatives": nt.NtkImplementation.STRUCTURED_DERIVATIVES,
}


def dense(key: Any, fan: int, out: int) -> tuple[Any, Any]:
    return jax.random.normal(key, (fan, out)) / fan**0.5, jnp.zeros(out)


def mlp(key: Any) -> tuple[Params, Callable[[Params, Any], Any]]:
    """784-512-512-10 with ReLU."""
    sizes = [784, 512, 512, 10]
    keys = jax.random.split(key, 3)
    params = [dense(k, a, b) for k, a, b in zip(keys, sizes, sizes[1:], strict=False)]

    def apply(params: Params, x: Any) -> Any:
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        w, b = params[-1]
        return x @ w + b

    return params, apply


def conv(key: Any) -> tuple[Params, Callable[[Params, Any], Any]]:
    """`benchmarks.models.small_conv`: four 3×3 convolutions, 16 to 64 channels, a read-out."""
    layers = [(3, 16, 2, 1), (16, 32, 2, 1), (32, 32, 1, 4), (32, 64, 2, 1)]
    keys = jax.random.split(key, len(layers) + 1)
    params = []
    for k, (i, o, _, groups) in zip(keys, layers, strict=False):
        shape = (o, i // groups, 3, 3)
        params.append((jax.random.normal(k, shape) / (9 * i // groups) ** 0.5, jnp.zeros(o)))
    params.append(dense(keys[-1], 1024, 10))

    def apply(params: Params, x: Any) -> Any:
        for (w, b), (_, _, stride, groups) in zip(params, layers, strict=False):
            x = jax.lax.conv_general_dilated(
                x, w, (stride, stride), ((1, 1), (1, 1)), feature_group_count=groups
            )
            x = jax.nn.relu(x + b[:, None, None])
        w, b = params[-1]
        return x.reshape(len(x), -1) @ w + b

    return params, apply


def attention(width: int) -> Callable[[Any], tuple[Params, Callable[[Params, Any], Any]]]:
    """`benchmarks.models.Attention`: a pre-norm transformer block, 4 heads, a mean, a read-out."""
    maps = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width), (width, 10)]

    def make(key: Any) -> tuple[Params, Callable[[Params, Any], Any]]:
        keys = jax.random.split(key, len(maps))
        params = [dense(k, a, b) for k, (a, b) in zip(keys, maps, strict=True)]
        return params + 2 * [(jnp.ones(width), jnp.zeros(width))], apply

    def norm(gain: tuple[Any, Any], x: Any) -> Any:
        centered = x - x.mean(-1, keepdims=True)
        scale = jnp.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
        return centered / scale * gain[0] + gain[1]

    def apply(params: Params, x: Any) -> Any:
        qkv, out, up, down, read, norm1, norm2 = params
        n, t, d = x.shape
        z = (norm(norm1, x) @ qkv[0] + qkv[1]).reshape(n, t, 3, 4, d // 4)
        q, k, v = (z[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
        weights = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) * (d // 4) ** -0.5, -1)
        x = x + (weights @ v).transpose(0, 2, 1, 3).reshape(n, t, d) @ out[0] + out[1]
        hidden = jax.nn.gelu(norm(norm2, x) @ up[0] + up[1], approximate=False)
        return (x + hidden @ down[0] + down[1]).mean(1) @ read[0] + read[1]

    return make


PROBLEMS = {
    "mlp": (mlp, (784,)),
    "conv": (conv, (3, 32, 32)),
    "attention": (attention(64), (16, 64)),
    "wide-attention": (attention(256), (16, 256)),
}


def measure(
    name: str, n: int, limit: float, only: str | None, clock: Callable[[], float]
) -> dict[str, float]:
    make, shape = PROBLEMS[name]
    params, apply = make(jax.random.PRNGKey(0))
    x = jax.random.normal(jax.random.PRNGKey(1), (n, *shape))
    seconds = {}
    for label, implementation in IMPLEMENTATIONS.items():
        if only is not None and only not in label:
            continue
        kernel = jax.jit(
            nt.empirical_ntk_fn(apply, trace_axes=(), vmap_axes=0, implementation=implementation),
        )
        try:
            jax.block_until_ready(kernel(x, None, params))
            times = []
            while len(times) < 3 and sum(times) < limit:
                start = clock()
                jax.block_until_ready(kernel(x, None, params))
                times.append(clock() - start)
        except Exception as error:  # memory that ran out is reported, not hidden
            print(f"  N={n:5} {label:27} fails: {type(error).__name__}")
            continue
        seconds[label] = statistics.median(times)
        print(f"  N={n:5} {label:27} {seconds[label]:9.3f} s", flush=True)
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PROBLEMS, default=None)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--limit", type=float, default=15.0, help="seconds of repeats")
    parser.add_argument("--by", default=None, help="part of an implementation's name")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the processor")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    clock = time.perf_counter
    clock_name = "wall"
    if options.cpu_time:
        clock = time.process_time
        clock_name = "processor"
    names = list(PROBLEMS)
    if options.only:
        names = [options.only]
    results: dict[str, Any] = {}
    for name in names:
        print(name)
        results[name] = {
            n: measure(name, n, options.limit, options.by, clock) for n in options.sizes
        }
    if options.out is not None:
        machine = f"jax {jax.__version__}, neural-tangents {nt.__version__}, {jax.devices()[0]}"
        record = {"environment": machine, "clock": clock_name, "results": results}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
