"""Prints the tables of docs/models.md from the configurations: `python tests/models/table.py`."""

from __future__ import annotations

from configurations import MODELS

HEAD = "| model | low-rank layers | fused | kernel calls | graphs | note |\n| --- | --- | --- | --- | --- | --- |"  # noqa: E501

if __name__ == "__main__":
    kind = ""
    for row in MODELS.values():
        n = row.expected
        if row.kind != kind:
            print("\n" * bool(kind) + f"### {row.kind}\n\n{HEAD}")
            kind = row.kind
        all_fused = n["chains"] == n["layers"]
        fused = n["chains"] if all_fused else f"{n['chains']} of {n['uses']} uses"
        cells = (row.model_type, n["layers"], fused, n["calls"], n["graphs"], row.note)
        print(f"| {' | '.join(map(str, cells))} |")
