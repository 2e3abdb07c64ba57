"""Kernels for what torch needs several passes over memory for, in Triton, by `compiled.kernels`.

Each file has a function `tried`, which compiles all of it. Triton launches on the current device,
so that of the tensors is made the current one.
"""
