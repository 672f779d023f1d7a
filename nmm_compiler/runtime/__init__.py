"""Runs rewritten calls: start at `executor.py`."""
