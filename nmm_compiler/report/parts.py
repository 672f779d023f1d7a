"""What a record shows: a list of parts, drawn as text by `text.py` and as HTML by `page.py`.

A record that users see inherits `Shown` (shown.py) and has one method, `parts()`. The two renderers
do the rest, so that a terminal, a notebook and a page show the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One paragraph. kind: "headline", "plain", "note" or "warning"; it is the colour of a page.

    indent: blanks before the first line of the text form; hang: further blanks before the others.
    """

    text: str
    kind: str = "plain"
    indent: int = 0
    hang: int = 4


@dataclass(frozen=True)
class Grid:
    """A table. right: names of the columns with figures, which are aligned to the right.

    The last column is the one that wraps. shares: of source lines, with the figures of each before
    its text, the part of the whole, 0 to 1, drawn as a bar; the text form shows the lines with
    figures.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        head: Sequence[str],
        rows: Sequence[Sequence[object]],
        right: Sequence[str] = (),
        shares: Sequence[float] = (),
    ) -> Grid:
        """Return a grid whose cells are the `str` of the values."""
        cells = tuple(tuple(str(cell) for cell in row) for row in rows)
        return cls(tuple(head), cells, tuple(right), tuple(shares))


@dataclass(frozen=True)
class Code:
    """Source text, shown as it is."""

    text: str


@dataclass(frozen=True)
class Drawing:
    """A chart of a page, and a line that describes it; a terminal shows neither."""

    svg: str
    text: str


@dataclass(frozen=True)
class Section:
    """Parts under a title. folded: on a page they open with a click."""

    title: str
    parts: tuple[Part, ...]
    folded: bool = False


Part = Line | Grid | Code | Drawing | Section
