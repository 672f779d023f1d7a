"""The schedules that were tried for a kernel as a table: the chosen one, then how others differ."""

from __future__ import annotations

from collections.abc import Sequence

from nmm_compiler.codegen.choose import Choice
from nmm_compiler.report.parts import Grid


def schedule_table(choices: Sequence[Choice]) -> Grid:
    """Return the schedules that were tried: the chosen one whole, of the others what differs."""
    rows = []
    chosen = choices[0].schedule if choices else None
    for i, choice in enumerate(choices):
        values = vars(choice.schedule).items()
        differs = [f"{name}={value}" for name, value in values if getattr(chosen, name) != value]
        simulated = "-" if choice.simulated_us is None else f"{choice.simulated_us:.1f}"
        rows.append((
            str(i), simulated, f"{choice.cost_us:.1f}", f"{choice.instructions:,}",
            str(choice.schedule) if i == 0 else ", ".join(differs),
        ))  # fmt: skip
    head = ("rank", "us", "closed form us", "instr", "differs from rank 0 in")
    return Grid.of(head, rows, right=head[:-1])
