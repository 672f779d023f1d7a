"""A package, so that benchmarks/kernels.py is not taken for it."""
