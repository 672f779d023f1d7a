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

import argparse
import hashlib
import json
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from nmm_compiler import targets
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels import FAMILIES as KNOWN
from nmm_compiler.simulator.run import ArraySpec, Simulation, simulate
from nmm_compiler.simulator.timing.timeline import Timeline

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import simulator as speed  # noqa: E402
import timing_points  # noqa: E402

Run = tuple[str, Callable[[], Simulation]]
FAMILIES = {
    "lowrank": {"m": 384, "k": 640, "r": 200, "n": 1100},
    "gated_mlp": {"m": 3, "k": 512, "gate_r": 128, "up_r": 128, "down_r": 128, "n": 512},
    "attention": {"heads": 2, "kv_heads": 1, "m": 256, "context": 256, "d": 64},
}


def digest(line: Timeline) -> str:
    """Return a digest of every time in a timeline."""
    found = hashlib.sha256()

    def add(times: Iterable[float]) -> None:
        values = list(times)
        found.update(struct.pack(f"<q{len(values)}d", len(values), *values))

    for times in (line.start, line.end, line.interval_end):
        add(times)
    for transfer in line.transfers:
        add((transfer.index, transfer.issue_start, transfer.issue_end, transfer.descriptors))
        add((transfer.hbm_read_bytes, transfer.hbm_write_bytes))
        add(number for part in transfer.parts for number in part)
        found.update(transfer.queue.encode())
    add(number for load in line.table_loads for number in load)
    add((line.dma_engine_busy_us, line.tensor_throttled_us, line.latency_us))
    trace, bank = line.trace, line.target.psum_bank_bytes_per_partition
    sizes = (trace.sbuf_peak_bytes, trace.psum_peak_banks * bank, line.sbuf_overflow_bytes)
    rest = (
        sorted(line.busy_us.items()),
        sorted(line.placed.items()),
    )
    found.update(repr((sizes, rest)).encode())
    return found.hexdigest()


def of_run(run: Simulation) -> str:
    """Return the digest of a run: its times, its profile, and what each instruction was."""
    assert run.profile is not None
    found = hashlib.sha256(digest(run.profile.timeline).encode())
    found.update(run.profile.to_json().encode())
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
        yield from _family(family, sizes)
    for point in timing_points.points():
        yield f"point {point.name}", lambda p=point: timing_points.simulated(p)


def _family(family: str, sizes: dict[str, int]) -> Iterator[Run]:
    spec = KNOWN[family].spec_class(**sizes)
    specs = [ArraySpec(operand.shape, operand.dtype) for operand in spec.inputs()]
    yield from _everywhere(family, lambda: build_kernel(spec, target="trn2"), specs)


def _everywhere(name: str, kernel: Callable[[], Any], specs: list[ArraySpec]) -> Iterator[Run]:
    for target in targets.names():
        for reorder in (True, False):
            yield (
                f"{name}, {target}{'' if reorder else ', in program order'}",
                lambda t=target, r=reorder: simulate(
                    kernel(), *specs, target=t, mode="timing", strict=False, reorder=r
                ),
            )


def main() -> int:
    """Write or compare; return 1 if a run differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", metavar="FILE", default="", help="write the digests to FILE")
    parser.add_argument("--compare", metavar="FILE", default="", help="compare them with FILE")
    parser.add_argument("--only", default="", help="runs whose name contains this text")
    options = parser.parse_args()
    if bool(options.write) == bool(options.compare):
        parser.error("pass --write FILE or --compare FILE")
    known = json.loads(Path(options.compare).read_text()) if options.compare else {}
    found: dict[str, str] = {}
    differ = []
    with tempfile.TemporaryDirectory() as folder:
        for name, run in runs(Path(folder)):
            if options.only not in name:
                continue
            found[name] = of_run(run())
            if options.compare and known.get(name) != found[name]:
                differ.append(name)
                print(f"differs: {name}", flush=True)
            if options.write:  # after each, so that an end before time keeps what is there
                Path(options.write).write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} runs, {len(differ)} differ" if options.compare else f"{len(found)} runs")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
