"""What could make a kernel faster, and by how much: computed, not guessed.

Each advice is an experiment. The trace of the kernel is timed again with one thing changed, as if
its rows were 1 KiB long or its products bfloat16, and the difference of the two latencies is the
gain. A change that no kernel can make whole (issuing without cost) gives an upper bound, and the
advice says "at most". An experiment runs only where the timeline shows the thing at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from nmm_compiler.records import Record
from nmm_compiler.simulator.timing.dma import DmaCost, DmaCosts
from nmm_compiler.simulator.timing.shares import on_the_path, waits
from nmm_compiler.simulator.timing.timeline import Timeline, time_trace
from nmm_compiler.simulator.trace import Instruction, Trace

WIDE_ROW_BYTES = 1024
_SMALLEST_SHARE = 0.005  # of the latency: smaller gains are not worth a line
_US = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice(Record):
    """One thing to change. gain_us: latency that the change saves; at_most: it is a bound.

    lines: the source lines that it is about.
    """

    seen: str
    remedy: str
    gain_us: float
    at_most: bool
    lines: tuple[int, ...] = ()

    def __str__(self) -> str:
        bound = "at most" if self.at_most else "about"
        place = f" ({_lines(self.lines)})" if self.lines else ""
        return f"{self.seen}{place}: {self.remedy} would save {bound} {self.gain_us:.2f} us"


Experiment = Callable[[Timeline], "Advice | None"]


def advise(timeline: Timeline) -> tuple[Advice, ...]:
    """Return what could be changed, the largest gain first. Times the trace once per experiment."""
    found = [advice for experiment in _EXPERIMENTS if (advice := experiment(timeline)) is not None]
    worth = [a for a in found if a.gain_us > _SMALLEST_SHARE * timeline.latency_us]
    return tuple(sorted(worth, key=lambda advice: -advice.gain_us))


def _short_rows(timeline: Timeline) -> Advice | None:
    costs = DmaCosts(timeline.target)
    short: dict[int, int] = {}
    for instruction, cost in _transfers(timeline, costs):
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
    """The same transfers, with the same bytes in runs of at least 1 KiB."""

    def _compute(
        self, instruction: Instruction, mode: str, transpose: bool, issuer: str
    ) -> DmaCost:
        cost = super()._compute(instruction, mode, transpose, issuer)
        if transpose or cost.run_bytes >= WIDE_ROW_BYTES:
            return cost
        factor = self._us_per_byte(WIDE_ROW_BYTES) / self._us_per_byte(cost.run_bytes)
        descriptors = max(1, -(-cost.descriptors * cost.run_bytes // WIDE_ROW_BYTES))
        queue, issue = self._issue(mode, issuer, descriptors)
        return dataclasses.replace(
            cost,
            run_bytes=WIDE_ROW_BYTES,
            descriptors=descriptors,
            queue=queue,
            issue_us=issue * _US,
            shares=tuple((engine, us * factor) for engine, us in cost.shares),
            uniform_us=cost.uniform_us * factor,
        )

    def _us_per_byte(self, run: int) -> float:
        target = self.target
        rate = min(
            target.dma_bytes_per_second_per_engine,
            target.hbm_bytes_per_second / target.dma_engines,
        )
        each = target.dma_descriptor_seconds + run / rate
        return max(target.dma_descriptor_min_seconds, each) / run


def _issuing(timeline: Timeline) -> Advice | None:
    """Bound what fewer, larger DMAs could save: issuing costs nothing."""
    if not on_the_path(timeline, ("issue", "queue")):
        return None
    free = dataclasses.replace(
        timeline.target, dma_issue_seconds=0.0, dma_issue_descriptor_seconds=0.0,
        dma_static_issue_seconds=0.0, dma_hardware_issue_seconds=0.0,
    )  # fmt: skip
    lines = _most(i.line for i, _ in _transfers(timeline, DmaCosts(timeline.target)))
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
        i for i in timeline.trace.instructions
        if i.engine == most and i.op in ("tensor_copy", "activation", "copy")
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
    """Return an instruction with the same operands that takes no engine of the four any time."""
    return dataclasses.replace(instruction, engine="sync", op="removed", attributes={})


def _turns(instruction: Instruction) -> bool:
    return instruction.op == "dma_transpose" or bool(instruction.attributes.get("transpose"))


def _transfers(timeline: Timeline, costs: DmaCosts) -> Iterator[tuple[Instruction, DmaCost]]:
    for transfer in timeline.transfers:
        instruction = timeline.trace.instructions[transfer.index]
        yield instruction, costs.cost(instruction)


def _advice(
    timeline: Timeline,
    latency_us: float,
    seen: str,
    remedy: str,
    lines: Iterable[int],
    *,
    at_most: bool = False,
) -> Advice:
    gain = timeline.latency_us - latency_us
    return Advice(
        seen=seen, remedy=remedy, gain_us=gain, at_most=at_most, lines=tuple(sorted(set(lines)))
    )


def _most(lines: Iterable[int]) -> list[int]:
    return sorted(set(lines))


def _lines(lines: tuple[int, ...], shown: int = 4) -> str:
    text = ", ".join(map(str, lines[:shown])) + (", ..." if len(lines) > shown else "")
    return f"line {text}" if len(lines) == 1 else f"lines {text}"
