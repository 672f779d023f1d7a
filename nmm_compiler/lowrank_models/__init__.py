"""Makes models low-rank, saves and loads them: see docs/compress.md. Start at `apply.py`."""
