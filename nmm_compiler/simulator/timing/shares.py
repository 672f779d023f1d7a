"""Where the time of a timeline goes: by source line, by instruction, by engine, and in waiting."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from nmm_compiler.records import Record
from nmm_compiler.simulator.timing.causes import causes_of
from nmm_compiler.simulator.timing.timeline import Timeline


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


class _Sum:
    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.engines: dict[str, float] = {}
        self.count, self.path, self.bytes = 0, 0.0, 0

    def add(self, name: str, engine: str, us: float) -> None:
        self.names[name] = None
        self.engines[engine] = self.engines.get(engine, 0.0) + us
        self.count += 1

    def share(self, file: str, line: int) -> Share:
        busiest = sorted(self.engines, key=lambda name: -self.engines[name])
        return Share(
            file=file, line=line, name=", ".join(self.names), engine=", ".join(busiest),
            instructions=self.count, engine_us=sum(self.engines.values()), path_us=self.path,
            hbm_bytes=self.bytes,
        )  # fmt: skip


def by_line(timeline: Timeline) -> tuple[Share, ...]:
    """Return the source lines, the one with the largest part of the critical path first."""
    return _shares(timeline, lines=True)


def by_instruction(timeline: Timeline) -> tuple[Share, ...]:
    """Return the kinds of instructions, the one with the largest part of the critical path
    first."""
    return _shares(timeline, lines=False)


def _shares(timeline: Timeline, *, lines: bool) -> tuple[Share, ...]:
    instructions = timeline.trace.instructions
    causes = causes_of(timeline)
    sums: dict[tuple[object, ...], _Sum] = {}

    def of(index: int) -> _Sum:
        ins = instructions[index]
        key = (ins.file, ins.line) if lines else ("", 0, ins.op, timeline.engine(index))
        return sums.setdefault(key, _Sum())

    moved = {transfer.index: transfer for transfer in timeline.transfers}
    for index, instruction in enumerate(instructions):
        transfer = moved.get(index)
        us = timeline.interval_end[index] - timeline.start[index]
        if transfer is not None:
            us = sum(stop - start for _, start, stop in transfer.parts)
            us /= 1 if transfer.parts[0][0] < 0 else timeline.target.dma_engines
        found = of(index)
        found.add(instruction.op, timeline.engine(index), us)
        if transfer is not None:
            found.bytes += transfer.hbm_read_bytes + transfer.hbm_write_bytes
    for step in causes.path():
        of(step.index).path += step.us
    shares = [found.share(str(key[0]), int(str(key[1]))) for key, found in sums.items()]
    return tuple(sorted(shares, key=lambda share: (-share.path_us, -share.engine_us)))


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
        cause = causes.of(index)
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
    path = causes_of(timeline).path()
    return sum(step.us for step in path if {step.what, step.why} & wanted)
