"""Shows that a change of the simulator leaves every predicted time as it was, to the last bit.

A change for speed must not move a time. This writes one digest for each run: of the start, end and
interval of every instruction, of every DMA, of the tables loaded and of the profile. Before the
change it writes them to a file, after it compares: runs that the file has are compared, the others
are added. A difference names the run and sets the exit code.
The runs: the published points, the kernels of `simulator.py` and one kernel of each family, the
latter on every target, reordered and in program order.

    python benchmarks/timing_bits.py FILE [--only TEXT]
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import simulator as speed
import timing_texts
import typer
from row_file import RowFile

from nmm_compiler import targets
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels import FAMILIES as KNOWN
from nmm_compiler.simulator.run import ArraySpec, Simulation, simulate

Run = tuple[str, Callable[[], Simulation]]
FAMILIES = {
    "lowrank": {"m": 384, "k": 640, "r": 200, "n": 1100},
    "gated_mlp": {"m": 3, "k": 512, "gate_r": 128, "up_r": 128, "down_r": 128, "n": 512},
    "attention": {"heads": 2, "kv_heads": 1, "m": 256, "context": 256, "d": 64},
}


def of_run(run: Simulation) -> str:
    """Return the digest of a run: its times, its profile, and what each instruction was."""
    line, trace = run.profile.timeline, run.trace
    parts = [
        run.profile.to_json(), line.end,
        [[(held.kind, held.row, held.start, held.stop) for held in each] for each in line.bookings],
        sorted(line.busy_us.items()),
        [line.engine(i) for i in range(len(line.end))], line.dma_engine_busy_us,
        line.tensor_throttled_us, line.latency_us, line.sbuf_overflow_bytes,
        trace.sbuf_peak_bytes, trace.psum_peak_banks,
        [(i.op, i.engine, i.line, i.name, i.attributes, i.reads, i.writes)
         for i in trace.instructions],
    ]  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()  # repr of a float has all bits


def runs(folder: Path) -> Iterator[Run]:
    """Yield (name, function) of every run."""
    for name, text, _, small, _ in speed.KERNELS:
        path = folder / f"{name.replace(' ', '_')}.py"
        path.write_text(text)
        specs = [ArraySpec(shape, "bfloat16") for shape in small]
        yield from _everywhere(name, lambda p=path: p, specs)
    for family, sizes in FAMILIES.items():
        spec = KNOWN[family].spec_class(**sizes)
        specs = [ArraySpec(operand.shape, operand.dtype) for operand in spec.inputs()]
        yield from _everywhere(family, lambda s=spec: build_kernel(s, target="trn2"), specs)
    for point in timing_texts.points():
        yield f"point {point.name}", lambda p=point: timing_texts.simulated(p)


def _everywhere(name: str, kernel: Callable[[], Any], specs: list[ArraySpec]) -> Iterator[Run]:
    for target in targets.names():
        for reorder in (True, False):
            yield (
                f"{name}, {target}{'' if reorder else ', in program order'}",
                lambda t=target, r=reorder: simulate(
                    kernel(), *specs, target=t, mode="timing", strict=False, reorder=r
                ),
            )


def main(file: Path, only: str = "") -> None:
    """Compare the digests of runs whose name contains ONLY with those in FILE; add new ones."""
    known, count, differ = RowFile(file, "name"), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for name, run in runs(Path(folder)):
            if only not in name:
                continue
            count, row = count + 1, {"name": name, "digest": of_run(run())}
            if (name,) not in known.rows:
                known.add(row)
            elif known.rows[name,] != row:
                differ += 1
                print(f"differs: {name}", flush=True)
    print(f"{count} runs, {differ} differ")
    sys.exit(differ > 0)


if __name__ == "__main__":
    typer.run(main)
