"""Rows of JSON in a file, each written as soon as it is known, so that a run can be continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class RowFile:
    """The rows of a file by the values of their key fields; of equal keys the last row counts.

    Several processes may append to one file. Without a path, rows are held in memory alone.
    """

    def __init__(self, path: Path | None, *keys: str) -> None:
        self.path, self.keys = path, keys
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._read_bytes = 0
        self.read()

    def read(self) -> None:
        """Hold what other processes have added since the last time."""
        if self.path and self.path.is_file():
            lines = self.path.read_bytes()[self._read_bytes :]
            self._read_bytes += len(lines)
            for line in lines.splitlines():
                self._hold(json.loads(line))

    def _hold(self, row: dict[str, Any]) -> None:
        self.rows[tuple(row[key] for key in self.keys)] = row

    def add(self, row: dict[str, Any]) -> None:
        """Hold a row and append it to the file."""
        self._hold(row)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                # one write, so that lines of several processes do not mix
                file.write((json.dumps(row) + "\n").encode())
