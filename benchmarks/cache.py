"""What a hit in the kernel cache costs: medians on this machine, printed.

    python benchmarks/cache.py [--entries 200] [--source-bytes 30000] [--repeat 300] [--full 10000]
                               [--processes 20]

The last rows are of a second cache that holds `--full` small entries and is at its bound of bytes,
so that each publishing evicts: 200 publications of one process, then the first one of each of
`--processes` fresh processes, by the clock and in CPU time (user and system, of that process).

Exits with 1 when a row with a goal is above it. These rows are medians, but for one: of the CPU
times of the first publications, the worst is judged. The clock includes four waits for the disk
(fsync) and whatever else the machine does; the CPU time does not. Measured here, on the CPU that
runs it; nothing is simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nmm_compiler.cache.disk import Disk
from nmm_compiler.cache.evict import usage
from nmm_compiler.cache.key import Key
from nmm_compiler.cache.store import Store

ROOT = Path(__file__).resolve().parents[1]
GOAL = "20000"
FIRST = """import json, sys, time
from benchmarks.cache import key_of
from nmm_compiler.cache.store import Store
directory, size, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store, key, source = Store(directory, max_bytes=size), key_of(number), sys.stdin.read()
clock, cpu = time.perf_counter(), time.process_time()
entry = store.get_or_build(key, lambda: {"kernel.py": source})
taken = time.perf_counter() - clock, time.process_time() - cpu
assert entry.directory is not None
print(json.dumps([seconds * 1e6 for seconds in taken]))
"""


def key_of(number: int) -> Key:
    spec = {"m": number, "k": 2048, "r": 1280, "n": 8192, "dtype": "bfloat16", "bias": False}
    versions = {"package": "0.1.0", "nki": "0.6", "template": "f" * 64, "codegen": "e" * 64}
    return Key.make({"family": "lowrank", "spec": spec, "target": "trn2", **versions})


def times_us(action: Callable[[int], object], repeat: int) -> list[float]:
    """Return the times of `action(i)` in microseconds."""
    times = []
    for i in range(repeat):
        start = time.perf_counter()
        action(i)
        times.append((time.perf_counter() - start) * 1e6)
    return times


def median_us(action: Callable[[int], object], repeat: int) -> float:
    """Return the median time of `action(i)` in microseconds."""
    return statistics.median(times_us(action, repeat))


def full_cache(
    directory: Path, entries: int, processes: int, source: str
) -> list[tuple[str, float, str]]:
    """Return rows of publishing into a cache that holds `entries` entries and no byte more."""
    filler = Store(directory)
    for i in range(entries):
        filler.get_or_build(key_of(i), lambda: {"kernel.py": source})
    size = sum(info.size_bytes for info in filler.list())
    full = Store(directory, max_bytes=size)

    def publish(i: int) -> object:
        return full.get_or_build(key_of(entries + i), lambda: {"kernel.py": source})

    name = f"publish into a full cache of {entries}"
    published = times_us(publish, 200)
    rows = [(name, statistics.median(published), GOAL), ("  slowest of 200", max(published), "")]
    rows.append((f"miss among {entries}", median_us(lambda i: full.get(key_of(-1 - i)), 300), ""))
    clock, cpu = [], []
    for number in range(2 * entries, 2 * entries + processes):
        held = _held_bytes(directory, size)
        size = held  # full to the last byte, before each
        wall_us, cpu_us = first_publication(directory, size, number, source)
        clock.append(wall_us)
        cpu.append(cpu_us)
    _held_bytes(directory, size)
    of = f"the first of each of {processes} processes"
    rows += [(of, statistics.median(clock), GOAL), ("  slowest", max(clock), "")]
    rows += [("  CPU time", statistics.median(cpu), ""), ("  CPU time, worst", max(cpu), GOAL)]
    return rows


def first_publication(directory: Path, size: int, number: int, source: str) -> tuple[float, float]:
    """Publish one entry in a fresh process; return its microseconds by the clock and of CPU."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST, str(directory), str(size), str(number)],
        input=source, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    wall_us, cpu_us = json.loads(done.stdout)
    return wall_us, cpu_us


def _held_bytes(directory: Path, bound: int) -> int:
    held = sum(seen.size_bytes for seen in usage(Disk(directory, writing=False)))
    if held > bound:
        raise SystemExit(f"the full cache holds {held} bytes; its bound is {bound}")
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=200)
    parser.add_argument("--source-bytes", type=int, default=30_000)
    parser.add_argument("--repeat", type=int, default=300)
    parser.add_argument("--full", type=int, default=10_000, help="entries of the full cache")
    parser.add_argument("--processes", type=int, default=20, help="that publish into it once each")
    given = parser.parse_args()
    line = "    nisa.nc_matmul(dst=psum, stationary=u_tile, moving=x_tile)\n"
    source = line * (given.source_bytes // len(line) + 1)
    meta = {"schedule": {"tile": [128, 512]}, "profile": {"latency_us": 12.5}}
    keys = [key_of(i) for i in range(given.entries)]
    with tempfile.TemporaryDirectory(prefix="nmm-bench-") as folder:
        directory = Path(folder) / "cache"
        writer = Store(directory)

        def publish(i: int) -> object:
            return writer.get_or_build(keys[i], lambda: {"kernel.py": source}, meta)

        def from_disk(i: int) -> object:
            warm._memory.drop()
            entry = warm.get(keys[i % len(keys)])
            assert entry is not None
            return entry

        def from_memory(i: int) -> object:
            entry = warm.get(keys[0])
            assert entry is not None
            return entry

        rows = [("publish (write, fsync, rename)", median_us(publish, len(keys)), "")]
        warm = Store(directory)
        rows.append(("hit on disk, sha256 verified", median_us(from_disk, given.repeat), "2000"))
        rows.append(("hit in memory, files looked at", median_us(from_memory, 10_000), "20"))
        rows.append(("miss", median_us(lambda i: warm.get(key_of(-1 - i)), given.repeat), ""))
        rows.append(("make a key", median_us(lambda i: key_of(i).digest, given.repeat), ""))
        rows.append((f"list {len(keys)} entries", median_us(lambda _: warm.list(), 5), ""))
        miss = key_of(-1)
        rows.append((f"explain among {len(keys)}", median_us(lambda _: warm.explain(miss), 5), ""))
    with tempfile.TemporaryDirectory(prefix="nmm-bench-") as folder:
        rows += full_cache(Path(folder) / "cache", given.full, given.processes, line * 8)
    print(f"{'measured, median':40}{'us':>12}{'goal us':>10}")
    for name, value, goal in rows:
        print(f"{name:40}{value:12.1f}{goal:>10}")
    over = [name for name, value, goal in rows if goal and value > float(goal)]
    if over:
        raise SystemExit(f"above its goal: {', '.join(over)}")


if __name__ == "__main__":
    main()
