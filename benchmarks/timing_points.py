"""Predicted against measured: the timing model on kernels that others measured on hardware.

Every point is a public measurement; its kernel is written anew under benchmarks/kernels/ from the
published description, run through `simulate(mode="timing")`, and its prediction is printed with the
error. Nothing printed as predicted was measured by us. Run:

    python benchmarks/timing_points.py [--only TEXT] [--constants]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nmm_compiler import targets
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.simulator.timing.profile import Profile

KERNELS = Path(__file__).resolve().parent / "kernels"
MATMUL = KERNELS / "matmul_steps.py"
SCAN = KERNELS / "scan_steps.py"
STEPS = KERNELS / "elementwise_steps.py"

TUTORIAL = "kernel-optimization tutorial (aws-neuron-sdk)"
MAMBA = "fused_mamba tutorial (aws-neuron-sdk)"
SKILL = "profile-querying skill (neuron-agentic-development)"
COURSE = "CS149 assignment 4 write-ups"


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement: where it was published, the kernel, what was measured.

    measured: microseconds, or GB/s for a rate. more: further counters of the same run, compared
    but not counted. counted: False if the published kernel is known to differ from ours.
    """

    name: str
    source: str
    kernel: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    arguments: dict[str, int]
    target: str
    measured: float
    figure: Callable[[Profile], float] = lambda profile: profile.device_us
    unit: str = "us"
    more: tuple[tuple[str, Callable[[Profile], float], float], ...] = ()
    counted: bool = True
    remark: str = ""


def _busy(engine: str) -> Callable[[Profile], float]:
    return lambda profile: profile.engine_busy_us[engine]


def _dma_rate(profile: Profile) -> float:
    moved = profile.hbm_read_bytes + profile.hbm_write_bytes
    return moved / profile.engine_busy_us["dma"] / 1e3


def _moved_gb(profile: Profile) -> float:
    return (profile.hbm_read_bytes + profile.hbm_write_bytes) / 1e9


def _matmul(
    name: str,
    kernel: str,
    size: tuple[int, int, int],
    dtype: str,
    measured: float,
    source: str,
    arguments: dict[str, int] | None = None,
    **rest: object,
) -> Point:
    m, k, n = size
    return Point(name, source, f"{MATMUL}:{kernel}", ((k, m), (k, n)), dtype, arguments or {},
                 "trn2", measured, **rest)  # type: ignore[arg-type]  # fmt: skip


def _addition(elements: str, shape: tuple[int, int], tile: tuple[int, int], target: str,
              measured: float) -> Point:  # fmt: skip
    return Point(
        f"add {elements}, tiles {tile[0]}x{tile[1]}, {target}", COURSE, f"{STEPS}:add_tiles",
        (shape, shape), "float32", {"rows": tile[0], "columns": tile[1]}, target, measured,
    )  # fmt: skip


def _scan(name: str, kernel: str, channels: int, measured: float, vector_us: float) -> Point:
    rows, states = (channels, 512), (16, 512)
    shapes = (rows, rows, (channels, 16), states, states)
    return Point(
        f"{name} channels, trn1",
        MAMBA,
        f"{SCAN}:{kernel}",
        shapes,
        "float32",
        {},
        "trn1",
        measured,
        more=(("VectorE active us", _busy("vector"), vector_us),),
    )


LARGE, SMALL = (4096, 8192, 8192), (4096, 4096, 4096)
PACKETS: Callable[[Profile], float] = lambda profile: profile.dma_engine_busy_us  # noqa: E731

