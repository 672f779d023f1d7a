"""Computes which changes make a kernel faster, and by how much.

Each advice is an experiment. The trace of the kernel is timed again with one change, for example
with products in bfloat16, and the difference of the two latencies is the gain. A change that no
kernel can make completely (rows or issuing without cost) gives an upper bound, and the advice says
"at most". An experiment runs only where the timeline shows what it changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
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
    found = [_timed_again(timeline, *rest) for shown, *rest in _experiments(timeline) if shown]
    worth = [a for a in found if a.gain_us > _SMALLEST_SHARE * timeline.latency_us]
    return tuple(sorted(worth, key=lambda advice: -advice.gain_us))


def _timed_again(
    timeline: Timeline,
    seen: str,
    remedy: str,
    about: Iterable[Instruction],
    at_most: bool,
    trace: Trace,
    fields: dict[str, Any],
) -> Advice:
    """Return what another trace, or a target with other numbers, would save."""
    again = time_trace(trace, dataclasses.replace(timeline.target, **fields))
    return Advice(
        seen=seen,
        remedy=remedy,
        gain_us=timeline.latency_us - again.latency_us,
        gain=timeline.latency_us / max(again.latency_us, 1e-3),
        error=bands()[kernel_class(timeline.busy_us)].mean,
        at_most=at_most,
        lines=tuple(sorted({instruction.line for instruction in about})),
    )


def _experiments(timeline: Timeline) -> tuple[tuple[Any, ...], ...]:
    """Return the experiments.

    Each: (whether the timeline shows what it changes, what is seen, the remedy, the instructions
    that it is about, whether its gain is an upper bound, the trace and the target's numbers that
    are timed instead).
    """
    trace, target, change = timeline.trace, timeline.target, dataclasses.replace
    path = {word for step in critical_path(timeline) for word in (step.what, step.why)}
    moving = [i for i in trace.instructions if i.engine == "dma"]
    runs = {i.index: dma_cost(target, i).run_bytes for i in moving}
    short = [
        i for i in moving
        if runs[i.index] < WIDE_ROW_BYTES // 2 and not i.attributes.get("transpose")
    ]  # fmt: skip
    sizes = sorted({runs[i.index] for i in short})
    turns = [trace.instructions[first] for first, *_ in trace.turns]
    in_fp32 = [
        i for i in trace.instructions
        if i.engine == "tensor" and any(a.dtype == "float32" for a in i.reads)
    ]  # fmt: skip
    turned = [i for i in trace.instructions if i.attributes.get("is_transpose")]
    by_dma = [i for i in trace.instructions if i.attributes.get("transpose")]
    most, least = sorted(("vector", "scalar"), key=lambda name: -timeline.busy_us[name])
    idles = timeline.busy_us[most] >= 2 * timeline.busy_us[least] and target.scalar_tensor_copy
    copies = [
        i for i in trace.instructions
        if idles and timeline.engine(i.index) == most and i.op in ("tensor_copy", "activation")
        and i.attributes.get("function", "copy") in ("copy", "identity", None)
    ]  # fmt: skip

    def in_bf16(i: Instruction) -> dict[str, Any]:
        reads = (change(a, dtype="bfloat16") if a.dtype == "float32" else a for a in i.reads)
        return {"reads": tuple(reads)}

    def instead(chosen: Sequence[Instruction], of: Callable[..., dict[str, Any]]) -> Trace:
        """Return the trace with some instructions changed, and hence of other kinds."""
        others = list(trace.instructions)
        for i in chosen:
            others[i.index] = change(i, kind=-i.kind, **of(i))
        return change(trace, instructions=others)

    return (
        (short, f"rows of {' to '.join(map(str, sizes[:1] + sizes[1:][-1:]))} B", "1 KiB rows",
         short, True, trace, _FREE_ISSUE | _FREE_ROWS),
        (path & {"issue", "queue"}, f"issuing {len(moving)} DMAs", "fewer, larger ones",
         moving, True, trace, _FREE_ISSUE),
        (turns, "turns of a loop on the device wait for each other",
         "a loop with more work in each turn", turns, True, change(trace, turns=[]), {}),
        ("memory" in path, "tiles wait for room in SBUF or PSUM", "half as large tiles",
         (), True, trace,
         {"sbuf_bytes_per_partition": 2 * target.sbuf_bytes_per_partition,
          "psum_banks": 2 * target.psum_banks}),
        (timeline.tensor_throttled_us, "TensorE starts at half its clock after each pause",
         "products without pauses", (), True, trace, {"tensor_ramp_seconds": 0.0}),
        (waits(timeline).get("scalar", {}).get("table"),
         f"ScalarE loads {len(timeline.held('table'))} activation tables",
         "each function used in one stretch", (), True, trace,
         {"activation_table_load_seconds": 0.0}),
        (in_fp32, "float32 products take four passes of TensorE", "bfloat16 operands",
         in_fp32, False, instead(in_fp32, in_bf16), {}),
        # a bound: nothing in their place takes no time at all
        (turned, f"{len(turned)} transposes on chip",
         "operands that already lie the other way around", turned, True,
         instead(turned, lambda i: {"engine": "sync", "op": "removed", "attributes": {}}), {}),
        (by_dma, f"{len(by_dma)} DMA transposes", "plain loads of an operand stored turned",
         by_dma, False,
         instead(by_dma, lambda i: {"attributes": {**i.attributes, "transpose": False}}), {}),
        (copies[::2],
         f"{len(copies)} copies on {ENGINE_NAMES[most]} while {ENGINE_NAMES[least]} idles",
         f"every second one on {ENGINE_NAMES[least]}", copies[::2], False,
         instead(copies[::2], lambda i: {"engine": least, "op": "tensor_copy"}), {}),
    )  # fmt: skip


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
