"""The command `nmm`: start at `main.py`; each command has a file."""
