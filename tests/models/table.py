"""Writes the tables of docs/models.md from the configurations: `python tests/models/table.py`."""

from __future__ import annotations

import re
from pathlib import Path

from configurations import KINDS
from small_models import Kind

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
HEAD = "| model | low-rank layers | fused | kernel calls | graphs | note |\n| --- | --- | --- | --- | --- | --- |"  # noqa: E501


def table(kind: Kind) -> str:
    """Return one kind's models as a Markdown table."""
    lines = [HEAD]
    for row in kind.rows:
        n = row.expected
        fused = (
            str(n["chains"]) if n["chains"] == n["layers"] else f"{n['chains']} of {n['uses']} uses"
        )
        cells = (row.model_type, n["layers"], fused, n["calls"], n["graphs"], row.note)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with the tables between its begin and end marks written anew."""
    body = "\n\n".join(f"### {kind.name}\n\n{table(kind)}" for kind in KINDS)
    marks = r"(?s)(<!-- tables: .*? -->\n).*(<!-- end of tables -->)"
    new, count = re.subn(marks, lambda m: f"{m[1]}\n{body}\n\n{m[2]}", text)
    if count != 1:
        raise ValueError(f"{PAGE} has {count} pairs of table marks; it needs exactly one")
    return new


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