POINTS = (
    _matmul("matmul v2, both loads inside", "both_loaded_inside", LARGE, "float32", 39890.0,
            TUTORIAL, more=(("TensorE active us", _busy("tensor"), 34820.0),
                            ("DMA packet time us", PACKETS, 519580.0),
                            ("GB moved", _moved_gb, 10.87))),
    _matmul("matmul v3, left hoisted", "left_hoisted", LARGE, "float32", 28200.0, TUTORIAL,
            more=(("DMA packet time us", PACKETS, 402070.0), ("GB moved", _moved_gb, 8.86))),
    _matmul("matmul v4, blocked 2x2", "free_dimensions_blocked", LARGE, "float32", 28410.0,
            TUTORIAL, {"block_m": 2, "block_n": 2},
            more=(("GB moved", _moved_gb, 8.66),),
            remark="live tiles exceed SBUF: the compiler loaded again, we do not"),
    _matmul("matmul v5, blocked 16x2x8", "all_dimensions_blocked", LARGE, "float32", 28300.0,
            TUTORIAL, {"block_m": 16, "block_n": 2, "block_k": 8},
            more=(("TensorE active us", _busy("tensor"), 28160.0),
                  ("VectorE active us", _busy("vector"), 2990.0),
                  ("DMA packet time us", PACKETS, 81730.0), ("GB moved", _moved_gb, 1.82)),
            remark="live tiles exceed SBUF by 17 KiB per partition"),
    _matmul("bf16 matmul V1, blocked 8x2", "free_dimensions_blocked", SMALL, "bfloat16", 2451.0,
            SKILL, {"block_m": 8, "block_n": 2},
            more=(("TensorE active us", _busy("tensor"), 2163.0),
                  ("VectorE active us", _busy("vector"), 174.0),
                  ("DMA active us", _busy("dma"), 1325.0), ("GB moved", _moved_gb, 0.201))),
    _matmul("bf16 matmul V2, row loads", "rows_of_blocks", SMALL, "bfloat16", 1801.0, SKILL,
            {"block_m": 8, "block_n": 2},
            more=(("TensorE active us", _busy("tensor"), 1781.0),
                  ("VectorE active us", _busy("vector"), 172.0),
                  ("DMA active us", _busy("dma"), 819.0), ("GB moved", _moved_gb, 0.201))),
    _matmul("bf16 matmul V0, both loads inside", "both_loaded_inside", SMALL, "bfloat16", 8602.0,
            SKILL, more=(("TensorE active us", _busy("tensor"), 4806.0),
                         ("VectorE active us", _busy("vector"), 176.0),
                         ("GB moved", _moved_gb, 1.208)), counted=False,
            remark="the compiler dropped 5 of 8 identical loads of the left operand"),
    Point("DMA rate, rows of 1 KiB", SKILL, f"{STEPS}:copy_tiles", ((128, 8192),), "bfloat16",
          {"columns": 512}, "trn2", 259.0, _dma_rate, "GB/s",
          remark="without the 8 small transposes of the published kernel"),
    Point("DMA rate, rows of 4 KiB", SKILL, f"{STEPS}:copy_tiles", ((128, 32768),), "bfloat16",
          {"columns": 2048}, "trn2", 354.0, _dma_rate, "GB/s",
          remark="without the 8 small transposes of the published kernel"),
    _addition("25600", (25600, 1), (1, 1), "trn2", 37318.0),
    _addition("25600", (25600, 1), (1, 1), "trn1", 27404.0),
    _addition("25600", (25600, 1), (128, 1), "trn2", 378.0),
    _addition("25600", (25600, 1), (128, 1), "trn1", 206.0),
    _addition("25600", (12800, 2), (128, 2), "trn2", 186.0),
    _addition("25600", (128, 200), (128, 200), "trn2", 15.0),
    _addition("25600", (128, 200), (128, 200), "trn1", 19.0),
    _addition("256000", (128, 2000), (128, 2000), "trn2", 28.0),
    _addition("256000", (128, 2000), (128, 2000), "trn1", 34.0),
    _addition("256000", (256, 1000), (128, 1000), "trn2", 26.0),
    _addition("256000", (256, 1000), (128, 1000), "trn1", 29.0),
    _scan("scan, loads per state, 256", "operands_loaded_per_state", 256, 172.9, 149.0),
    _scan("scan, loads per state, 4096", "operands_loaded_per_state", 4096, 2340.0, 2120.0),
    _scan("scan, loads once, 4096", "operands_loaded_once", 4096, 1610.0, 1570.0),
    Point("transpose 1024x1024, 128x128 tiles", COURSE, f"{STEPS}:transpose_tiles", ((1024, 1024),),
          "float32", {}, "trn2", 86.0, remark="kernel text not published: tiles as described"),
)  # fmt: skip


def predict(point: Point) -> tuple[Profile, float]:
    """Return the simulated profile of a point and the processor seconds that simulating it took."""
    before = time.process_time()
    specs = [ArraySpec(shape, point.dtype) for shape in point.shapes]
    run = simulate(
        point.kernel, *specs, target=point.target, mode="timing", strict=False, **point.arguments
    )
    assert run.profile is not None
    return run.profile, time.process_time() - before


def constants() -> str:
    """Return the table of every target's constants, with kind and source, as Markdown."""
    lines = ["| constant | target | value | kind | source |", "| --- | --- | --- | --- | --- |"]
    for field in dataclasses.fields(targets.Target):
        for name in targets.names():
            target = targets.get(name)
            source = target.sources.get(field.name)
            if source is not None:
                value = getattr(target, field.name)
                shown = f"{value:g}" if isinstance(value, float) else str(value)
                lines.append(
                    f"| {field.name} | {name} | {shown} | {source.kind} | {source.where} |"
                )
    return "\n".join(lines)


def main() -> int:
    """Print the tables; return 1 if an error bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="points whose name contains this text")
    parser.add_argument("--constants", action="store_true", help="print the constants and stop")
    options = parser.parse_args()
    if options.constants:
        print(constants())
        return 0
    chosen = [point for point in POINTS if options.only in point.name]
    errors, further, instructions, seconds = [], [], 0, 0.0
    print("| point | published in | measured | predicted | error |  |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for point in chosen:
        profile, took = predict(point)
        instructions += sum(sum(ops.values()) for ops in profile.instructions.values())
        seconds += took
        value = point.figure(profile)
        error = value / point.measured - 1.0
        if point.counted:
            errors.append(error)
        remark = point.remark if point.counted else f"not counted: {point.remark}"
        print(
            f"| {point.name} | {point.source} | {point.measured:,.5g} {point.unit} | "
            f"{value:,.5g} {point.unit} | {error:+.1%} | {remark} |",
            flush=True,
        )
        further += [
            (point.name, what, figure(profile), found) for what, figure, found in point.more
        ]
    if further:
        print("\n| further counters of these runs | counter | measured | predicted | error |")
        print("| --- | --- | ---: | ---: | ---: |")
        for name, what, value, found in further:
            print(f"| {name} | {what} | {found:,.5g} | {value:,.5g} | {value / found - 1:+.1%} |")
    if not errors:
        return 0
    mean = sum(abs(error) for error in errors) / len(errors)
    worst = max(abs(error) for error in errors)
    print(f"\n{len(errors)} points: mean absolute error {mean:.1%}, largest {worst:.1%}")
    rate = instructions / seconds
    print(f"{instructions:,} instructions in {seconds:.1f} s of one core: {rate:,.0f} per second")
    return int(mean > 0.15 or worst > 0.30)


if __name__ == "__main__":
    sys.exit(main())
