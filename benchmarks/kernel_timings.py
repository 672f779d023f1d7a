"""Simulated times of kernels in a file of JSON lines, so that a run continues where one ended.

A time is kept under a digest of everything that decides it: the templates that the family's text
is made of, the spec and the schedule as the template reads it, the target's numbers, and the
simulator. A change of candidates or of the search times only schedules that are new; a change of
documentation or of the passes times none. Several processes may append to one file.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from row_file import RowFile

import nmm_compiler
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.choose import Choice, search, simulated
from nmm_compiler.codegen.code_digests import code_digests
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.options import INSTRUCTION_BUDGET, Options
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.targets import Target, get

FILE = Path("out/kernel_times.jsonl")
TIMING_ROOMS = ("nki_api", "simulator", "targets")
_KERNELS = Path(nmm_compiler.__file__).parent / "kernels"


def digest(*parts: Any) -> str:
    """Return a short digest of JSON data."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@functools.cache
def rooms() -> str:
    """Return the digest of what times a kernel: simulator, targets and the language's rules."""
    found = code_digests()
    return digest({room: found[room] for room in TIMING_ROOMS})


@functools.cache
def templates(folder: str) -> str:
    """Return the digest of the NKI function of a family and of the pieces that it may use."""
    files = [_KERNELS / folder / "kernel.py", *sorted((_KERNELS / "pieces").glob("*.py"))]
    return digest({path.name: path.read_text(encoding="utf-8") for path in files})


def _key(what: str, spec: KernelSpec, schedule: Any, target: Target) -> str:
    text = templates(FAMILIES[spec.family].folder)
    return digest(what, rooms(), text, spec.family, spec.to_dict(), schedule.to_dict(), target)


def latency_us(kernel: Any, *arrays: ArraySpec, **how: Any) -> float:
    """Return the simulated microseconds of a kernel."""
    return float(simulate(kernel, *arrays, mode="timing", **how).profile.latency_us)


class Timings:
    """The times of kernels on a target that are in a file, and those that are added to it."""

    def __init__(self, target: str, path: Path = FILE, checkout: Path | None = None) -> None:
        """checkout: a clone with kernels of others."""
        self.target, self.file, self.checkout = get(target), RowFile(path, "key"), checkout

    def of(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return the value of a key, computed and kept if the file has none."""
        if (key,) not in self.file.rows:
            self.file.add({"key": key, "value": compute()})
        return self.file.rows[key,]["value"]

    def timed(
        self, spec: KernelSpec, schedule: Any, target: Target, _least_us: float = 0.0
    ) -> tuple[float, int, float]:
        """Return what `choose.simulated` returns of a schedule whatever the others take."""
        key = _key("times", spec, schedule, target)
        return tuple(self.of(key, lambda: simulated(spec, schedule, target)))

    def choose(self, spec: KernelSpec) -> Choice:
        """Return the schedule that `build_kernel` takes, timed."""
        return search(spec, self.target, INSTRUCTION_BUDGET, self.timed)[0]

    def us(self, spec: KernelSpec) -> float:
        """Return the simulated microseconds of the kernel that `build_kernel` makes."""
        best = self.choose(spec)
        if best.simulated_us is not None:
            return best.simulated_us
        return self.timed(spec, best.schedule, self.target)[0]

    def roofline_share(self, spec: KernelSpec) -> float:
        """Return the roofline over the time."""
        return spec.roofline_us(self.target) / self.us(spec)

    def profile(self, spec: KernelSpec) -> dict[str, float]:
        """Return figures of the simulated kernel that `build_kernel` makes."""

        def run() -> dict[str, float]:
            ran = build_kernel(spec, self.target.name, options=Options(cache="off")).profile()
            return {
                "us": ran.latency_us,
                "hbm_bytes": ran.hbm_read_bytes + ran.hbm_write_bytes,
                "dma_over_tensor": ran.engine_busy_us["dma"] / ran.engine_busy_us["tensor"],
                "transposes": sum(ran.transposes.values()),
                "mfu": ran.mfu,
                "mbu": ran.mbu,
            }

        key = _key("profile", spec, self.choose(spec).schedule, self.target)
        return dict(self.of(key, run))

    def file_us(self, path: Path, name: str, shapes: list[tuple[int, int]], **values: int) -> float:
        """Return the simulated microseconds of a bfloat16 kernel in a file."""
        text = [file.read_text(encoding="utf-8") for file in sorted(path.parent.glob("*.py"))]

        def run() -> float:
            arrays = [ArraySpec(shape, "bfloat16") for shape in shapes]
            return latency_us(f"{path}:{name}", *arrays, target=self.target, strict=False, **values)

        return float(self.of(digest(rooms(), text, name, self.target, shapes, values), run))


timings_of = functools.cache(Timings)
"""The times of a target and file, read once in a process."""
