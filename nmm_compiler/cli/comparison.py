"""Profiles side by side: a table, the difference of each source line, one roofline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nmm_compiler.report.charts import Bar, bars
from nmm_compiler.report.parts import Grid, Line, Part, Section
from nmm_compiler.simulator.timing.profile import Profile
from nmm_compiler.simulator.timing.profile_parts import (
    roofline_drawing,
    statement,
    time_drawing,
)
from nmm_compiler.simulator.timing.shares import by_instruction, by_line


def comparison_parts(found: Mapping[str, Profile], most_lines: int | None) -> list[Part]:
    """Return the comparison of named profiles with the first of them.

    most_lines: most lines of the table of differences; None is for a page, which has all lines and
    the timelines.
    """
    first, *_ = found.values()
    best = min(found, key=lambda name: found[name].latency_us)
    gain = first.latency_us / found[best].latency_us
    parts: list[Part] = [
        Line(
            f"fastest: {best}, {found[best].latency_us:.2f} us simulated on {first.target}"
            + (f", {gain:.2f} times as fast as {next(iter(found))}" if found[best] is not first
               else ""),
            "headline",
        ),
        _figures(found, first),
        Section("critical us of each source line", (_lines(found, most_lines),)),
        Section("critical us of each instruction", (_ops(found),)),
        _bars(found),
        _roofline(found),
    ]  # fmt: skip
    if most_lines is None:
        for name, profile in found.items():
            parts.append(Section(name, (time_drawing(profile.timeline), *profile.source()),
                                 folded=True))  # fmt: skip
    return parts


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


def _lines(found: Mapping[str, Profile], most: int | None) -> Grid:
    """Return the time of lines with equal text, or, within one file, with equal numbers."""
    table: dict[tuple[str, int], dict[str, float]] = {}
    for name, profile in found.items():
        seen: dict[str, int] = {}
        for share in sorted(by_line(profile.timeline), key=lambda one: (one.file, one.line)):
            text = statement(share.file, share.line) or share.name
            seen[text] = seen.get(text, 0) + 1  # two lines with the same text stay apart
            row = table.setdefault((text, seen[text]), {})
            row[name] = share.path_us
            row.setdefault("", float(share.line))
    return _differences(found, {
        f"{int(row.pop('')):>4} {text}": row for (text, _), row in table.items()
    }, most, "line and source")  # fmt: skip


def _ops(found: Mapping[str, Profile]) -> Grid:
    table: dict[str, dict[str, float]] = {}
    for name, profile in found.items():
        for share in by_instruction(profile.timeline):
            row = table.setdefault(f"{share.name} on {share.engine}", {})
            row[name] = row.get(name, 0.0) + share.path_us
    return _differences(found, table, None, "instruction")


def _differences(
    found: Mapping[str, Profile], table: dict[str, dict[str, float]], most: int | None, what: str
) -> Grid:
    names = list(found)

    def spread(row: dict[str, float]) -> float:
        figures = [row.get(name, 0.0) for name in names]
        return max(figures) - min(figures)

    ranked = sorted(table.items(), key=lambda item: -spread(item[1]))
    rows = [
        (*(f"{row[name]:.2f}" if name in row else "-" for name in names), text)
        for text, row in ranked[:most]
    ]
    head = tuple(_short(name) for name in names)
    return Grid.of((*head, what), rows, right=head)


def _short(name: str) -> str:
    """Return the name of a run as the head of a column: the file's name without its folder."""
    place, space, rest = name.partition(" ")
    return (Path(place).name if place.count(":") == 1 and ".py:" in place else place) + space + rest


def _bars(found: Mapping[str, Profile]) -> Part:
    engines = ("tensor", "vector", "scalar", "gpsimd", "dma")
    rows = [Bar(_short(name), (profile.latency_us,)) for name, profile in found.items()]
    busy = "; ".join(
        f"{_short(name)}: "
        + ", ".join(f"{e} {p.engine_busy_us.get(e, 0):.1f}" for e in engines
                    if p.engine_busy_us.get(e))
        for name, p in found.items()
    )  # fmt: skip
    return bars(rows, ("latency",), "us", f"latency, us; busy: {busy}")


def _roofline(found: Mapping[str, Profile]) -> Part:
    points = []
    for name, p in found.items():
        moved = max(p.hbm_read_bytes + p.hbm_write_bytes, 1)
        points.append((_short(name), p.flops / moved, p.flops * 1e6 / (p.latency_us or 1.0)))
    target = next(iter(found.values())).timeline.target
    peak, rate = target.peak_flops_per_second(), target.memory_bytes_per_second
    return roofline_drawing(points, target.name, peak, rate)
