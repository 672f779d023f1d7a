"""Profiles side by side: their figures, and what differs of each source line and instruction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    error = max(found[best].error_band.mean, first.error_band.mean)
    headline = f"fastest: {best}, {found[best].latency_us:.2f} us simulated on {first.target}, "
    if found[best] is not first:
        headline += not_told(gain, error, "the first")
    lines, operations = (
        {name: _path_us(parts(profile.timeline), label) for name, profile in found.items()}
        for parts, label in (
            (by_line, lambda x: f"{x.line:>4} {statement(x.file, x.line) or x.name}"),
            (by_instruction, lambda x: f"{x.name} on {x.engine}"),
        )
    )
    return [
        Line(f"{headline}{gain:.2f} times as fast as the first", "headline"),
        _figures(found, first),
        Section("critical us of each source line", (_differences(lines, "source line"),)),
        Section("critical us of each instruction", (_differences(operations, "what"),)),
    ]


def _path_us(parts: Any, label: Any) -> dict[str, float]:
    """Return the time on the critical path of each label."""
    sums: dict[str, float] = {}
    for part in parts:
        sums[label(part)] = sums.get(label(part), 0.0) + part.path_us
    return sums


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


def _differences(found: Mapping[str, Mapping[str, float]], what: str) -> Grid:
    """Return the rows that differ most."""

    def spread(text: str) -> float:
        figures = [each.get(text, 0.0) for each in found.values()]
        return max(figures) - min(figures)

    texts = dict.fromkeys(text for each in found.values() for text in each)
    rows = [
        (*(f"{each[text]:.2f}" if text in each else "-" for each in found.values()), text)
        for text in sorted(texts, key=spread, reverse=True)[:_ROWS]
    ]
    head = tuple(name.rpartition("/")[2] for name in found)
    return Grid.of((*head, what), rows, right=head)
