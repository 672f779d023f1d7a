"""Where the time of a timeline goes: by source line, by instruction, by engine, and in waiting."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from nmm_compiler.records import Record
from nmm_compiler.simulator.timing.causes import causes_of, critical_path
from nmm_compiler.simulator.timing.timeline import Timeline, Transfer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share(Record):
    """The time of one source line, or of one kind of instruction.

    name: the op; the ops of a line. engine: of its instructions, the busiest first. engine_us: time
    for which they hold their engines; a DMA counts its transfer time on one of the 16 engines, the
    mean. path_us: their part of the critical path, with signals and waits; the parts of all shares
    add up to the latency. hbm_bytes: read and written.
    """

    file: str = ""
    line: int = 0
    name: str
    engine: str
    instructions: int
    engine_us: float
    path_us: float
    hbm_bytes: int


def by_line(timeline: Timeline) -> tuple[Share, ...]:
    """Return the source lines, the one with the largest part of the critical path first."""
    return _shares(timeline, lines=True)


def by_instruction(timeline: Timeline) -> tuple[Share, ...]:
    """Return the kinds of instructions, the one with the largest part of the critical path
    first."""
    return _shares(timeline, lines=False)


def _shares(timeline: Timeline, *, lines: bool) -> tuple[Share, ...]:
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, ins in enumerate(timeline.trace.instructions):
        key = (ins.file, ins.line) if lines else (ins.op, timeline.engine(index))
        groups.setdefault(key, []).append(index)
    path: dict[int, float] = collections.defaultdict(float)
    for step in critical_path(timeline):
        path[step.index] += step.us
    moved = {transfer.index: transfer for transfer in timeline.transfers}
    shares = [_share(timeline, indices, path, moved, lines) for indices in groups.values()]
    return tuple(sorted(shares, key=lambda share: (-share.path_us, -share.engine_us)))


def _share(
    timeline: Timeline,
    indices: list[int],
    path: Mapping[int, float],
    moved: Mapping[int, Transfer],
    lines: bool,
) -> Share:
    engines: dict[str, float] = {}
    for index in indices:
        us = timeline.interval_end[index] - timeline.start[index]
        if index in moved:
            parts = moved[index].parts
            us = sum(stop - start for _, start, stop in parts)
            us /= 1 if parts[0][0] < 0 else timeline.target.dma_engines
        name = timeline.engine(index)
        engines[name] = engines.get(name, 0.0) + us
    chosen = [timeline.trace.instructions[index] for index in indices]
    transfers = [moved[index] for index in indices if index in moved]
    return Share(
        file=chosen[0].file if lines else "", line=chosen[0].line if lines else 0,
        name=", ".join(dict.fromkeys(ins.op for ins in chosen)),
        engine=", ".join(sorted(engines, key=lambda name: -engines[name])),
        instructions=len(indices), engine_us=sum(engines.values()),
        path_us=sum(path.get(index, 0.0) for index in indices),
        hbm_bytes=sum(t.hbm_read_bytes + t.hbm_write_bytes for t in transfers),
    )  # fmt: skip


def waits(timeline: Timeline) -> dict[str, dict[str, float]]:
    """Return {engine: {kind of cause: microseconds}} of the time in which an engine stood idle.

    The kinds are those of `causes.WHY`, and "end": after the engine's last instruction.
    """
    causes = causes_of(timeline)
    found: dict[str, dict[str, float]] = {}
    last: dict[str, float] = {}
    for index, instruction in enumerate(timeline.trace.instructions):
        engine = timeline.engine(index)
        if instruction.engine == "dma":
            continue
        last[engine] = max(last.get(engine, 0.0), timeline.interval_end[index])
        cause = causes[index]
        kinds = found.setdefault(engine, {})
        if cause.waited_us:
            kinds[cause.kind] = kinds.get(cause.kind, 0.0) + cause.waited_us
    for engine, when in last.items():
        found[engine]["end"] = timeline.latency_us - when
    return found


def on_the_path(timeline: Timeline, kinds: Iterable[str]) -> float:
    """Return the microseconds of the critical path in steps of kind `what`, or that waited for
    it."""
    wanted = set(kinds)
    path = critical_path(timeline)
    return sum(step.us for step in path if {step.what, step.why} & wanted)
