"""Why each instruction of a timeline started at its time, the critical path, and where time goes.

The timing pass keeps for each instruction what its start waited for. From that follow the shares of
source lines, instructions and engines. Nothing here changes a figure of the timeline.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from nmm_compiler.records import Record
from nmm_compiler.simulator.timing.resources import Waited
from nmm_compiler.simulator.timing.timeline import Timeline, stagger_us

_SAME_US = 1e-6  # sums of floats in two orders: far above their error, far below a clock cycle

WHY = {
    "engine": "the instruction before it on its engine",
    "load": "data that a DMA brings",
    "result": "a result of another engine",
    "reuse": "a buffer that is still read or written",
    "memory": "room in SBUF or PSUM",
    "queue": "the DMA queue",
    "dma engines": "DMA engines at work on other transfers",
    "table": "loading an activation table",
    "loop": "the end of a turn of a loop on the device",
    "barrier": "the other core at a barrier",
    "port": "a memory port that another engine uses",
    "start": "nothing: it could start at once",
    "end": "nothing more to do",
}
"""The kinds of causes, each with what the instruction waited for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A stretch of the critical path: from start_us to stop_us the latency depends on this
    instruction.

    what: "compute", "issue", "start" (a DMA's latency before bytes move), "move", "signal" (the
    semaphore from the instruction to the next), "table" or "other".
    why: a key of `WHY`: what the instruction waited for before it started.
    """

    index: int
    what: str
    start_us: float
    stop_us: float
    why: str

    @property
    def us(self) -> float:
        """The length in microseconds."""
        return self.stop_us - self.start_us


def critical_path(timeline: Timeline) -> list[Step]:
    """Return the steps from the first instruction to the last result, without gaps."""
    steps: list[Step] = []
    if not timeline.end:
        return steps
    until, index = timeline.latency_us, max(range(len(timeline.end)), key=timeline.end.__getitem__)
    seen: set[tuple[int, float]] = set()
    while until > _SAME_US and (index, until) not in seen:
        seen.add((index, until))
        kind, cause, ended = _enter(timeline, index, until, steps)
        start = steps[-1].start_us
        if cause < 0:
            if start > _SAME_US:
                steps.append(Step(index, "other", 0.0, start, kind))
            break
        if start - ended > _SAME_US:
            what = "table" if kind == "table" else "signal"
            steps.append(Step(cause, what, ended, start, kind))
        index, until = cause, ended
    return steps[::-1]


def _enter(line: Timeline, index: int, until: float, steps: list[Step]) -> Waited:
    """Add the steps of one instruction that was left at `until`; return what it waited for."""
    transfer, start, cause = line.transfers.get(index), line.start[index], line.waited[index]
    kind = cause[0]
    if transfer is None:
        steps.append(Step(index, "compute", min(start, until), until, kind))
        return cause
    if until <= transfer.issue_end + _SAME_US:  # left for the next in its queue
        steps.append(Step(index, "issue", start, until, kind))
        return cause
    # the part that ended then, else the last one
    engine, moving, stop, before = max(
        transfer.parts, key=lambda part: (abs(part[2] - until) < _SAME_US, part[2])
    )
    if engine < 0 and until > stop + _SAME_US:  # of engines that are alike, the last one
        moving += (line.target.dma_engines - 1) * stagger_us(line.target)
    if before >= 0:
        steps.append(Step(index, "move", moving, until, "dma engines"))
        return "dma engines", before, moving
    steps.append(Step(index, "move", moving, until, kind))
    issued = min(transfer.issue_end, moving)
    if moving - issued > _SAME_US:
        steps.append(Step(index, "start", issued, moving, kind))
    steps.append(Step(index, "issue", start, issued, kind))
    return cause


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


def shares(timeline: Timeline, *, lines: bool) -> tuple[Share, ...]:
    """Return the source lines, or the kinds of instructions.

    The one with the largest part of the critical path is the first.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, ins in enumerate(timeline.trace.instructions):
        key = (ins.file, ins.line) if lines else (ins.op, timeline.engine(index))
        groups.setdefault(key, []).append(index)
    path: dict[int, float] = collections.defaultdict(float)
    for step in critical_path(timeline):
        path[step.index] += step.us
    found = [_share(timeline, indices, path, lines) for indices in groups.values()]
    return tuple(sorted(found, key=lambda share: (-share.path_us, -share.engine_us)))


def _share(
    timeline: Timeline,
    indices: list[int],
    path: Mapping[int, float],
    lines: bool,
) -> Share:
    engines: dict[str, float] = {}
    moved = timeline.transfers
    for index in indices:
        us = timeline.interval_end[index] - timeline.start[index]
        if index in moved:
            parts = moved[index].parts
            us = sum(stop - start for _, start, stop, _ in parts)
            us /= 1 if parts[0][0] < 0 else timeline.target.dma_engines
        name = timeline.engine(index)
        engines[name] = engines.get(name, 0.0) + us
    chosen = [timeline.trace.instructions[index] for index in indices]
    costs = [moved[index].cost for index in indices if index in moved]
    return Share(
        file=chosen[0].file if lines else "", line=chosen[0].line if lines else 0,
        name=", ".join(dict.fromkeys(ins.op for ins in chosen)),
        engine=", ".join(sorted(engines, key=lambda name: -engines[name])),
        instructions=len(indices), engine_us=sum(engines.values()),
        path_us=sum(path.get(index, 0.0) for index in indices),
        hbm_bytes=sum(cost.hbm_read_bytes + cost.hbm_write_bytes for cost in costs),
    )  # fmt: skip


def waits(timeline: Timeline) -> dict[str, dict[str, float]]:
    """Return {engine: {kind of cause: microseconds}} of the time in which an engine stood idle.

    The kinds are those of `WHY`; "end" is after the engine's last instruction.
    """
    found: dict[str, dict[str, float]] = {}
    free: dict[str, float] = {}
    ends = timeline.interval_end
    for index in sorted(range(len(ends)), key=ends.__getitem__):
        engine = timeline.engine(index)
        if engine == "dma":
            continue
        kinds, idle = found.setdefault(engine, {}), timeline.start[index] - free.get(engine, 0.0)
        if idle > _SAME_US:
            why = timeline.waited[index][0]
            kinds[why] = kinds.get(why, 0.0) + idle
        free[engine] = ends[index]
    for engine, when in free.items():
        found[engine]["end"] = timeline.latency_us - when
    return found
