"""The base of every record that users see: from its parts come text, HTML and pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nmm_compiler.outputs import write_text
from nmm_compiler.report.page import as_html, page
from nmm_compiler.report.parts import Part
from nmm_compiler.report.text import as_text


class Shown:
    """A record with `parts()`: `str(record)`, `record.table(width)` and a notebook's HTML."""

    def parts(self) -> Sequence[Part]:
        """Return what the record shows, in reading order."""
        raise NotImplementedError

    def page_parts(self) -> Sequence[Part]:
        """Return what a page and a notebook show: `parts`, unless the record has more for them."""
        return self.parts()

    def table(self, width: int | None = None) -> str:
        """Return the record as text of at most `width` columns; by default the terminal's."""
        return as_text(self.parts(), width)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return as_html(self.page_parts())

    def save_html(self, path: str | Path) -> Path:
        """Write the record as one HTML file that needs no network; return the path.

        Raises OutputError when it cannot be written.
        """
        return write_text(path, page(type(self).__name__, self.page_parts()))
