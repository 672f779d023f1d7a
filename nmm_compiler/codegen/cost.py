"""Closed-form time of a schedule, from the counts that its family gives (`kernels.base.Work`).

    total = start of the first bytes + max(TensorE, eviction, DMA) + work that can only follow

It ranks candidates before the best few are run in the simulator's timing mode; it is not a timing
model of its own and every constant comes from the target.
"""

from __future__ import annotations

from nmm_compiler.kernels.work import Work
from nmm_compiler.targets import Target

_US = 1e6


def tensor_us(
    matmuls: tuple[tuple[int, int], ...], dtype: str, target: Target, least_seconds: float = 0.0
) -> float:
    """Return TensorE microseconds of (count, moving columns) passes.

    least_seconds: what a pass takes at least.
    """
    seconds = 0.0
    for count, columns in matmuls:
        cycles = max(columns, target.tensor_min_interval_cycles)
        if dtype == "float32":
            each = cycles * target.fp32_pass_factor + target.tensor_fp32_overhead_cycles
        else:
            each = float(cycles + target.tensor_interval_overhead_cycles)
        seconds += count * max(each / target.tensor_clock_hz, least_seconds)
    return seconds * _US


def eviction_us(evictions: tuple[tuple[int, int], ...], target: Target) -> float:
    """Return microseconds of PSUM reads, shared evenly between VectorE and ScalarE."""
    cycles = sum(
        count * (columns + target.engine_streaming_overhead_cycles) for count, columns in evictions
    )
    rate = target.vector_clock_hz + target.scalar_clock_hz
    if target.vector_scalar_share_psum:
        rate = min(target.vector_clock_hz, target.scalar_clock_hz)
    return cycles / rate * _US


def dma_us(dmas: tuple[tuple[int, int, int, str], ...], target: Target) -> float:
    """Return microseconds of (count, bytes, contiguous bytes, kind) transfers, issue included."""
    rate = min(
        target.dma_bytes_per_second_per_engine, target.hbm_bytes_per_second / target.dma_engines
    )
    moved = issued = 0.0
    for count, size, run, kind in dmas:
        run = max(1, min(run, size))
        runs = size / run
        if kind == "transpose":
            moved += count * size / (rate * target.dma_transpose_fraction * target.dma_engines)
            runs = 128
        else:
            each = max(
                target.dma_descriptor_min_seconds, target.dma_descriptor_seconds + run / rate
            )
            moved += count * runs * each / target.dma_engines
        issue = target.dma_issue_seconds + runs * target.dma_issue_descriptor_seconds
        if not target.dma_generates_descriptors:
            issue = target.dma_static_issue_seconds
        issued += count * issue
    return max(moved, issued) * _US


def closed_form_us(work: Work, dtype: str, target: Target) -> float:
    """Return the predicted latency of a schedule in microseconds."""
    wide = tensor_us(work.wide_matmuls, "float32", target)
    chained = tensor_us(work.chained_matmuls, dtype, target, target.tensor_latency_seconds)
    tensor = tensor_us(work.matmuls, dtype, target) + chained + wide
    dma = dma_us(work.dmas, target)
    start = (target.dma_start_latency_seconds + target.semaphore_seconds) * _US
    lead = work.lead_bytes / target.memory_bytes_per_second * _US
    tail = tensor_us((work.tail_matmuls,), dtype, target)
    store = start + work.tail_bytes / target.memory_bytes_per_second * _US
    early = work.early_bytes / target.memory_bytes_per_second * _US
    late = early + tensor_us(work.late_matmuls, dtype, target) + chained + wide
    busy = max(tensor + lead, dma + tail, late, eviction_us(work.evictions, target) + lead)
    return start + busy + store
