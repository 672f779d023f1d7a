"""Computes which changes make a kernel faster, and by how much.

Each advice is an experiment. The trace of the kernel is timed again with one change, for example
with products in bfloat16, and the difference of the two latencies is the gain. A change that no
kernel can make completely (rows or issuing without cost) gives an upper bound, and the advice says
"at most". An experiment runs only where the timeline shows what it changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nmm_compiler.records import Record
from nmm_compiler.report.headline import not_told
from nmm_compiler.simulator.timing.causes import on_the_path, waits
from nmm_compiler.simulator.timing.costs import Works
from nmm_compiler.simulator.timing.dependence import ENGINE_NAMES
from nmm_compiler.simulator.timing.dma import DmaCost
from nmm_compiler.simulator.timing.evidence import band_of
from nmm_compiler.simulator.timing.timeline import Timeline, time_trace
from nmm_compiler.simulator.trace import Instruction, Trace

WIDE_ROW_BYTES = 1024
_FREE_ISSUE = dict.fromkeys(
    ("dma_issue_seconds", "dma_issue_descriptor_seconds", "dma_static_issue_seconds",
     "dma_hardware_issue_seconds"),
    0.0,
)  # fmt: skip
_FREE_ROWS = dict.fromkeys(
    ("dma_descriptor_seconds", "dma_descriptor_min_seconds", "dma_short_row_seconds"), 0.0
)
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


def advise(timeline: Timeline) -> tuple[Advice, ...]:
    """Return what could be changed, the largest gain first. Times the trace once per experiment."""
    found = [*_without_costs(timeline), *_other_instructions(timeline)]
    worth = [a for a in found if a.gain_us > _SMALLEST_SHARE * timeline.latency_us]
    return tuple(sorted(worth, key=lambda advice: -advice.gain_us))


def _without_costs(timeline: Timeline) -> Iterator[Advice]:
    """Yield bounds of what a change could save that no kernel can make completely."""
    trace, target = timeline.trace, timeline.target

    def bound(seen: str, remedy: str, lines: Iterable[int] = (), **free: Any) -> Advice:
        again = time_trace(trace, dataclasses.replace(target, **free))
        return _advice(timeline, again, seen, remedy, lines, at_most=True)

    short: dict[int, int] = {}
    for instruction, cost in _transfers(timeline):
        if cost.run_bytes < WIDE_ROW_BYTES // 2 and not instruction.attributes.get("transpose"):
            line, run = instruction.line, cost.run_bytes
            short[line] = min(short.get(line, run), run)
    if short:
        sizes = sorted({min(short.values()), max(short.values())})
        seen = f"rows of {' to '.join(map(str, sizes))} B"
        yield bound(seen, "1 KiB rows", short, **_FREE_ISSUE, **_FREE_ROWS)
    if on_the_path(timeline, ("issue", "queue")):
        lines = [trace.instructions[t.index].line for t in timeline.transfers]
        yield bound(f"issuing {len(lines)} DMAs", "fewer, larger ones", lines, **_FREE_ISSUE)
    if trace.loop_edges:
        edges = [at for at in trace.loop_edges if at < len(trace.instructions)]
        yield _advice(
            timeline, time_trace(dataclasses.replace(trace, loop_edges=[]), target),
            "turns of a loop on the device wait for each other",
            "a loop with more work in each turn",
            (trace.instructions[at].line for at in edges), at_most=True,
        )  # fmt: skip
    if on_the_path(timeline, ("memory",)):
        yield bound(
            "tiles wait for room in SBUF or PSUM", "half as large tiles",
            sbuf_bytes_per_partition=2 * target.sbuf_bytes_per_partition,
            psum_banks=2 * target.psum_banks,
        )  # fmt: skip
    if timeline.tensor_throttled_us:
        seen = "TensorE starts at half its clock after each pause"
        yield bound(seen, "products without pauses", tensor_ramp_seconds=0.0)
    if waits(timeline).get("scalar", {}).get("table"):
        seen = f"ScalarE loads {len(timeline.table_loads)} activation tables"
        yield bound(seen, "each function used in one stretch", activation_table_load_seconds=0.0)


def _other_instructions(timeline: Timeline) -> Iterator[Advice]:
    """Yield what other instructions in the place of some would save."""
    change, instructions = dataclasses.replace, timeline.trace.instructions
    slow = [
        i for i in instructions
        if i.engine == "tensor" and any(a.dtype == "float32" for a in i.reads)
    ]  # fmt: skip

    def as_bf16(i: Instruction) -> Instruction:
        wide = [change(a, dtype="bfloat16") if a.dtype == "float32" else a for a in i.reads]
        return change(i, reads=tuple(wide))

    seen = "float32 products take four passes of TensorE"
    yield from _changed(timeline, slow, as_bf16, seen, "bfloat16 operands")
    turned = [
        i for i in instructions
        if i.attributes.get("is_transpose")
    ]  # fmt: skip

    def without_work(i: Instruction) -> Instruction:
        return change(i, engine="sync", op="removed", attributes={})

    seen, remedy = (
        f"{len(turned)} transposes on chip",
        "operands that already lie the other way around",
    )
    yield from _changed(timeline, turned, without_work, seen, remedy, at_most=True)
    by_dma = [i for i in instructions if i.attributes.get("transpose")]

    def plain(i: Instruction) -> Instruction:
        return change(i, attributes={k: v for k, v in i.attributes.items() if k != "transpose"})

    seen, remedy = f"{len(by_dma)} DMA transposes", "plain loads of an operand stored turned"
    yield from _changed(timeline, by_dma, plain, seen, remedy)
    busy = timeline.busy_us
    most, least = sorted(("vector", "scalar"), key=lambda name: -busy.get(name, 0.0))
    if busy.get(most, 0.0) < 2 * busy.get(least, 0.0) or not timeline.target.scalar_tensor_copy:
        return
    copies = [
        i for index, i in enumerate(instructions)
        if timeline.engine(index) == most and i.op in ("tensor_copy", "activation")
        and i.attributes.get("function", "copy") in ("copy", "identity", None)
    ]  # fmt: skip

    def moved(i: Instruction) -> Instruction:
        return change(i, engine=least, op="tensor_copy")

    seen = f"{len(copies)} copies on {ENGINE_NAMES[most]} while {ENGINE_NAMES[least]} idles"
    remedy = f"every second one on {ENGINE_NAMES[least]}"
    yield from _changed(timeline, copies[::2], moved, seen, remedy)


def _changed(
    timeline: Timeline,
    chosen: list[Instruction],
    change: Callable[[Instruction], Instruction],
    seen: str,
    remedy: str,
    *,
    at_most: bool = False,
) -> Iterator[Advice]:
    """Time the trace with the chosen instructions changed, if there are any."""
    if not chosen:
        return
    wanted = {instruction.index for instruction in chosen}
    instructions = [change(i) if i.index in wanted else i for i in timeline.trace.instructions]
    trace: Trace = dataclasses.replace(timeline.trace, instructions=instructions)
    lines = (i.line for i in chosen)
    again = time_trace(trace, timeline.target)
    yield _advice(timeline, again, seen, remedy, lines, at_most=at_most)


def _transfers(timeline: Timeline) -> Iterator[tuple[Instruction, DmaCost]]:
    works = Works(timeline.target)
    for transfer in timeline.transfers:
        instruction = timeline.trace.instructions[transfer.index]
        cost = (works.kinds.get(instruction.kind) or works.find(instruction)).dma
        assert cost is not None
        yield instruction, cost


def _advice(
    timeline: Timeline,
    again: Timeline,
    seen: str,
    remedy: str,
    lines: Iterable[int],
    *,
    at_most: bool = False,
) -> Advice:
    return Advice(
        seen=seen,
        remedy=remedy,
        gain_us=timeline.latency_us - again.latency_us,
        gain=timeline.latency_us / max(again.latency_us, 1e-3),
        error=band_of(timeline.busy_us).mean,
        at_most=at_most,
        lines=tuple(sorted(set(lines))),
    )


def _lines(lines: tuple[int, ...], shown: int = 4) -> str:
    text = ", ".join(map(str, lines[:shown])) + (", ..." if len(lines) > shown else "")
    return f"line {text}" if len(lines) == 1 else f"lines {text}"
