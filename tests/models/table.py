"""Prints the tables of docs/models.md from the configurations: `python tests/models/table.py`."""

from __future__ import annotations

from configurations import KINDS
from small_models import Kind

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


if __name__ == "__main__":
    print("\n\n".join(f"### {kind.name}\n\n{table(kind)}" for kind in KINDS))
