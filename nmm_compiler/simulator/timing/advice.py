"""Computes which changes make a kernel faster, and by how much.

Each advice is an experiment. The trace of the kernel is timed again with one change, for example
with products in bfloat16, and the difference of the two latencies is the gain. A change that no
kernel can make completely (rows or issuing without cost) gives an upper bound, and the advice says
"at most". An experiment runs only where the timeline shows what it changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nmm_compiler.records import Record
from nmm_compiler.report.headline import not_told
from nmm_compiler.report.parts import Grid, Line, Part
from nmm_compiler.simulator.timing.causes import critical_path, waits
from nmm_compiler.simulator.timing.costs import ENGINE_NAMES, dma_cost
from nmm_compiler.simulator.timing.evidence import bands, kernel_class
from nmm_compiler.simulator.timing.schedule import time_trace
from nmm_compiler.simulator.timing.timeline import Timeline
from nmm_compiler.simulator.trace import Instruction, Trace

WIDE_ROW_BYTES = 1024
_FREE_ISSUE: dict[str, Any] = dict.fromkeys(
    ("dma_issue_seconds", "dma_issue_descriptor_seconds", "dma_static_issue_seconds",
     "dma_hardware_issue_seconds"),
    0.0,
)  # fmt: skip
_FREE_ROWS: dict[str, Any] = dict.fromkeys(
    ("dma_descriptor_seconds", "dma_descriptor_min_seconds", "dma_short_row_seconds"), 0.0
)
_TURNED_OPERANDS = "operands that already lie the other way around"
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

    @property
    def unsure(self) -> str:
        """The words before a gain within its error; "" for any other."""
        return not_told(self.gain, self.error, "none")


def advise(timeline: Timeline) -> tuple[Advice, ...]:
    """Return what could be changed, the largest gain first. Times the trace once per experiment."""
    found = [*_without_costs(timeline), *_other_instructions(timeline)]
    worth = [a for a in found if a.gain_us > _SMALLEST_SHARE * timeline.latency_us]
    return tuple(sorted(worth, key=lambda advice: -advice.gain_us))


def _timed_again(
    timeline: Timeline,
    seen: str,
    remedy: str,
    lines: Iterable[int] = (),
    *,
    at_most: bool = False,
    trace: Trace | None = None,
    **fields: Any,
) -> Advice:
    """Return what another trace, or a target with other numbers, would save."""
    again = time_trace(trace or timeline.trace, dataclasses.replace(timeline.target, **fields))
    return Advice(
        seen=seen,
        remedy=remedy,
        gain_us=timeline.latency_us - again.latency_us,
        gain=timeline.latency_us / max(again.latency_us, 1e-3),
        error=bands()[kernel_class(timeline.busy_us)].mean,
        at_most=at_most,
        lines=tuple(sorted(set(lines))),
    )


def _without_costs(timeline: Timeline) -> Iterator[Advice]:
    """Yield bounds of what a change could save that no kernel can make completely.

    Each: (whether the timeline shows it, what is seen, the remedy, lines, what is timed instead).
    """
    trace, target = timeline.trace, timeline.target
    moving = [trace.instructions[held.index] for held in timeline.held("queue")]
    short: dict[int, int] = {}
    for instruction in moving:
        line, run = instruction.line, dma_cost(target, instruction).run_bytes
        if run < WIDE_ROW_BYTES // 2 and not instruction.attributes.get("transpose"):
            short[line] = min(short.get(line, run), run)
    sizes = " to ".join(map(str, sorted({f(short.values(), default=0) for f in (min, max)})))
    path = {word for step in critical_path(timeline) for word in (step.what, step.why)}
    edges = [at for at in trace.loop_edges if at < len(trace.instructions)]
    bounds: tuple[tuple[Any, str, str, Iterable[int], dict[str, Any]], ...] = (
        (short, f"rows of {sizes} B", "1 KiB rows", short, _FREE_ISSUE | _FREE_ROWS),
        (path & {"issue", "queue"}, f"issuing {len(moving)} DMAs",
         "fewer, larger ones", [instruction.line for instruction in moving], _FREE_ISSUE),
        (trace.loop_edges, "turns of a loop on the device wait for each other",
         "a loop with more work in each turn", [trace.instructions[at].line for at in edges],
         {"trace": dataclasses.replace(trace, loop_edges=[])}),
        ("memory" in path, "tiles wait for room in SBUF or PSUM",
         "half as large tiles", (),
         {"sbuf_bytes_per_partition": 2 * target.sbuf_bytes_per_partition,
          "psum_banks": 2 * target.psum_banks}),
        (timeline.tensor_throttled_us, "TensorE starts at half its clock after each pause",
         "products without pauses", (), {"tensor_ramp_seconds": 0.0}),
        (waits(timeline).get("scalar", {}).get("table"),
         f"ScalarE loads {len(timeline.held('table'))} activation tables",
         "each function used in one stretch", (), {"activation_table_load_seconds": 0.0}),
    )  # fmt: skip
    for matters, seen, remedy, lines, changed in bounds:
        if matters:
            yield _timed_again(timeline, seen, remedy, lines, at_most=True, **changed)


def _other_instructions(timeline: Timeline) -> Iterator[Advice]:
    """Yield what other instructions in the place of some would save.

    Each experiment: (what is seen, the remedy, the instructions, what replaces one of them).
    """
    change, instructions = dataclasses.replace, timeline.trace.instructions
    wide = [
        i for i in instructions
        if i.engine == "tensor" and any(a.dtype == "float32" for a in i.reads)
    ]  # fmt: skip
    turned = [i for i in instructions if i.attributes.get("is_transpose")]
    by_dma = [i for i in instructions if i.attributes.get("transpose")]
    busy = timeline.busy_us
    most, least = sorted(("vector", "scalar"), key=lambda name: -busy[name])
    idles = busy[most] >= 2 * busy[least] and timeline.target.scalar_tensor_copy
    copies = [
        i for index, i in enumerate(instructions)
        if idles and timeline.engine(index) == most and i.op in ("tensor_copy", "activation")
        and i.attributes.get("function", "copy") in ("copy", "identity", None)
    ]  # fmt: skip

    def as_bf16(i: Instruction) -> Instruction:
        reads = [change(a, dtype="bfloat16") if a.dtype == "float32" else a for a in i.reads]
        return change(i, reads=tuple(reads))

    experiments: tuple[tuple[str, str, list[Instruction], Callable[..., Instruction]], ...] = (
        ("float32 products take four passes of TensorE", "bfloat16 operands", wide, as_bf16),
        (f"{len(turned)} transposes on chip", _TURNED_OPERANDS, turned,
         lambda i: change(i, engine="sync", op="removed", attributes={})),
        (f"{len(by_dma)} DMA transposes", "plain loads of an operand stored turned", by_dma,
         lambda i: change(i, attributes={**i.attributes, "transpose": False})),
        (f"{len(copies)} copies on {ENGINE_NAMES[most]} while {ENGINE_NAMES[least]} idles",
         f"every second one on {ENGINE_NAMES[least]}", copies[::2],
         lambda i: change(i, engine=least, op="tensor_copy")),
    )  # fmt: skip
    for seen, remedy, chosen, replaced in experiments:
        if chosen:
            wanted = {i.index for i in chosen}
            others = [replaced(i) if i.index in wanted else i for i in instructions]
            trace: Trace = change(timeline.trace, instructions=others)
            at_most = remedy is _TURNED_OPERANDS  # nothing else takes no time at all
            lines = (i.line for i in chosen)
            yield _timed_again(timeline, seen, remedy, lines, at_most=at_most, trace=trace)


def advice_table(advice: Sequence[Advice]) -> Part:
    """Return the advice, the largest gain first."""
    if not advice:
        return Line("none of the changes that were tried saves half a percent", "note")
    rows = []
    for a in advice:  # the first three lines, and that there are more
        lines = ", ".join(map(str, a.lines[:3])) + (", ..." if len(a.lines) > 3 else "")
        gain = f"{'<=' if a.at_most else '~'} {a.gain_us:.2f}"
        rows.append((gain, lines or "-", f"{a.unsure}{a.seen}: {a.remedy}"))
    return Grid.of(("saves us", "lines", "what"), rows, right=("saves us",))
