"""`make bench-scale`: builds in parallel, tuning on Ray, one cache on S3; kills and faults in each.

Counted: kernels lost, torn, duplicated; every count has to be 0, or the exit code is 1. Speed-ups
are given twice: by wall time, which other programs on the machine change, and by CPU time: that of
one process over the larger of the busiest process and an equal share of all. With two jobs the
better of both has to be 1.8 (Ray: wall time alone, the median of three pairs, so it needs free
cores). The last table has the unit costs that docs/scale.md is made of. All times are of this
machine, measured; none is of a device.

    --only build,tune,ray,s3,costs     --jobs 2     --json FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import scale_s3

PARTS = ("build", "tune", "ray", "s3", "costs")
SPEED_UP_BAR = 1.8
PAIRS = 3
RANKS = (256, 384, 512, 640, 768, 896, 1024)
TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def empty_cache() -> Iterator[Path]:
    """Yield a new cache directory, which this process and its children use."""
    from nmm_compiler.codegen import build, choose, tuned

    before = os.environ.get("NMM_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="nmm-scale-") as directory:
        os.environ["NMM_CACHE_DIR"] = directory
        for held in (choose._choose, choose.rank, build.kernel_key):
            held.cache_clear()
        build._KERNELS.clear()
        tuned.forget()
        yield Path(directory)
    del os.environ["NMM_CACHE_DIR"]
    if before is not None:
        os.environ["NMM_CACHE_DIR"] = before


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


@dataclasses.dataclass
class Watch:
    """CPU seconds of the workers of a run, from their start; `kills` of them are killed."""

    workers: Any
    kills: int = 0
    killed: int = 0
    cpu: dict[int, float] = dataclasses.field(default_factory=dict)
    steps: int = 0

    def __call__(self, said: str, done: int, known: int) -> None:
        for pid in self.workers.processes():
            self.cpu[pid] = max(self.cpu.get(pid, 0.0), cpu_of(pid))
        self.steps += 1
        if self.killed < self.kills and self.steps % 4 == 3 and self.workers.processes():
            os.kill(self.workers.processes()[-1], signal.SIGKILL)
            self.killed += 1


def watched(jobs: int, kills: int, run: Callable[[Any, Watch], Any]) -> tuple[Any, dict[str, Any]]:
    """Return what `run(executor, progress)` returns on `jobs` workers, and its times."""
    from nmm_compiler.codegen.workers import on_processes

    start, own = time.monotonic(), time.process_time()
    with on_processes(jobs) as workers:
        watch = Watch(workers, kills)
        made = run(workers, watch)
        watch("", 0, 0) if not kills else None
    caller = time.process_time() - own
    busiest = max(watch.cpu.values(), default=0.0)
    return made, {
        "wall s": time.monotonic() - start,
        "busiest worker CPU s": busiest,
        "caller CPU s": caller,
        "all CPU s": sum(watch.cpu.values()) + caller,
        "killed": watch.killed,
    }


def speed_up(alone: dict[str, Any], many: dict[str, Any], jobs: int) -> dict[str, float]:
    """Return the speed-up by wall time and by CPU time, and what more CPU several workers take."""
    longest = max(many["busiest worker CPU s"], many["all CPU s"] / jobs)
    return {
        "by wall time": round(alone["wall s"] / many["wall s"], 2),
        "by CPU time": round(alone["all CPU s"] / longest, 2),
        "CPU over one worker's": round(many["all CPU s"] / alone["all CPU s"], 2),
    }


def prefill_and_decode() -> list[Any]:
    """Return the specs of a small Llama's low-rank products in up to eleven token counts.

    A worker takes 1.4 CPU s before its first kernel is built: imports, and the templates. Two are
    1.8 times as fast as one from 8 times as much work on; these are some 30 times as much.
    """
    from nmm_compiler.kernels.gated_mlp import GatedMLPSpec
    from nmm_compiler.kernels.lowrank import LowRankSpec

    counts = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    made: list[Any] = [LowRankSpec(m=m, k=2048, r=r, n=2048) for m in counts for r in RANKS]
    made += [GatedMLPSpec(m=m, k=2048, r=512, n=4096) for m in counts[:8]]
    return made


def part_build(jobs: int) -> dict[str, Any]:
    """Fill a cache with one worker, with several, and with several of which some are killed."""
    from nmm_compiler.cache.store import Store
    from nmm_compiler.codegen.build_many import fill

    requests = [(spec, "trn2") for spec in prefill_and_decode()]
    sources, times = [], []
    counts = {"lost": 0, "torn": 0, "duplicated": 0}
    for count, kills in ((1, 0), (jobs, 0), (jobs, 3)):
        with empty_cache():
            filled, took = watched(
                count, kills, lambda where, step: fill(requests, executor=where, progress=step)
            )
            infos = Store.open().list()
            sources.append(
                sorted((i.digest, Store.open().show(i.digest).files["kernel.py"]) for i in infos)
            )
            counts["lost"] += len(requests) - len(infos) + len(filled.failed)
            counts["torn"] += sum(info.state != "ok" for info in infos)
            counts["duplicated"] += max(0, filled.built - len(infos))
            times.append(took)
    counts["torn"] += sum(one != sources[0] for one in sources)  # the same bytes, however built
    return {
        "kernels": len(requests), "jobs": jobs, **counts, "killed": times[2]["killed"],
        "one worker": rounded(times[0]), "workers": rounded(times[1]),
        "speed-up": speed_up(times[0], times[1], jobs),
    }  # fmt: skip


def tuned_specs() -> list[Any]:
    from nmm_compiler.kernels.lowrank import LowRankSpec

    return [LowRankSpec(m=m, k=1024, r=256, n=1024) for m in (1, 8, 16, 64, 128, 256)]


def model_specs() -> list[Any]:
    """Return the products of two models in five token counts: over a minute of one process."""
    from nmm_compiler.kernels.lowrank import LowRankSpec

    shapes = ((2048, 512, 8192), (8192, 640, 2048), (2048, 640, 2048), (4096, 896, 4096))
    counts = (128, 256, 512, 1024, 1536)
    return [LowRankSpec(m=m, k=k, r=r, n=n) for m in counts for k, r, n in shapes]


def choices(made: list[Any]) -> list[Any]:
    return [(one.kernel, one.schedule, one.best_us, one.candidates, one.simulated) for one in made]


def part_tune(jobs: int) -> dict[str, Any]:
    """Tune on one worker and on several; a second run on the same cache times nothing."""
    from nmm_compiler.codegen.tune import tune

    specs = model_specs()[:8]  # fewer do not make up for the start of a worker
    made, times = [], []
    for count in (1, jobs):
        with empty_cache():
            found, took = watched(
                count, 0, lambda where, step: tune(specs, executor=where, progress=step)
            )
            made.append(found)
            times.append(took)
            again = tune(specs, jobs=1)
    return {
        "schedules": sum(one.candidates for one in made[0]),
        "lost": sum(a != b for a, b in zip(choices(made[0]), choices(made[1]), strict=True)),
        "duplicated": sum(one.simulated for one in again),
        "one worker": rounded(times[0]), "workers": rounded(times[1]),
        "speed-up": speed_up(times[0], times[1], jobs),
    }  # fmt: skip


def part_ray(jobs: int) -> dict[str, Any]:
    """Tune on a Ray cluster of this machine while workers are killed, against a serial run.

    Then pairs on the kernels of models, without kills, for the time: one process, then the
    cluster, which runs before. The pair of the median is shown. The CPU time on Ray is that of
    this process, of the workers, and of Ray's own processes.
    """
    from nmm_compiler.codegen.on_ray import RayExecutor
    from nmm_compiler.codegen.tune import tune

    with empty_cache():
        serial = choices(tune(tuned_specs(), jobs=1))
    killed: list[int] = []
    workers = max(3, jobs)

    def kill(said: str, done: int, known: int) -> None:
        names = ("ray::time_sched", "ray::find_def")
        busy = [p for p, c in processes_below(os.getpid()).items() if c.startswith(names)]
        if len(killed) < 3 and done > 15 * (1 + len(killed)) and busy:
            os.kill(busy[0], signal.SIGKILL)
            killed.append(busy[0])

    with empty_cache(), RayExecutor(cores=workers) as executor:
        made = tune(tuned_specs(), executor=executor, progress=kill)
    pairs = [(alone_on(model_specs()), on_ray(model_specs(), jobs)) for _ in range(PAIRS)]
    gains = [speed_up(one, many, jobs) for (_, one), (_, many) in pairs]
    middle = sorted(range(PAIRS), key=lambda i: gains[i]["by wall time"])[PAIRS // 2]
    (alone, one), (many, ray) = pairs[middle]
    gained = gains[middle]
    both = zip(serial + choices(alone), choices(made) + choices(many), strict=True)
    return {
        "schedules": sum(one.candidates for one in made), "workers": workers,
        "killed": len(killed),
        "lost": sum(a != b for a, b in both),
        "duplicated": sum(one.simulated - one.candidates for one in [*made, *many]),
        "schedules without kills": sum(one.candidates for one in many),
        "one process": rounded(one), "ray": rounded(ray),
        "pairs": ", ".join(str(gain["by wall time"]) for gain in gains),
        "speed-up": {"by wall time": gained.pop("by wall time")}, "not a bar": gained,
    }  # fmt: skip


def alone_on(specs: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Tune with one worker process and an empty cache; return the outcomes and the times."""
    from nmm_compiler.codegen.tune import tune

    with empty_cache():
        return watched(1, 0, lambda where, step: tune(specs, executor=where, progress=step))


