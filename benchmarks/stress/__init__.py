"""Attempts to break what is around the kernels: `make stress` runs every area and counts.

One file an area; each has `attempt(count, seed) -> Tally`. See `__main__.py`.
"""
