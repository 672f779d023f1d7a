"""The schedules that were tried for a kernel as a table: the chosen one, then how others differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nmm_compiler.codegen.choose import Choice
from nmm_compiler.report.parts import Grid


def schedule_table(choices: Sequence[Choice]) -> Grid:
    """Return the schedules that were tried: the chosen one whole, of the others what differs."""
    rows = []
    chosen = _flat(choices[0].schedule.to_dict()) if choices else {}
    for i, choice in enumerate(choices):
        fields = _flat(choice.schedule.to_dict())
        differs = [f"{name}={value}" for name, value in fields.items() if chosen[name] != value]
        simulated = "-" if choice.simulated_us is None else f"{choice.simulated_us:.1f}"
        rows.append((
            str(i), simulated, f"{choice.cost_us:.1f}", f"{choice.instructions:,}",
            str(choice.schedule) if i == 0 else ", ".join(differs),
        ))  # fmt: skip
    head = ("rank", "us", "closed form us", "instr", "differs from rank 0 in")
    return Grid.of(head, rows, right=head[:-1])


def _flat(fields: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested fields by their paths: {"u": {"block": 512}} as {"u.block": 512}."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{above}{name}.")
        else:
            found[above + name] = value
    return found
