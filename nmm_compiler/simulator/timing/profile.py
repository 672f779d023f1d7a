"""Profile: the cost of a simulated run, in one record with the figures of AWS's profiler.

Made from a timeline, or straight from a trace. A profile is a plain record (JSON both ways); the
timeline behind it stays attached in memory for `to_chrome_trace`. Every figure is simulated.
The names that AWS's profiler (neuron-explorer) uses are given with each field.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from nmm_compiler.errors import SimulationError, impossible_profile
from nmm_compiler.records import Record
from nmm_compiler.report.parts import Grid, Line, Part, Section
from nmm_compiler.report.shown import Shown
from nmm_compiler.report.text import counted
from nmm_compiler.simulator.timing import causes
from nmm_compiler.simulator.timing.advice import Advice, advice_table, advise
from nmm_compiler.simulator.timing.chrome_trace import write_trace as write_trace
from nmm_compiler.simulator.timing.costs import US, tensor_dtype
from nmm_compiler.simulator.timing.evidence import ErrorBand, bands, kernel_class, unmodelled
from nmm_compiler.simulator.timing.regions import distinct_bytes
from nmm_compiler.simulator.timing.schedule import time_traces
from nmm_compiler.simulator.timing.timeline import Timeline
from nmm_compiler.simulator.trace import Access, Allocation, Instruction, Trace
from nmm_compiler.targets import Target

_ON_CHIP = frozenset({"tensor", "vector", "scalar"})  # engines that do not reach HBM


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Profile(Shown, Record):
    """Simulated cost of one kernel on one core, of two the one that takes longer.

    latency_us: the core window, first instruction to last result (total_time), without
        start_stop_us, which launching and ending a kernel adds on the device.
    engine_busy_us: per engine the time with at least one instruction in flight
        (tensor_engine_active_time, vector_engine_active_time, ..., dma_active_time).
    hbm_read_bytes, hbm_write_bytes: bytes that DMAs moved from and to HBM (same names), with two
        cores (lnc=2) those of both. So is minimal_hbm_bytes; every other figure is of one core.
    transpose_flops: of transposes on TensorE (transpose_flops).
    flops: of matrix products, 2 k m n each with k rows of both operands (each partition holds two
        of double rows, four of MX), k m n with an operand of ones and zeros, which only adds;
        transposes left out (model_flops).
    mfu: flops over latency at the bf16 peak, so that bf16 reaches at most 1, float32 0.25, fp8
        double rows 2, MX 4 (mfu_estimated_percent / 100); hfu counts transposes too
        (hfu_estimated_percent / 100).
    mbu: HBM bytes over latency at the core's share of HBM bandwidth, 0 to 1
        (mbu_estimated_percent / 100, which AWS takes of a whole HBM stack).
    compute_us: the products at TensorE's peak for their dtype; memory_us: minimal_hbm_bytes at
        the bandwidth a core can reach; roofline_us: the larger; bound says which.
    minimal_hbm_bytes: distinct bytes of inputs and outputs touched.
    sbuf_peak_bytes: per partition; psum_peak_banks: of 8. overflow: live bytes beyond the memory.
    transposes: counts by where they run ("dma", "tensor", "vector").
    instructions: counts by engine, then op.
    program_instructions: of them, those that the compiled program holds: all loops unrolled but the
        ones on the device, whose body counts once.
    unmodelled: effects in this run that the model does not include, one sentence each.

    Raises SimulationError for a latency that TensorE's peak, or the bandwidth of HBM, does
    not allow: neither mfu nor mbu can be above the limit of what was multiplied and moved.
    """

    target: str
    latency_us: float
    start_stop_us: float
    engine_busy_us: dict[str, float]
    hbm_read_bytes: int
    hbm_write_bytes: int
    flops: int
    transpose_flops: int
    mfu: float
    hfu: float
    mbu: float
    compute_us: float
    memory_us: float
    roofline_us: float
    bound: str
    minimal_hbm_bytes: int
    sbuf_peak_bytes: int
    psum_peak_banks: int
    sbuf_overflow_bytes: int
    transposes: dict[str, int]
    instructions: dict[str, dict[str, int]]
    program_instructions: int = 0
    unmodelled: tuple[str, ...] = ()
    _timeline: ClassVar[Timeline | None] = None  # of the instance that was made from one

    def __post_init__(self) -> None:
        limit_us = self.latency_us * (1 + 1e-9)  # sums of floats in two orders
        if self.compute_us > limit_us:
            raise impossible_profile("the products", self.compute_us, self.latency_us)
        if self.mbu > 1 + 1e-9:
            moving_us = self.mbu * self.latency_us
            raise impossible_profile("the HBM traffic", moving_us, self.latency_us)

    @property
    def device_us(self) -> float:
        """Latency and kernel start and stop: what a device-side benchmark would report."""
        return self.latency_us + self.start_stop_us

    @property
    def error_band(self) -> ErrorBand:
        """The errors of predictions for published kernels of this class that were held out."""
        return bands()[kernel_class(self.engine_busy_us)]

    @property
    def timeline(self) -> Timeline:
        """The timeline this profile was made from; SimulationError after a JSON round trip."""
        if self._timeline is None:
            raise SimulationError(
                "this Profile came from JSON and has no timeline; simulate the kernel again with "
                "mode='timing' to get one"
            )
        return self._timeline

    def to_chrome_trace(self, path: str | Path) -> Path:
        """Write the timeline as Chrome JSON (opens in ui.perfetto.dev); return the path."""
        return write_trace({"": self}, path)

    def by_line(self) -> tuple[causes.Share, ...]:
        """Return the source lines, the one with the largest part of the critical path first.

        Raises SimulationError, as do the methods below.
        """
        return causes.shares(self.timeline, lines=True)

    def by_instruction(self) -> tuple[causes.Share, ...]:
        """Return the kinds of instructions, the one with the largest part of the critical path
        first."""
        return causes.shares(self.timeline, lines=False)

    def critical_path(self) -> tuple[causes.Stretch, ...]:
        """Return the chain of steps, without gaps, that the latency consists of."""
        return tuple(causes.critical_path(self.timeline))

    def waits(self) -> dict[str, dict[str, float]]:
        """Return {engine: {cause: microseconds}} of the time in which an engine stood idle."""
        return causes.waits(self.timeline)

    def advice(self) -> tuple[Advice, ...]:
        """Return what could be changed, the largest gain first; times the trace again for each."""
        return advise(self.timeline)

    def summary(self) -> str:
        """Return one line: latency, roofline, utilization, bytes, memory, likely error."""
        share = self.roofline_us / self.latency_us if self.latency_us else 1.0
        return (
            f"{self.latency_us:.2f} us simulated on {self.target}, {share:.0%} of the "
            f"roofline ({self.roofline_us:.2f} us, {self.bound}), mfu {self.mfu:.1%}, "
            f"mbu {self.mbu:.1%}, "
            f"HBM {(self.hbm_read_bytes + self.hbm_write_bytes) / 1e6:.2f} MB, SBUF "
            f"{self.sbuf_peak_bytes:,} B per partition, "
            f"PSUM {counted(self.psum_peak_banks, 'bank')}; {self.error_band}"
        )

    def figures(self) -> Grid:
        """Return the figures as a table."""
        band = self.error_band
        rows = (
            ("latency", f"{self.latency_us:.2f} us", "first instruction to last result"),
            ("held-out error", f"{band.mean:.0%} mean", f"{band.worst:.0%} worst of {band.points} "
             f"published {band.kind} kernels"),
            ("on the device", f"{self.device_us:.2f} us", "with starting and stopping the kernel"),
            ("roofline", f"{self.roofline_us:.2f} us", f"{self.bound} bound: products "
             f"{self.compute_us:.2f} us, least HBM traffic {self.memory_us:.2f} us"),
            ("mfu", f"{self.mfu:.1%}", f"{self.flops:,} FLOPs at the bf16 peak"),
            ("mbu", f"{self.mbu:.1%}", f"{self.hbm_read_bytes:,} B read, "
             f"{self.hbm_write_bytes:,} B written; {self.minimal_hbm_bytes:,} B at least"),
            ("SBUF", f"{self.sbuf_peak_bytes:,} B", "per partition at the peak"),
            ("PSUM", f"{self.psum_peak_banks} of 8 banks", "at the peak"),
            ("instructions", f"{self.program_instructions:,}", "of the compiled program"),
        )  # fmt: skip
        return Grid.of(("figure", "value", "what"), rows, right=("value",))

    def overview(self) -> list[Part]:
        """Return the summary and, where the timeline is still there, why engines wait."""
        if self._timeline is None:
            return [Line(self.summary())]
        return [Line(self.summary()), causes.engine_table(self._timeline)]

    def parts(self, advice: Sequence[Advice] | None = None) -> list[Part]:
        """Return the figures, and where the time goes if the timeline is still there.

        advice: of `advice()`, which takes about ten times as long as the timing.
        """
        parts: list[Part] = [Line(self.summary(), "headline"), self.figures()]
        found = self._timeline
        if found is None:
            return parts
        parts.append(Section("engines", (causes.engine_table(found),)))
        if advice is not None:
            title = "what would save time (each change timed again)"
            parts.append(Section(title, (advice_table(advice),)))
        for title, lines in (("lines", True), ("instructions", False)):
            parts.append(Section(title, (causes.share_table(found, lines=lines),)))
        return [*parts, causes.time_drawing(found)]

    def page_parts(self, advice: Sequence[Advice] | None = None) -> list[Part]:
        """Return `parts`, the critical path and the source lines with their time."""
        parts, found = self.parts(advice), self._timeline
        if found is not None:
            parts.append(Section("critical path", (causes.path_table(found),)))
            parts.append(Section("source", tuple(causes.listings(found))))
        return parts

    def where(self) -> dict[str, object]:
        """Return lines, instructions, waits and critical path as plain JSON data."""
        return {
            "lines": [share.to_dict() for share in self.by_line()],
            "by_instruction": [share.to_dict() for share in self.by_instruction()],
            "waits": self.waits(),
            "critical_path": [dataclasses.asdict(step) for step in self.critical_path()],
        }

    def __repr__(self) -> str:
        return f"Profile({self.summary()})"


def profile_traces(
    traces: Sequence[Trace], target: Target, *, reorder: bool = True
) -> list[Profile]:
    """Time the programs of a grid, which wait for each other at barriers, and sum each up.

    Bytes of HBM are those of all programs.
    """
    made = [profile_timeline(t) for t in time_traces(traces, target, reorder=reorder)]
    for name in ("hbm_read_bytes", "hbm_write_bytes", "minimal_hbm_bytes"):
        total = sum(getattr(profile, name) for profile in made)
        for profile in made:
            object.__setattr__(profile, name, total)
    return made


def profile_timeline(timeline: Timeline) -> Profile:
    """Sum up a timeline; the timeline stays attached."""
    trace, target = timeline.trace, timeline.target
    instructions: dict[str, dict[str, int]] = {}
    transposes = {"dma": 0, "tensor": 0, "vector": 0}
    flops, transpose_flops, ideal_us, kinds = 0, 0, 0.0, timeline.kinds.values()
    read, written = 0, 0
    for kind in kinds:
        first, count = kind.first, kind.count
        ops = instructions.setdefault(first.engine, {})
        ops[first.op] = ops.get(first.op, 0) + count
        if kind.dma is not None:
            read += count * kind.dma.hbm_read_bytes
            written += count * kind.dma.hbm_write_bytes
        turns = first.attributes.get("transpose") or first.attributes.get("is_transpose")
        of_products = count * _flops(first) if first.engine == "tensor" else 0
        if turns:
            transposes[first.engine] += count
            transpose_flops += of_products
        elif of_products:
            flops += of_products
            wide = "float32" if tensor_dtype(first) == "float32" else "bfloat16"
            ideal_us += of_products / (_rows(first) * target.peak_flops_per_second(wide)) * US
    minimal = minimal_hbm_bytes(trace)
    memory_us = minimal / target.memory_bytes_per_second * US
    latency = timeline.latency_us
    peak = target.peak_flops_per_second()
    profile = Profile(
        target=target.name,
        latency_us=latency,
        start_stop_us=target.kernel_start_stop_seconds * US,
        engine_busy_us={k: v for k, v in timeline.busy_us.items() if k != "sync"},
        hbm_read_bytes=read,
        hbm_write_bytes=written,
        flops=flops,
        transpose_flops=transpose_flops,
        mfu=_share(flops * US, latency * peak),
        hfu=_share((flops + transpose_flops) * US, latency * peak),
        mbu=_share((read + written) * US, latency * target.hbm_bytes_per_second),
        compute_us=ideal_us,
        memory_us=memory_us,
        roofline_us=max(ideal_us, memory_us),
        bound="compute" if ideal_us >= memory_us else "memory",
        minimal_hbm_bytes=minimal,
        sbuf_peak_bytes=trace.sbuf_peak_bytes,
        psum_peak_banks=trace.psum_peak_banks,
        sbuf_overflow_bytes=timeline.sbuf_overflow_bytes,
        transposes=transposes,
        instructions=instructions,
        program_instructions=trace.program_instructions,
        unmodelled=unmodelled(timeline),
    )
    object.__setattr__(profile, "_timeline", timeline)  # not a field: JSON leaves it out
    return profile


def _flops(product: Instruction) -> int:
    """Return the operations of a product; one with an operand of ones and zeros only adds."""
    attributes = product.attributes
    k, m, n = (int(attributes[name]) for name in ("k", "m", "n"))
    return (1 if attributes.get("onezero") else 2) * _rows(product) * k * m * n


def minimal_hbm_bytes(trace: Trace) -> int:
    """Return the distinct bytes of kernel inputs and outputs that the trace touches.

    HBM that is written first and read later is scratch and does not count. The trace does not hold
    the addresses that an index chooses: each such access counts what it moves, and together they
    count at most the whole tensor.
    """
    touched: dict[int, list[tuple[Access, bool]]] = collections.defaultdict(list)
    for instruction in trace.instructions:
        if instruction.engine not in _ON_CHIP:
            for access in instruction.operands:
                if access.memory == "hbm":
                    touched[access.storage].append((access, access in instruction.reads))
    total = 0
    for storage, accesses in touched.items():
        tensor, reads = trace.allocations[storage], [read for _, read in accesses]
        if reads[0] < max(reads):
            continue
        moved, regions = 0, {}
        for access, _ in accesses:
            if _is_chosen(access, tensor):
                moved += access.elements_per_partition * access.item_bytes
            else:
                regions[access.byte_start, access.pattern] = access
        if regions:
            moved += distinct_bytes(regions.values())
        total += min(moved, tensor.bytes_per_partition)
    return total


def _is_chosen(access: Access, tensor: Allocation) -> bool:
    """Return whether an index chooses the address: then the bounds are those of the tensor."""
    bounds = access.byte_stop - access.byte_start
    if bounds < tensor.bytes_per_partition:
        return False
    return sum(abs(step) * (n - 1) for step, n in access.pattern) + access.item_bytes < bounds


def _rows(instruction: Instruction) -> int:
    """Return the rows of both operands that one partition holds: double rows 2, MX 4."""
    return {None: 1, "none": 1, "mx": 4}.get(instruction.attributes.get("perf_mode"), 2)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
