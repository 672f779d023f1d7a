"""The base of every record that people meet: it says its parts, and is shown everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from nmm_compiler.report.page import as_html
from nmm_compiler.report.parts import Part
from nmm_compiler.report.text import as_text


class Shown:
    """A record with `parts()`: `str(record)`, `record.table(width)` and a notebook's HTML."""

    def parts(self) -> Sequence[Part]:
        """Return what the record shows, in reading order."""
        raise NotImplementedError

    def table(self, width: int | None = None) -> str:
        """Return the record as text of at most `width` columns; by default the terminal's."""
        return as_text(self.parts(), width)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return as_html(self.parts())
