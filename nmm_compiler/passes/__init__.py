"""The FX passes: chains found, layouts solved, graphs rewritten. Start at `pipeline.py`."""
