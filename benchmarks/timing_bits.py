"""Shows that a change of the simulator leaves every predicted time as it was, to the last bit.

A change for speed must not move a time. This writes one digest for each run: of the start, end and
interval of every instruction, of every DMA, of the tables loaded and of the profile. Before the
change write them to a file, after it compare; a difference names the run and sets the exit code.
The runs: the published points, the kernels of `simulator.py` and one kernel of each family, the
latter on every target, reordered and in program order.

    python benchmarks/timing_bits.py --write before.json [--only TEXT]
    python benchmarks/timing_bits.py --compare before.json [--only TEXT]
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from nmm_compiler import targets
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels import FAMILIES as KNOWN
from nmm_compiler.simulator.run import ArraySpec, Simulation, simulate
from nmm_compiler.simulator.timing.timeline import Timeline

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import simulator as speed  # noqa: E402
import timing_texts  # noqa: E402

Run = tuple[str, Callable[[], Simulation]]
FAMILIES = {
    "lowrank": {"m": 384, "k": 640, "r": 200, "n": 1100},
    "gated_mlp": {"m": 3, "k": 512, "gate_r": 128, "up_r": 128, "down_r": 128, "n": 512},
    "attention": {"heads": 2, "kv_heads": 1, "m": 256, "context": 256, "d": 64},
}


def times(line: Timeline) -> Iterator[Any]:
    """Yield every time in a timeline; `repr` of a float has all of its bits."""
    yield from map(list, (line.start, line.end, line.interval_end, line.table_loads))
    for transfer in line.transfers:
        yield transfer.index, transfer.issue_start, transfer.issue_end, transfer.descriptors
        yield transfer.hbm_read_bytes, transfer.hbm_write_bytes, transfer.queue
        yield from map(list, transfer.parts)
    yield line.dma_engine_busy_us, line.tensor_throttled_us, line.latency_us
    trace, bank = line.trace, line.target.psum_bank_bytes_per_partition
    yield trace.sbuf_peak_bytes, trace.psum_peak_banks * bank, line.sbuf_overflow_bytes
    yield sorted(line.busy_us.items()), sorted(line.placed.items())


def of_run(run: Simulation) -> str:
    """Return the digest of a run: its times, its profile, and what each instruction was."""
    assert run.profile is not None
    found = hashlib.sha256(run.profile.to_json().encode())
    for part in times(run.profile.timeline):
        found.update(repr(part).encode())
    for i in run.trace.instructions:
        found.update(f"{i.op} {i.engine} {i.line} {i.name} {i.attributes}".encode())
        for a in (*i.reads, *i.writes):
            found.update(
                f"{a.storage} {a.memory} {a.partition_start} {a.partition_stop} {a.byte_start} "
                f"{a.byte_stop} {a.pattern} {a.dtype} {a.item_bytes}\n".encode()
            )
    return found.hexdigest()


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


def main(write: Path | None = None, compare: Path | None = None, only: str = "") -> None:
    """Write the digests of runs whose name contains ONLY to a file, or compare them with it."""
    if (write is None) == (compare is None):
        raise typer.BadParameter("pass --write FILE or --compare FILE")
    known = json.loads(compare.read_text()) if compare else {}
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, run in runs(Path(folder)):
            if only in name:
                found[name] = of_run(run())
                if compare and known.get(name) != found[name]:
                    print(f"differs: {name}", flush=True)
                if write:  # after each, so that an end before time keeps what is there
                    write.write_text(json.dumps(found, indent=1) + "\n")
    differ = sum(known.get(name) != digest for name, digest in found.items()) if compare else 0
    print(f"{len(found)} runs" + (f", {differ} differ" if compare else ""))
    sys.exit(differ > 0)


if __name__ == "__main__":
    typer.run(main)
