"""Writes kernels: start at `build.py`."""