def on_ray(specs: list[Any], jobs: int) -> tuple[list[Any], dict[str, Any]]:
    """Tune on a new Ray cluster of this machine and an empty cache; return the same."""
    from nmm_compiler.codegen.on_ray import RayExecutor
    from nmm_compiler.codegen.tune import tune

    with empty_cache(), RayExecutor(cores=jobs) as executor:
        before = {pid: cpu_of(pid) for pid in processes_below(os.getpid())}
        start, own = time.monotonic(), time.process_time()
        made = tune(specs, executor=executor)
        wall_s, caller_s = time.monotonic() - start, time.process_time() - own
        shares = [cpu_of(pid) - before.get(pid, 0.0) for pid in processes_below(os.getpid())]
    return made, {
        "wall s": wall_s, "busiest worker CPU s": max(shares), "caller CPU s": caller_s,
        "all CPU s": sum(shares) + caller_s,
    }  # fmt: skip


def processes_below(root: int) -> dict[int, str]:
    """Return the processes that a process has started, and those that these started: id -> command.

    Ray writes what a worker does into its command.
    """
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        parents[int(folder.name)], commands[int(folder.name)] = int(stat[1]), command

    def below(pid: int) -> bool:
        while pid and pid != root:
            pid = parents.get(pid, 0)
        return pid == root

    return {pid: command for pid, command in commands.items() if pid != root and below(pid)}


