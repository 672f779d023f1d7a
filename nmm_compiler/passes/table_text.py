"""The table of a RewriteResult, as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nmm_compiler.passes.result import RewriteResult


def columns(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the rows as aligned lines under a head."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(r[i]) for r in [list(head), *texts]) for i in range(len(head))]
    lines = ["  ".join(h.ljust(w) for h, w in zip(head, widths, strict=True)).rstrip()]
    lines += [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in texts
    ]
    return lines


def render(result: RewriteResult) -> str:
    """Return matches, refusals and opportunities, each as a table when there are any."""
    lines = [
        f"{len(result.matches)} matched ({len(result.rewritten)} rewritten), "
        f"{len(result.declined)} declined; transposes of activations in the graph: "
        f"{result.transposes_before} -> {result.transposes_after}"
    ]
    if result.matches:
        rows = [
            (
                m.kind,
                m.name,
                *(m.info.get(key, "-") for key in ("m", "k", "r", "n")),
                m.info.get("x_layout", "row") + ">" + m.info.get("out_layout", "row"),
                m.module or "-",
                "; ".join(m.notes),
            )
            for m in result.matches
        ]
        head = ("match", "node", "m", "k", "r", "n", "layout", "module", "notes")
        lines += ["", *columns(head, rows)]
    if result.declined:
        rows = [(d.rule, d.at, d.reason, d.node, d.remedy) for d in result.declined]
        lines += ["", *columns(("declined", "at", "reason", "node", "what would help"), rows)]
    if result.opportunities:
        rows = [
            (
                o.module or o.node,
                o.k,
                o.n,
                o.r,
                o.break_even,
                f"{o.saved_bytes / 2**20:.2f}",
                f"{o.saved_flops_per_token / 1e6:.3f}",
            )
            for o in result.opportunities
        ]
        titles = ("could be factorized", "k", "n", "rank", "break-even", "MiB saved", "MFLOP/token")
        lines += ["", *columns(titles, rows)]
        total = sum(o.saved_bytes for o in result.opportunities)
        lines.append(
            f"keeping 80 % of these weights' parameters saves {total / 2**20:.2f} MiB per pass"
        )
    return "\n".join(lines)
