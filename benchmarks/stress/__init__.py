"""Attempts to break what is around the kernels: `make stress` runs every area and counts.

One file an area; each has `attempts(count, seed)`. Kills of caches and of saves are tests:
tests/cache/test_cache_faults.py and tests/compress/test_compress_replace.py. See `__main__.py`.
"""
