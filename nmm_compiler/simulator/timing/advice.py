"""Computes which changes make a kernel faster, and by how much.

Each advice is an experiment. The trace of the kernel is timed again with one change, for example
with rows of 1 KiB or products in bfloat16, and the difference of the two latencies is the gain. A
change that no kernel can make completely (issuing without cost) gives an upper bound, and the
advice says "at most". An experiment runs only where the timeline shows what it changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from nmm_compiler.records import Record
from nmm_compiler.report.headline import not_told
from nmm_compiler.simulator.timing.dma import DmaCost, DmaCosts
from nmm_compiler.simulator.timing.evidence import band_of
from nmm_compiler.simulator.timing.shares import on_the_path, waits
from nmm_compiler.simulator.timing.timeline import Timeline, time_trace
from nmm_compiler.simulator.timing.work import Works
from nmm_compiler.simulator.trace import Instruction, Trace

WIDE_ROW_BYTES = 1024
_SMALLEST_SHARE = 0.005  # of the latency: smaller gains are not worth a line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice(Record):
    """One change. gain_us: latency that it saves; at_most: the gain is an upper bound.

    gain: how many times faster the kernel would be; error: of such a figure, by the kernel's class.
    lines: the source lines that it is about.
    """

    seen: str
    remedy: str
    gain_us: float
    gain: float
    error: float
    at_most: bool
    lines: tuple[int, ...] = ()

    def __str__(self) -> str:
        bound = "at most" if self.at_most else "about"
        place = f" ({_lines(self.lines)})" if self.lines else ""
        what = f"{self.seen}{place}: {self.remedy}"
        return f"{self.unsure}{what} would save {bound} {self.gain_us:.2f} us"

    @property
    def unsure(self) -> str:
        """The words before a gain within its error; "" for any other."""
        return not_told(self.gain, self.error, "none")


Experiment = Callable[[Timeline], "Advice | None"]


def advise(timeline: Timeline) -> tuple[Advice, ...]:
    """Return what could be changed, the largest gain first. Times the trace once per experiment."""
    found = [advice for experiment in _EXPERIMENTS if (advice := experiment(timeline)) is not None]
    worth = [a for a in found if a.gain_us > _SMALLEST_SHARE * timeline.latency_us]
    return tuple(sorted(worth, key=lambda advice: -advice.gain_us))


def _short_rows(timeline: Timeline) -> Advice | None:
    short: dict[int, int] = {}
    for instruction, cost in _transfers(timeline):
        if cost.run_bytes < WIDE_ROW_BYTES // 2 and not _turns(instruction):
            line, run = instruction.line, cost.run_bytes
            short[line] = min(short.get(line, run), run)
    if not short:
        return None
    wide = _WideRows(timeline.target)
    again = time_trace(timeline.trace, timeline.target, dma_costs=wide)
    sizes = sorted(set(short.values()))
    seen = f"rows of {sizes[0]} B" if len(sizes) == 1 else f"rows of {sizes[0]} to {sizes[-1]} B"
    return _advice(timeline, again.latency_us, seen, "1 KiB rows", short)


class _WideRows(DmaCosts):
    """The same bytes in runs of at least 1 KiB, moved by as many fewer DMAs.

    Four DMAs with rows of 256 B become one, so that each is a quarter of a start.
    """

    def _row_bytes(self, run: int, moved: int) -> int:
        return max(run, min(WIDE_ROW_BYTES, moved))

    def _compute(
        self, instruction: Instruction, mode: str, transpose: bool, issuer: str
    ) -> DmaCost:
        cost = super()._compute(instruction, mode, transpose, issuer)
        if transpose:
            return cost
        joined = min(DmaCosts(self.target).cost(instruction).run_bytes / WIDE_ROW_BYTES, 1.0)
        start_us = self._issue(mode, issuer, 0)[1] * 1e6
        return dataclasses.replace(cost, issue_us=cost.issue_us - (1.0 - joined) * start_us)


def _issuing(timeline: Timeline) -> Advice | None:
    """Bound what fewer, larger DMAs could save: issuing costs nothing."""
    if not on_the_path(timeline, ("issue", "queue")):
        return None
    free = dataclasses.replace(
        timeline.target, dma_issue_seconds=0.0, dma_issue_descriptor_seconds=0.0,
        dma_static_issue_seconds=0.0, dma_hardware_issue_seconds=0.0,
    )  # fmt: skip
    lines = _most(timeline.trace.instructions[t.index].line for t in timeline.transfers)
    seen = f"issuing {len(timeline.transfers)} DMAs"
    again = time_trace(timeline.trace, free)
    return _advice(timeline, again.latency_us, seen, "fewer, larger ones", lines, at_most=True)


def _float32_products(timeline: Timeline) -> Advice | None:
    def as_bf16(instruction: Instruction) -> Instruction:
        reads = tuple(
            dataclasses.replace(a, dtype="bfloat16") if a.dtype == "float32" else a
            for a in instruction.reads
        )
        return dataclasses.replace(instruction, reads=reads)

    slow = [
        i for i in timeline.trace.instructions
        if i.engine == "tensor" and any(a.dtype == "float32" for a in i.reads)
    ]  # fmt: skip
    seen = "float32 products take four passes of TensorE"
    return _changed(timeline, slow, as_bf16, seen, "bfloat16 operands")


def _transposes_on_tensor(timeline: Timeline) -> Advice | None:
    turned = [
        i for i in timeline.trace.instructions
        if i.op == "nc_transpose" or (i.engine == "tensor" and i.attributes.get("is_transpose"))
    ]  # fmt: skip
    seen = f"{len(turned)} transposes on chip"
    remedy = "operands that already lie the other way around"
    return _changed(timeline, turned, _without_work, seen, remedy, at_most=True)


def _transposes_by_dma(timeline: Timeline) -> Advice | None:
    def plain(instruction: Instruction) -> Instruction:
        attributes = {k: v for k, v in instruction.attributes.items() if k != "transpose"}
        return dataclasses.replace(instruction, attributes=attributes)

    turned = [i for i in timeline.trace.instructions if i.engine == "dma" and _turns(i)]
    seen = f"{len(turned)} DMA transposes"
    return _changed(timeline, turned, plain, seen, "plain loads of an operand stored turned")


def _uneven_copies(timeline: Timeline) -> Advice | None:
    """Spread PSUM evictions and copies over VectorE and ScalarE, every second one to the other."""
    busy = timeline.busy_us
    most, least = sorted(("vector", "scalar"), key=lambda name: -busy.get(name, 0.0))
    if busy.get(most, 0.0) < 2 * busy.get(least, 0.0) or not timeline.target.scalar_tensor_copy:
        return None
    copies = [
        i for index, i in enumerate(timeline.trace.instructions)
        if timeline.engine(index) == most and i.op in ("tensor_copy", "activation")
        and i.attributes.get("function", "copy") in ("copy", "identity", None)
    ]  # fmt: skip

    def moved(instruction: Instruction) -> Instruction:
        return dataclasses.replace(instruction, engine=least, op="tensor_copy")

    names = {"vector": "VectorE", "scalar": "ScalarE"}
    seen = f"{len(copies)} copies on {names[most]} while {names[least]} idles"
    remedy = f"every second one on {names[least]}"
    return _changed(timeline, copies[::2], moved, seen, remedy)


def _loop_edges(timeline: Timeline) -> Advice | None:
    trace = timeline.trace
    if not trace.loop_edges:
        return None
    lines = {trace.instructions[at].line for at in trace.loop_edges if at < len(trace.instructions)}
    again = time_trace(dataclasses.replace(trace, loop_edges=[]), timeline.target)
    seen = "turns of a loop on the device wait for each other"
    remedy = "a loop with more work in each turn"
    return _advice(timeline, again.latency_us, seen, remedy, lines, at_most=True)


def _room(timeline: Timeline) -> Advice | None:
    if not on_the_path(timeline, ("memory",)):
        return None
    target = timeline.target
    larger = dataclasses.replace(
        target, sbuf_bytes_per_partition=2 * target.sbuf_bytes_per_partition,
        psum_banks=2 * target.psum_banks,
    )  # fmt: skip
    again = time_trace(timeline.trace, larger)
    seen = "tiles wait for room in SBUF or PSUM"
    return _advice(timeline, again.latency_us, seen, "half as large tiles", (), at_most=True)


def _clock_ramp(timeline: Timeline) -> Advice | None:
    if not timeline.tensor_throttled_us:
        return None
    steady = dataclasses.replace(timeline.target, tensor_ramp_seconds=0.0)
    again = time_trace(timeline.trace, steady)
    seen = "TensorE starts at half its clock after each pause"
    remedy = "products without pauses"
    return _advice(timeline, again.latency_us, seen, remedy, (), at_most=True)


def _table_loads(timeline: Timeline) -> Advice | None:
    if not waits(timeline).get("scalar", {}).get("table"):
        return None
    free = dataclasses.replace(timeline.target, activation_table_load_seconds=0.0)
    seen = f"ScalarE loads {len(timeline.table_loads)} activation tables"
    again = time_trace(timeline.trace, free)
    return _advice(
        timeline, again.latency_us, seen, "each function used in one stretch", (), at_most=True
    )


_EXPERIMENTS: tuple[Experiment, ...] = (
    _short_rows,
    _issuing,
    _float32_products,
    _transposes_on_tensor,
    _transposes_by_dma,
    _uneven_copies,
    _loop_edges,
    _room,
    _clock_ramp,
    _table_loads,
)


def _changed(
    timeline: Timeline,
    chosen: list[Instruction],
    change: Callable[[Instruction], Instruction],
    seen: str,
    remedy: str,
    *,
    at_most: bool = False,
) -> Advice | None:
    """Time the trace with the chosen instructions changed; None where there are none."""
    if not chosen:
        return None
    wanted = {id(instruction) for instruction in chosen}
    instructions = [change(i) if id(i) in wanted else i for i in timeline.trace.instructions]
    new = {
        id(old): made for old, made in zip(timeline.trace.instructions, instructions, strict=True)
    }
    for i, made in enumerate(instructions):
        if any(id(producer) in wanted for producer in made.after):
            after = tuple(new[id(producer)] for producer in made.after)
            instructions[i] = dataclasses.replace(made, after=after)
            new[id(timeline.trace.instructions[i])] = instructions[i]
    trace: Trace = dataclasses.replace(timeline.trace, instructions=instructions)
    lines = _most(i.line for i in chosen)
    again = time_trace(trace, timeline.target)
    return _advice(timeline, again.latency_us, seen, remedy, lines, at_most=at_most)


def _without_work(instruction: Instruction) -> Instruction:
    """Return an instruction with the same operands that takes no time on a compute engine."""
    return dataclasses.replace(instruction, engine="sync", op="removed", attributes={})


def _turns(instruction: Instruction) -> bool:
    return instruction.op == "dma_transpose" or bool(instruction.attributes.get("transpose"))


def _transfers(timeline: Timeline) -> Iterator[tuple[Instruction, DmaCost]]:
    works = Works(timeline.target, DmaCosts(timeline.target))
    for transfer in timeline.transfers:
        instruction = timeline.trace.instructions[transfer.index]
        cost = (works.kinds.get(instruction.kind) or works.find(instruction)).dma
        assert cost is not None
        yield instruction, cost


def _advice(
    timeline: Timeline,
    latency_us: float,
    seen: str,
    remedy: str,
    lines: Iterable[int],
    *,
    at_most: bool = False,
) -> Advice:
    return Advice(
        seen=seen,
        remedy=remedy,
        gain_us=timeline.latency_us - latency_us,
        gain=timeline.latency_us / max(latency_us, 1e-3),
        error=band_of(timeline.busy_us).mean,
        at_most=at_most,
        lines=tuple(sorted(set(lines))),
    )


def _most(lines: Iterable[int]) -> list[int]:
    return sorted(set(lines))


def _lines(lines: tuple[int, ...], shown: int = 4) -> str:
    text = ", ".join(map(str, lines[:shown])) + (", ..." if len(lines) > shown else "")
    return f"line {text}" if len(lines) == 1 else f"lines {text}"