def part_s3(jobs: int) -> dict[str, Any]:
    """Share one remote level on S3 among 8 processes."""
    return scale_s3.run()


def part_costs(jobs: int) -> dict[str, Any]:
    """Measure what one kernel, one entry and one start cost."""
    from nmm_compiler.cache.store import Store
    from nmm_compiler.codegen import build
    from nmm_compiler.codegen.choose import rank, simulated
    from nmm_compiler.codegen.tune import tune
    from nmm_compiler.kernels.lowrank import LowRankSpec
    from nmm_compiler.prediction.model_kernels import model_kernels
    from nmm_compiler.targets import get

    made: dict[str, Any] = {}
    start = time.process_time()
    wanted = model_kernels("llama-3.2-1b", ratios=[0.2], tokens=(1, 512))
    made["kernels of llama-3.2-1b and token count"] = len(wanted) / 2
    made["CPU s to list the kernels of a token count"] = (time.process_time() - start) / 2
    with empty_cache() as directory:
        build.build_kernel(LowRankSpec(m=8, k=8, r=8, n=8))
        for name, m in (("decode", 1), ("prefill", 512)):
            specs = [spec for spec, _ in wanted if spec.m == m]
            start = time.process_time()
            for spec in specs:
                build.build_kernel(spec)
            made[f"CPU s to build a {name} kernel"] = (time.process_time() - start) / len(specs)
        sizes = [info.size_bytes for info in Store.open().list()]
        made["cache bytes of a kernel"] = sum(sizes) / len(sizes)
        blocks = sum(p.lstat().st_blocks * 512 for p in directory.rglob("*"))
        made["disk bytes of a kernel"] = blocks / len(sizes)
        chip = get("trn2")
        ranked = [rank(spec, chip) for spec, _ in wanted]
        made["schedules of a kernel"] = sum(map(len, ranked)) / len(ranked)
        seconds = []  # of all schedules, if each takes as long as the first
        for (spec, _), found in zip(wanted, ranked, strict=True):
            start = time.process_time()
            simulated(spec, found[0].schedule, chip)
            seconds.append((time.process_time() - start) * len(found))
        made["CPU s to tune a kernel"] = sum(seconds) / len(seconds)
        tune([LowRankSpec(m=64, k=1024, r=256, n=1024)], jobs=1)
        entries = [i for i in Store.open().list() if i.key and "tuning" in i.key.to_dict()]
        made["cache bytes of a tuning"] = entries[0].size_bytes
        remote = directory / "remote"
        remote.mkdir()
        filled = Store(directory, remote=f"file://{remote}")
        filled.push()
        made["CPU ms to read a kernel from disk"] = read_ms(Store(directory, "ro"), filled)
        fresh = Store(directory / "fresh", remote=f"file://{remote}", check=build.check_foreign)
        made["CPU ms to take a kernel from a remote level"] = read_ms(fresh, filled)
    made["peak MB of a builder"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {name: round(value, 3) for name, value in made.items()}


# Cores -> (models, targets, numbers of cores that share a model). A host has 128 cores
# (trn2.48xlarge: 16 chips of 8 cores) and one cache directory.
FLEETS = {10: (1, 1, 1), 1_000: (10, 2, 2), 100_000: (200, 3, 3)}
CORES_OF_A_HOST = 128
TOKEN_COUNTS = 13  # the default buckets, 1 to 4096
GETS_PER_SECOND = 5_500  # S3's published rate of a prefix


def fleet(costs: dict[str, float], cores: int) -> dict[str, float]:
    """Return what a fleet of so many cores needs, from the unit costs."""
    models, targets, shares = FLEETS[cores]
    per_model = costs["kernels of llama-3.2-1b and token count"] * TOKEN_COUNTS
    shapes = models * shares * per_model
    kernels = shapes * targets
    build = costs["CPU s to build a decode kernel"] + costs["CPU s to build a prefill kernel"]
    hosts = -(-cores // CORES_OF_A_HOST)
    return {
        "shapes": shapes,
        "kernels": kernels,
        "cache MB, all": kernels * costs["disk bytes of a kernel"] / 1e6,
        "cache MB of a host with one model": per_model * costs["disk bytes of a kernel"] / 1e6,
        "CPU hours to build": kernels * build / 2 / 3600,
        "CPU hours to tune": kernels * costs["CPU s to tune a kernel"] / 3600,
        "cold start CPU s, from disk": per_model * costs["CPU ms to read a kernel from disk"] / 1e3,
        "cold start CPU s, from a remote level": per_model
        * costs["CPU ms to take a kernel from a remote level"]
        / 1e3,
        "GETs of a restart, a directory for each host": hosts * per_model,
        "GETs of a restart, one for each core": cores * per_model,
        "s of S3 for these at one prefix": cores * per_model / GETS_PER_SECOND,
    }


def read_ms(store: Any, filled: Any) -> float:
    """Return the CPU milliseconds that a store takes for a kernel it has not in memory."""
    keys = [i.key for i in filled.list() if i.key is not None and "family" in i.key.to_dict()]
    start = time.process_time()
    found = [store.get(key) for key in keys]
    assert None not in found
    return 1e3 * (time.process_time() - start) / len(keys)


def fleets(costs: dict[str, float]) -> Table:
    """Return the table of docs/scale.md."""
    columns = {cores: fleet(costs, cores) for cores in FLEETS}
    table = Table(title="a fleet, calculated from these costs")
    table.add_column("cores")
    for cores in columns:
        table.add_column(f"{cores:,}", justify="right")
    for name in columns[10]:
        values = (column[name] for column in columns.values())
        table.add_row(name, *(f"{v:,.2f}" if v < 10 else f"{v:,.0f}" for v in values))
    return table


def rounded(times: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    needs = {"ray": ["ray"], "s3": ["moto", "s3fs", "flask", "minisign"]}
    console, bad = Console(width=None if sys.stdout.isatty() else 110), 0
    found: dict[str, Any] = {}
    for part in given.only.split(","):
        missing = [n for n in needs.get(part, []) if importlib.util.find_spec(n) is None]
        if missing:
            console.print(f"{part}: left out, {', '.join(missing)} is not installed")
            continue
        found[part] = globals()[f"part_{part}"](given.jobs)
        table = Table(title=f"{part}: {globals()[f'part_{part}'].__doc__}", show_header=False)
        for name, value in found[part].items():
            if isinstance(value, dict):
                value = ", ".join(f"{k} {v}" for k, v in value.items())
            table.add_row(name, value if isinstance(value, str) else f"{value:,}")
        console.print(table)
        if part == "costs":
            console.print(fleets(found[part]))
        bad += sum(found[part].get(name, 0) != 0 for name in scale_s3.COUNTED)
        faster = [v for k, v in found[part].get("speed-up", {}).items() if k.startswith("by ")]
        bad += given.jobs == 2 and max(faster, default=SPEED_UP_BAR) < SPEED_UP_BAR
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
