"""Closed-form time of a schedule, from the counts that its family gives (`kernels.base.Work`).

    total = start of the first bytes + max(TensorE, eviction, DMA) + work that can only follow

It ranks candidates before the best few are run in the simulator's timing mode, and that of the best
is the price of source "closed_form"; every constant comes from the target.
"""

from __future__ import annotations

from collections.abc import Iterable

from nmm_compiler.kernels.work import Passes, Work
from nmm_compiler.targets import Target

_US = 1e6


def tensor_us(matmuls: Iterable[Passes], dtype: str, target: Target) -> float:
    """Return TensorE microseconds of (count, moving columns) passes."""
    seconds = 0.0
    for count, columns in matmuls:
        cycles = max(columns, target.tensor_min_interval_cycles)
        if dtype == "float32":
            cycles = max(cycles, target.tensor_fp32_min_columns)
            each = cycles * target.fp32_pass_factor + target.tensor_fp32_overhead_cycles
        else:
            each = float(cycles + target.tensor_interval_overhead_cycles)
        seconds += count * each / target.tensor_clock_hz
    return seconds * _US


def eviction_us(evictions: Iterable[Passes], target: Target) -> float:
    """Return microseconds of PSUM reads, shared evenly between VectorE and ScalarE."""
    cycles = sum(
        count * (columns + target.engine_streaming_overhead_cycles) for count, columns in evictions
    )
    rate = target.vector_clock_hz + target.scalar_clock_hz
    if target.vector_scalar_share_psum:
        rate = min(target.vector_clock_hz, target.scalar_clock_hz)
    return cycles / rate * _US


def dma_us(dmas: Iterable[tuple[int, int, int, str]], target: Target) -> float:
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
                target.dma_short_row_seconds
                if run < target.dma_short_row_bytes and kind != "hardware"
                else target.dma_descriptor_min_seconds,
                target.dma_descriptor_seconds + run / rate,
            )
            moved += count * runs * each / target.dma_engines
        issue = target.dma_issue_seconds + runs * target.dma_issue_descriptor_seconds
        if not target.dma_generates_descriptors:
            issue = target.dma_static_issue_seconds
        issued += count * issue
    return max(moved, issued) * _US


def closed_form_us(work: Work, dtype: str, target: Target) -> float:
    """Return the predicted latency of a schedule in microseconds."""
    rate, isolated = target.memory_bytes_per_second, target.engine_isolated_overhead_cycles
    count, columns = work.lead_passes
    lead = work.lead_bytes / rate + count * (columns + isolated) / target.vector_clock_hz
    tensor = tensor_us(work.matmuls, dtype, target)
    read = eviction_us(work.evictions, target)
    moved = dma_us(work.dmas, target) + tensor_us((work.tail_matmuls,), dtype, target)
    busy = max(max(tensor, read) + lead * _US, moved)
    # what an engine waits for: the last pass of the one before, its way out of PSUM, its signal
    hop = isolated / target.vector_clock_hz + target.tensor_latency_seconds
    hop += target.semaphore_seconds
    start = target.dma_start_latency_seconds + target.semaphore_seconds
    return busy + (2 * start + work.tail_bytes / rate + work.hops * hop) * _US
