"""Parts as plain text for a given width.

Sentences are wrapped between words. Only the last column of a table wraps. A table that is too wide
first loses the second blank between its columns. Charts are on pages alone. A path, a URL or any
other word is never broken: such a line is longer than the page.
"""

from __future__ import annotations

import itertools
import shutil
import textwrap
from collections.abc import Sequence

from nmm_compiler.report.parts import Code, Drawing, Grid, Line, Part, Section

_WIDEST = 120
_BELOW = 4
"""Blanks before a last column that stands below its row."""


def as_text(parts: Sequence[Part], width: int | None = None) -> str:
    """Return the parts as text, an empty line around every table, text block and section.

    width: by default that of the terminal, 100 where there is none, 120 at most.
    """
    columns = shutil.get_terminal_size((100, 24)).columns
    return "\n".join(_lines(parts, width or min(columns, _WIDEST)))


def _lines(parts: Sequence[Part], width: int) -> list[str]:
    lines: list[str] = []
    shown = [part for part in parts if not isinstance(part, Drawing)]
    for before, part in zip([None, *shown], shown, strict=False):
        block = not isinstance(part, Line) or not isinstance(before, Line)
        if lines and block:
            lines.append("")
        lines += _part(part, width)
    return lines


def _part(part: Line | Grid | Code | Section, width: int) -> list[str]:
    match part:
        case Line():
            return [
                line
                for text in part.text.split("\n")
                for line in wrapped(text, _room(text, width), part.indent, part.hang)
            ]
        case Grid():
            if part.shares:
                rows = [(*row[:-1], row[-1].strip()) for row in part.rows if row[1]]
                part = Grid.of(part.head, rows, part.right)
            return [line.rstrip() for lines in _lines_of_rows(part, width) for line in lines]
        case Code():
            return part.text.rstrip("\n").split("\n")
        case Section():
            return [*wrapped(part.title, width), *_lines(part.parts, width)]


def counted(count: int, thing: str, things: str = "") -> str:
    """Return "1 kernel", "2 kernels"; things: the plural where it is not the singular and an s."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def _room(text: str, width: int) -> int:
    """Return the width for a line of text: a path as wide as the page stays with its few words."""
    longest = max(map(len, text.split()), default=0)
    return len(text) if longest > width - 4 and len(text) - longest < width < len(text) else width


def wrapped(text: str, width: int, indent: int = 0, hang: int = 4) -> list[str]:
    """Return the text as lines of at most `width` columns, broken between words only."""
    first, rest = " " * indent, " " * (indent + hang)
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest,
        break_long_words=False, break_on_hyphens=False,
    ) or [""]  # fmt: skip


def _lines_of_rows(grid: Grid, width: int) -> list[list[str]]:
    """Return the aligned lines of the head and of each row, the last column wrapped to the width.

    Where that is not enough, the widest other column of words wraps too; where a word of the last
    column does not fit beside the others, that column is below each row.
    """
    rows = [grid.head, *grid.rows]
    right = [name in grid.right for name in grid.head]
    given = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in given]
    gap = "  " if sum(widths) + 2 * len(widths) <= width else " "
    words = [max(map(len, " ".join(column).split()), default=0) for column in given]
    *others, last = range(len(widths))
    for i in (last, *sorted(others, key=lambda i: -widths[i])):
        excess = sum(widths) + len(gap) * len(others) - width
        if excess > 0 and not right[i]:
            widths[i] = max(words[i], widths[i] - excess)
    if not right[last] and sum(widths) + len(gap) * len(others) > width >= words[last] + _BELOW:
        kept = [name for name in grid.head[:-1] if name in grid.right]
        table = Grid.of(grid.head[:-1], [row[:-1] for row in grid.rows], kept)
        below = [wrapped(row[-1], width, indent=_BELOW, hang=0) for row in rows]
        lines = _lines_of_rows(table, width) if others else [[]] * len(rows)
        return [[*first, *rest] for first, rest in zip(lines, below, strict=True)]
    found = []
    for row in rows:
        cells = [
            [cell] if to_right else wrapped(cell, size, hang=0)
            for cell, size, to_right in zip(row, widths, right, strict=True)
        ]
        found.append([
            gap.join(
                text.rjust(size) if to_right else text.ljust(size)
                for text, size, to_right in zip(texts, widths, right, strict=True)
            )
            for texts in itertools.zip_longest(*cells, fillvalue="")
        ])  # fmt: skip
    return found
