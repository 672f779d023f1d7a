"""Runs and times NKI kernels on a CPU: start at `run.py`."""
