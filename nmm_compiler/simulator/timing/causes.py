"""Finds why each instruction of a timeline started at its time, and the critical path.

The timing pass keeps times and no reasons, so this module derives the reasons from the times. An
instruction that did not start when its engine became free started when another instruction ended,
plus the signal between the two. The other one uses the same memory, or is in front of it in a
queue. Nothing here changes a figure of the timeline.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator

from nmm_compiler.simulator.timing.dependence import ENGINES, TENSOR, VECTOR, wake_table
from nmm_compiler.simulator.timing.regions import overlaps
from nmm_compiler.simulator.timing.timeline import Timeline, Transfer
from nmm_compiler.simulator.trace import Access, Instruction

_US = 1e6
_SAME_US = 1e-6  # sums of floats in two orders: far above their error, far below a clock cycle
_LOOKED_AT = 64  # instructions that ended at the same moment, tried for one cause

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
    "port": "a memory port that another engine uses",
    "start": "nothing: it could start at once",
    "other": "a cause that was not found again",
}
"""The kinds of causes, each with what the instruction waited for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """The cause of an instruction's start time.

    kind: a key of `WHY`. index: the instruction that it waited for, -1 for none. ended_us: when the
    waited-for part of that one ended. waited_us: how long the engine stood idle for it.
    """

    kind: str
    index: int
    ended_us: float
    waited_us: float = 0.0


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


def causes_of(timeline: Timeline) -> Causes:
    """Return the causes of a timeline, found once.

    They know a copy of it, so that no cycle keeps its trace in memory.
    """
    found = timeline.causes
    if not isinstance(found, Causes):
        found = timeline.causes = Causes(dataclasses.replace(timeline))
    return found


