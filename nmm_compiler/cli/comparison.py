"""Profiles side by side: their figures, and what differs of each source line and instruction."""

from __future__ import annotations

from collections.abc import Mapping

from nmm_compiler.report.headline import not_told
from nmm_compiler.report.parts import Grid, Line, Part, Section
from nmm_compiler.simulator.timing.causes import by_instruction, by_line
from nmm_compiler.simulator.timing.profile import Profile
from nmm_compiler.simulator.timing.profile_parts import statement

_ROWS = 12


def comparison_parts(found: Mapping[str, Profile]) -> list[Part]:
    """Return the comparison of named profiles with the first of them."""
    first, *_ = found.values()
    best = min(found, key=lambda name: found[name].latency_us)
    gain = first.latency_us / found[best].latency_us
    lines: dict[str, dict[str, float]] = {}
    operations: dict[str, dict[str, float]] = {}
    for name, profile in found.items():
        for line in by_line(profile.timeline):
            text = f"{line.line:>4} {statement(line.file, line.line) or line.name}"
            row = lines.setdefault(text, {})
            row[name] = row.get(name, 0.0) + line.path_us
        for share in by_instruction(profile.timeline):
            row = operations.setdefault(f"{share.name} on {share.engine}", {})
            row[name] = row.get(name, 0.0) + share.path_us
    error = max(found[best].error_band.mean, first.error_band.mean)
    headline = f"fastest: {best}, {found[best].latency_us:.2f} us simulated on {first.target}, "
    if found[best] is not first:
        headline += not_told(gain, error, "the first")
    return [
        Line(f"{headline}{gain:.2f} times as fast as the first", "headline"),
        _figures(found, first),
        Section("critical us of each source line", (_differences(found, lines, "source line"),)),
        Section("critical us of each instruction", (_differences(found, operations, "what"),)),
    ]


def _figures(found: Mapping[str, Profile], first: Profile) -> Grid:
    rows = [
        (
            f"{p.latency_us:.2f}", f"{p.latency_us - first.latency_us:+.2f}",
            f"{p.roofline_us / p.latency_us:.0%}" if p.latency_us else "-", f"{p.mfu:.1%}",
            f"{(p.hbm_read_bytes + p.hbm_write_bytes) / 1e6:.2f}",
            f"{p.sbuf_peak_bytes / 1024:.0f}", str(p.psum_peak_banks),
            f"{p.program_instructions:,}", name,
        )
        for name, p in found.items()
    ]  # fmt: skip
    head = ("us", "diff us", "of roof", "mfu", "HBM MB", "SBUF KB", "banks", "instr", "kernel")
    return Grid.of(head, rows, right=head[:-1])


def _differences(
    found: Mapping[str, Profile], table: Mapping[str, Mapping[str, float]], what: str
) -> Grid:
    """Return the rows that differ most."""

    def spread(row: Mapping[str, float]) -> float:
        figures = [row.get(name, 0.0) for name in found]
        return max(figures) - min(figures)

    ranked = sorted(table.items(), key=lambda item: -spread(item[1]))[:_ROWS]
    rows = [
        (*(f"{row[name]:.2f}" if name in row else "-" for name in found), text)
        for text, row in ranked
    ]
    head = tuple(name.rpartition("/")[2] for name in found)
    return Grid.of((*head, what), rows, right=head)
