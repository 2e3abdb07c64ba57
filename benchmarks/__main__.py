"""`python -m benchmarks [NAME ...]`: a benchmark; without a name, the comparisons with others."""

import sys

from .laboratory import run_benchmark

if len(sys.argv) > 1:
    run_benchmark(sys.argv[1], sys.argv[2:])
else:
    for name in ("exact", "scale"):
        run_benchmark(name)
