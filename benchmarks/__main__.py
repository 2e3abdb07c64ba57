"""`python -m benchmarks`: every comparison that runs on this machine."""

from . import exact, scale

exact.main()
scale.main()