class _Ends:
    """Instructions by the moments at which a part of them ended."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[tuple[float, int]] = []

    def add(self, when: float, index: int) -> None:
        self.pairs.append((when, index))

    def at(self, when: float) -> Iterator[int]:
        """Yield those that ended at `when`."""
        first = bisect.bisect_left(self.pairs, (when - _SAME_US, -1))
        for ended, index in self.pairs[first : first + _LOOKED_AT]:
            if ended > when + _SAME_US:
                return
            yield index


class Causes:
    """The causes of one timeline; `of(index)` finds one, `path()` follows them from the end."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.instructions = timeline.trace.instructions
        self.codes = {name: code for code, name in enumerate(ENGINES)}
        self.wake = wake_table(timeline.target)
        self.transfers = {transfer.index: transfer for transfer in timeline.transfers}
        self.numbers = {id(instruction): at for at, instruction in enumerate(self.instructions)}
        self.edges = sorted(timeline.trace.loop_edges)
        self._gather()

    def _gather(self) -> None:
        timeline = self.timeline
        self.before: dict[int, int] = {}
        self.freed: dict[str, _Ends] = {}  # by engine, when it could take the next instruction
        self.writers: dict[int, _Ends] = {}
        self.readers: dict[int, _Ends] = {}
        self.on_chip: dict[str, _Ends] = {"sbuf": _Ends(), "psum": _Ends()}
        self.all = _Ends()
        runs: dict[str, list[int]] = {}
        for index, instruction in enumerate(self.instructions):
            if index in timeline.repeated:
                continue
            if instruction.engine != "dma":
                free = timeline.interval_end[index]
                engine = timeline.engine(index)
                self.freed.setdefault(engine, _Ends()).add(free, index)
                runs.setdefault(engine, []).append(index)
            end, read = timeline.end[index], timeline.interval_end[index]
            self.all.add(end, index)
            for accesses, ends, when in (
                (instruction.writes, self.writers, end),
                (instruction.reads, self.readers, read),
            ):
                for access in accesses:
                    ends.setdefault(access.storage, _Ends()).add(when, index)
                    if access.memory != "hbm":
                        self.on_chip[access.memory].add(when, index)
        for indices in runs.values():  # the scheduler may have changed their order
            indices.sort(key=timeline.interval_end.__getitem__)
            self.before.update(zip(indices[1:], indices, strict=False))
        self.queue: dict[str, _Ends] = {}
        self.moved: dict[int, _Ends] = {}
        for transfer in timeline.transfers:
            self.queue.setdefault(transfer.queue, _Ends()).add(transfer.issue_end, transfer.index)
            for mover, _, stop in transfer.parts:
                self.moved.setdefault(mover, _Ends()).add(stop, transfer.index)
        every = [*self.writers.values(), *self.readers.values(), *self.queue.values(), self.all]
        every += [*self.moved.values(), *self.on_chip.values(), *self.freed.values()]
        for one in every:
            one.pairs.sort()
        self.loads = {stop: start for start, stop in timeline.table_loads}

    def of(self, index: int) -> Cause:
        """Return the cause of the instruction's start (of a DMA: of its issue)."""
        instruction = self.instructions[index]
        start = self.timeline.start[index]
        if instruction.engine == "dma":
            return self._issued(index, instruction, start)
        before = self.before.get(index, -1)
        free = self.timeline.interval_end[before] if before >= 0 else 0.0
        if start <= free + _SAME_US:
            return Cause("engine" if before >= 0 else "start", before, free)
        cause = self._waited(index, instruction, start)
        fill_us = self.timeline.target.tensor_latency_seconds * 1e6
        engine = self.timeline.engine(index)
        if cause.kind == "other" and engine == "tensor" and start - free <= fill_us:
            # the sum that it adds to has yet to come through
            return Cause("engine", before, free, start - free)
        if engine == "scalar" and start in self.loads:
            cause = Cause("table", before, self.loads[start])
        return dataclasses.replace(cause, waited_us=start - free)

    def _issued(self, index: int, instruction: Instruction, start: float) -> Cause:
        if start <= _SAME_US:
            return Cause("start", -1, 0.0)
        cause = self._waited(index, instruction, start)
        if cause.kind in ("other", "memory", "loop"):
            ahead = self._first(self.queue[self.transfers[index].queue], start, index)
            if ahead >= 0:
                return Cause("queue", ahead, self.transfers[ahead].issue_end)
        return cause

    def _waited(self, index: int, instruction: Instruction, start: float) -> Cause:
        engine = self.codes[self.timeline.engine(index)]
        for reading, accesses in ((True, instruction.reads), (False, instruction.writes)):
            for access in accesses:
                groups = ((self.writers, True),) if reading else (
                    (self.writers, True), (self.readers, False),
                )  # fmt: skip
                for ends, written in groups:
                    found = self._user(ends, access, start, engine, index, written)
                    if found is not None:
                        other, when = found
                        dma = self.instructions[other].engine == "dma"
                        kind = "reuse" if not reading else "load" if dma else "result"
                        return Cause(kind, other, when)
        for producer in instruction.after:
            at = self.numbers.get(id(producer), -1)
            if at >= 0:
                when = self.timeline.end[at]
                wake = self.wake[self.codes[self.timeline.engine(at)]][engine]
                if abs(when + wake - start) < _SAME_US:
                    return Cause("result", at, when)
        signal = self.wake[VECTOR if engine == TENSOR else TENSOR][engine]
        for access in instruction.writes:
            if access.memory != "hbm":
                at = self._first(self.on_chip[access.memory], start - signal, index)
                if at >= 0:
                    return Cause("memory", at, start - signal)
        at = self._first(self.all, start, index)
        if at >= 0 and self._edge_between(at, index):
            return Cause("loop", at, start)
        for name, freed in self.freed.items():
            at = self._first(freed, start, index) if name != ENGINES[engine] else -1
            if at >= 0:
                return Cause("port", at, start)
        return Cause("other", -1, start)

    def _user(
        self,
        ends: dict[int, _Ends],
        access: Access,
        start: float,
        engine: int,
        index: int,
        written: bool,
    ) -> tuple[int, float] | None:
        """Return the instruction that used the memory of `access` last before `start`, and until
        when."""
        users = ends.get(access.storage)
        if users is None:
            return None
        for signal in {row[engine] for row in self.wake}:
            for other in users.at(start - signal):
                ran_on = self.codes[self.timeline.engine(other)]
                if other == index or self.wake[ran_on][engine] != signal:
                    continue
                user = self.instructions[other]
                theirs = user.writes if written else user.reads
                if any(a.storage == access.storage and overlaps(a, access) for a in theirs):
                    return other, start - signal
        return None

    @staticmethod
    def _first(ends: _Ends, when: float, index: int) -> int:
        return next((other for other in ends.at(when) if other != index), -1)

    def _edge_between(self, first: int, second: int) -> bool:
        at = bisect.bisect_right(self.edges, first)
        return at < len(self.edges) and self.edges[at] <= second

    def path(self) -> list[Step]:
        """Return the critical path from the first instruction to the last result, without gaps."""
        timeline = self.timeline
        if not timeline.end:
            return []
        steps: list[Step] = []
        until = timeline.latency_us
        index = max(range(len(timeline.end)), key=timeline.end.__getitem__)
        seen: set[tuple[int, float]] = set()
        while until > _SAME_US and (index, until) not in seen:
            seen.add((index, until))
            index = timeline.repeated.get(index, index)
            cause = self._entered(index, until, steps)
            start = steps[-1].start_us
            if cause.index < 0:
                if start > _SAME_US:
                    steps.append(Step(index, "other", 0.0, start, cause.kind))
                break
            if start - cause.ended_us > _SAME_US:
                what = "table" if cause.kind == "table" else "signal"
                steps.append(Step(cause.index, what, cause.ended_us, start, cause.kind))
            index, until = cause.index, cause.ended_us
        return steps[::-1]

    def _entered(self, index: int, until: float, steps: list[Step]) -> Cause:
        """Add the steps of one instruction that was left at `until`; return what it waited for."""
        transfer = self.transfers.get(index)
        start = self.timeline.start[index]
        cause = self.of(index)
        if transfer is None:
            steps.append(Step(index, "compute", min(start, until), until, cause.kind))
            return cause
        if until <= transfer.issue_end + _SAME_US:  # left for the next in its queue
            steps.append(Step(index, "issue", start, until, cause.kind))
            return cause
        engine, moving, _ = self._part_that_ended(transfer, until)
        busy = self._busy_engine(transfer, engine, moving)
        steps.append(Step(index, "move", moving, until, "dma engines" if busy else cause.kind))
        if busy is not None:
            return busy
        issued = min(transfer.issue_end, moving)
        if moving - issued > _SAME_US:
            steps.append(Step(index, "start", issued, moving, cause.kind))
        steps.append(Step(index, "issue", start, issued, cause.kind))
        return cause

    def _part_that_ended(self, transfer: Transfer, until: float) -> tuple[int, float, float]:
        """Return the part of a transfer that ended at `until`, or the last."""
        step = self.timeline.dma_stagger_us
        for part in transfer.parts:
            if abs(part[2] - until) < _SAME_US:
                return part
        last = max(transfer.parts, key=lambda part: part[2])
        if last[0] < 0:  # all engines have the same work: the last one runs a whole stagger later
            late = (self.timeline.target.dma_engines - 1) * step
            return last[0], last[1] + (late if until > last[2] + _SAME_US else 0.0), until
        return last

    def _busy_engine(self, transfer: Transfer, engine: int, moving: float) -> Cause | None:
        """Return the transfer that the engine carried before, if this one had to wait for it."""
        late = (self.timeline.target.dma_engines - 1) * self.timeline.dma_stagger_us
        part = next(p for p in transfer.parts if p[0] == engine)
        start_us = self.timeline.target.dma_start_latency_seconds * _US
        rank = transfer.parts.index(part) if engine >= 0 else 0
        issue = transfer.issue_end - transfer.issue_start
        soonest = transfer.issue_start + max(issue, start_us) + rank * self.timeline.dma_stagger_us
        if part[1] <= soonest + _SAME_US:
            return None
        shifts = [(engine, 0.0)]
        if engine >= 0:
            shifts.append((-1, engine * self.timeline.dma_stagger_us))
        for row, shift in shifts:
            ends = self.moved.get(row)
            if ends is None:
                continue
            at = self._first(ends, part[1] - shift, transfer.index)
            if at >= 0:
                return Cause("dma engines", at, min(moving, part[1] + late))
        return None
