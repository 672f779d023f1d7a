"""Profile: what a simulated run cost, in one record with the figures of AWS's profiler.

Made from a timeline, or straight from a trace. A profile is a plain record (JSON both ways); the
timeline behind it stays attached in memory for `to_chrome_trace`. Every figure is simulated.
The names that AWS's profiler (neuron-explorer) uses are given with each field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from nmm_compiler.errors import ImpossibleProfileError, TimelineMissingError
from nmm_compiler.records import Record
from nmm_compiler.simulator.timing.chrome_trace import write_chrome_trace, write_chrome_traces
from nmm_compiler.simulator.timing.costs import tensor_dtype
from nmm_compiler.simulator.timing.timeline import Timeline, collector_held_off, time_trace
from nmm_compiler.simulator.trace import Access, Instruction, Trace
from nmm_compiler.targets import Target

_US = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile(Record):
    """Simulated cost of one kernel on one core.

    latency_us: the core window, first instruction to last result (total_time), without
        start_stop_us, which launching and ending a kernel adds on the device.
    engine_busy_us: per engine the time with at least one instruction in flight
        (tensor_engine_active_time, vector_engine_active_time, ..., dma_active_time).
    dma_engine_busy_us: transfer time summed over the 16 DMA engines.
    hbm_read_bytes, hbm_write_bytes: bytes that DMAs moved from and to HBM (same names).
    flops: of matrix products, 2 k m n each with k rows of both operands (each partition holds two
        of double rows, four of MX), k m n with an operand of ones and zeros, which only adds;
        transposes left out (model_flops).
    transpose_flops: of transposes on TensorE (transpose_flops).
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
    instructions: counts by engine, then op, as written; repeated_instructions of them have the
        result of an earlier one, and the compiler is taken to drop them.
    program_instructions: of them, those that the compiled program holds: all loops unrolled but the
        ones on the device, whose body counts once.
    throttled_us: what TensorE's clock ramp cost (throttle_active_time, lost part).

    Raises ImpossibleProfileError for a latency that TensorE's peak, or the bandwidth of HBM, does
    not allow: neither mfu nor mbu can be above the limit of what was multiplied and moved.
    """

    target: str
    latency_us: float
    start_stop_us: float
    engine_busy_us: dict[str, float]
    dma_engine_busy_us: float
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
    throttled_us: float
    transposes: dict[str, int]
    instructions: dict[str, dict[str, int]]
    repeated_instructions: int = 0
    program_instructions: int = 0

    def __post_init__(self) -> None:
        limit_us = self.latency_us * (1 + 1e-9)  # sums of floats in two orders
        if self.compute_us > limit_us:
            raise ImpossibleProfileError("the products", self.compute_us, self.latency_us)
        if self.mbu > 1 + 1e-9:
            moving_us = self.mbu * self.latency_us
            raise ImpossibleProfileError("the HBM traffic", moving_us, self.latency_us)

    @property
    def device_us(self) -> float:
        """Latency and kernel start and stop: what a device-side benchmark would report."""
        return self.latency_us + self.start_stop_us

    @property
    def timeline(self) -> Timeline:
        """The timeline this profile was made from; TimelineMissingError after a JSON round trip."""
        found = self.__dict__.get("_timeline")
        if not isinstance(found, Timeline):
            raise TimelineMissingError()
        return found

    def to_chrome_trace(self, path: str | Path) -> Path:
        """Write the timeline as Chrome JSON (opens in ui.perfetto.dev); return the path."""
        return write_chrome_trace(self.timeline, path)

    def __str__(self) -> str:
        busy = " ".join(f"{name} {us:.1f}" for name, us in self.engine_busy_us.items() if us)
        return (
            f"Profile({self.target} simulated: {self.latency_us:.2f} us, roofline "
            f"{self.roofline_us:.2f} us {self.bound}, mfu {self.mfu:.1%}, mbu {self.mbu:.1%}, "
            f"busy us: {busy}, hbm {self.hbm_read_bytes + self.hbm_write_bytes} B, sbuf "
            f"{self.sbuf_peak_bytes} B/partition, psum {self.psum_peak_banks} banks)"
        )


def profile_trace(trace: Trace, target: Target) -> Profile:
    """Time `trace` on `target` and sum it up."""
    with collector_held_off():
        return profile_timeline(time_trace(trace, target))


def profile_timeline(timeline: Timeline) -> Profile:
    """Sum up a timeline; the timeline stays attached."""
    trace, target = timeline.trace, timeline.target
    instructions: dict[str, dict[str, int]] = {}
    transposes = {"dma": 0, "tensor": 0, "vector": 0}
    flops = transpose_flops = 0
    ideal_us = 0.0
    for instruction in trace.instructions:
        ops = instructions.setdefault(instruction.engine, {})
        ops[instruction.op] = ops.get(instruction.op, 0) + 1
        where = _transposes_on(instruction)
        if where:
            transposes[where] += 1
        if instruction.engine == "tensor":
            work = _matmul_flops(instruction)
            if where:
                transpose_flops += work
            else:
                flops += work
                ideal_us += work / _peak(target, instruction) * _US
    read = sum(transfer.hbm_read_bytes for transfer in timeline.transfers)
    written = sum(transfer.hbm_write_bytes for transfer in timeline.transfers)
    minimal = minimal_hbm_bytes(trace)
    memory_us = minimal / target.memory_bytes_per_second * _US
    latency = timeline.latency_us
    peak = target.peak_flops_per_second()
    bank = target.psum_bank_bytes_per_partition
    profile = Profile(
        target=target.name,
        latency_us=latency,
        start_stop_us=target.kernel_start_stop_seconds * _US,
        engine_busy_us={k: v for k, v in timeline.busy_us.items() if k != "sync"},
        dma_engine_busy_us=timeline.dma_engine_busy_us,
        hbm_read_bytes=read,
        hbm_write_bytes=written,
        flops=flops,
        transpose_flops=transpose_flops,
        mfu=_share(flops * _US, latency * peak),
        hfu=_share((flops + transpose_flops) * _US, latency * peak),
        mbu=_share((read + written) * _US, latency * target.hbm_bytes_per_second),
        compute_us=ideal_us,
        memory_us=memory_us,
        roofline_us=max(ideal_us, memory_us),
        bound="compute" if ideal_us >= memory_us else "memory",
        minimal_hbm_bytes=minimal,
        sbuf_peak_bytes=timeline.sbuf_peak_bytes,
        psum_peak_banks=-(-timeline.psum_peak_bytes // bank),
        sbuf_overflow_bytes=timeline.sbuf_overflow_bytes,
        throttled_us=timeline.tensor_throttled_us,
        transposes=transposes,
        instructions=instructions,
        repeated_instructions=len(timeline.repeated),
        program_instructions=trace.program_instructions,
    )
    object.__setattr__(profile, "_timeline", timeline)  # not a field: JSON leaves it out
    return profile


def minimal_hbm_bytes(trace: Trace) -> int:
    """Return the distinct bytes of kernel inputs and outputs that the trace touches.

    HBM that is written first and read later is scratch and does not count.
    """
    regions: dict[int, dict[tuple[object, ...], int]] = {}
    written_first: set[int] = set()
    scratch: set[int] = set()
    for instruction in trace.instructions:
        for access in instruction.reads:
            if access.memory == "hbm":
                if access.storage in written_first:
                    scratch.add(access.storage)
                _note(regions, access)
        for access in instruction.writes:
            if access.memory == "hbm":
                if access.storage not in regions:
                    written_first.add(access.storage)
                _note(regions, access)
    total = 0
    for storage, touched in regions.items():
        if storage in scratch:
            continue
        size = sum(touched.values())
        allocation = trace.allocations.get(storage)
        total += min(size, allocation.bytes_per_partition) if allocation else size
    return total


def _note(regions: dict[int, dict[tuple[object, ...], int]], access: Access) -> None:
    bytes_ = access.elements_per_partition * access.item_bytes
    regions.setdefault(access.storage, {})[(access.byte_start, access.pattern)] = bytes_


def _transposes_on(instruction: Instruction) -> str:
    """Return "dma", "tensor" or "vector" for a transpose, else an empty string."""
    if instruction.engine == "dma":
        turned = instruction.op == "dma_transpose" or instruction.attributes.get("transpose")
        return "dma" if turned else ""
    if instruction.op == "nc_transpose" or instruction.attributes.get("is_transpose"):
        return instruction.engine if instruction.engine in ("tensor", "vector") else ""
    return ""


def _rows(instruction: Instruction) -> int:
    """Return the rows of both operands that one partition holds: double rows 2, MX 4."""
    return {None: 1, "none": 1, "mx": 4}.get(instruction.attributes.get("perf_mode"), 2)


def _matmul_flops(instruction: Instruction) -> int:
    attributes = instruction.attributes
    if instruction.op == "nc_transpose" and "k" not in attributes:
        access = instruction.reads[0]
        return 2 * access.partitions * access.partitions * access.elements_per_partition
    each = 1 if attributes.get("onezero") else 2
    k, m, n = (int(attributes[name]) for name in ("k", "m", "n"))
    return each * _rows(instruction) * k * m * n


def _peak(target: Target, instruction: Instruction) -> float:
    """Return the peak that this product's dtype and mode could reach."""
    if tensor_dtype(instruction) == "float32":
        return target.peak_flops_per_second("float32")
    return _rows(instruction) * target.peak_flops_per_second()


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def write_trace(profiles: Mapping[str, Profile], path: str | Path) -> Path:
    """Write the timelines of `profiles` to `path`, one below the other; return the path.

    The keys name them: the cores of a grid, or rival schedules. Raises TimelineMissingError for a
    profile that came from JSON, OutputError if the file cannot be written.
    """
    return write_chrome_traces({name: p.timeline for name, p in profiles.items()}, path)
