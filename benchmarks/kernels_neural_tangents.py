"""The same kernels by neural-tangents, in an environment of its own.

    python -m venv nt && nt/bin/pip install "jax[cpu]==0.4.28" "neural-tangents==0.6.5" "scipy<1.13"
    nt/bin/python benchmarks/kernels_neural_tangents.py [--only mlp] [--out record.json]

neural-tangents does not import on current JAX, and no environment holds both it and a current
torch, so this file imports nothing of the rest. Run it with the same number of threads right after
`python -m benchmarks.kernels` and compare the seconds: both compute the full kernel (N, N, 10, 10)
in float32, here compiled and warm, by each of neural-tangents' implementations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import neural_tangents as nt  # pyright: ignore[reportMissingImports]

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


PROBLEMS = {"mlp": (mlp, (784,)), "conv": (conv, (3, 32, 32))}


def measure(name: str, n: int, limit: float) -> dict[str, float]:
    make, shape = PROBLEMS[name]
    params, apply = make(jax.random.PRNGKey(0))
    x = jax.random.normal(jax.random.PRNGKey(1), (n, *shape))
    seconds = {}
    for label, implementation in IMPLEMENTATIONS.items():
        kernel = jax.jit(
            nt.empirical_ntk_fn(apply, trace_axes=(), vmap_axes=0, implementation=implementation),
        )
        try:
            jax.block_until_ready(kernel(x, None, params))
            times = []
            while len(times) < 3 and sum(times) < limit:
                start = time.perf_counter()
                jax.block_until_ready(kernel(x, None, params))
                times.append(time.perf_counter() - start)
        except Exception as error:  # memory that ran out is reported, not hidden
            print(f"  N={n:5} {label:27} fails: {type(error).__name__}")
            continue
        seconds[label] = statistics.median(times)
        print(f"  N={n:5} {label:27} {seconds[label]:9.3f} s", flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PROBLEMS, default=None)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--limit", type=float, default=15.0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in [options.only] if options.only else list(PROBLEMS):
        print(name)
        results[name] = {n: measure(name, n, options.limit) for n in options.sizes}
    if options.out is not None:
        place = f"jax {jax.__version__}, neural-tangents {nt.__version__}, {jax.devices()[0]}"
        options.out.write_text(json.dumps({"environment": place, "results": results}, indent=1))


if __name__ == "__main__":
    main()
