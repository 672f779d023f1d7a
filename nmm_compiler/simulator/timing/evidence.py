"""How far off predictions are, and which effects that may matter to a run they leave out.

`held_out.json` beside this file has the errors, by class, for published kernels that no constant
and no law was set from. `benchmarks/timing_points.py --write` writes it together with the
predictions in benchmarks/data/timing_record.json. It also has the hash of the constants and prices
that they were made with; a test computes it again (benchmarks/timing_hash.py).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nmm_compiler.records import Record
from nmm_compiler.simulator.timing.costs import ENGINES, US
from nmm_compiler.simulator.timing.timeline import Timeline
from nmm_compiler.simulator.trace import Instruction

HELD_OUT = Path(__file__).with_name("held_out.json")
CLASSES = ("matrix", "vector", "dma", "mixed")


@dataclass(frozen=True, kw_only=True)
class ErrorBand(Record):
    """The errors of published kernels of one class that no constant was set from.

    kind: one of CLASSES; points: how many; mean, worst: absolute relative errors.
    """

    kind: str
    points: int
    mean: float
    worst: float

    def __str__(self) -> str:
        return (
            f"held-out error of {self.kind} kernels {self.mean:.0%} mean, {self.worst:.0%} worst "
            f"of {self.points}"
        )


@functools.cache
def bands() -> dict[str, ErrorBand]:
    """Return the error band of each class."""
    found = json.loads(HELD_OUT.read_text())["bands"]
    return {band["kind"]: ErrorBand.from_dict(band) for band in found}


def mean_error() -> float:
    """Return the mean error of the held-out kernels of all classes."""
    found = bands().values()
    return sum(band.mean * band.points for band in found) / sum(band.points for band in found)


def kernel_class(busy_us: dict[str, float]) -> str:
    """Return the class of a kernel by what is busy.

    "dma" if the DMA engines move data for twice as long as any engine computes; else "matrix" if
    TensorE works twice as long as VectorE and ScalarE each, "vector" if one of them works twice as
    long as TensorE, else "mixed".
    """
    tensor = busy_us.get("tensor", 0.0)
    others = max(busy_us.get("vector", 0.0), busy_us.get("scalar", 0.0))
    if busy_us.get("dma", 0.0) > 2.0 * max(tensor, others):
        return "dma"
    if tensor > 2.0 * others:
        return "matrix"
    return "vector" if others > 2.0 * tensor else "mixed"


def unmodelled(timeline: Timeline) -> tuple[str, ...]:
    """Return the effects that may matter to this run and are not modelled."""
    trace, target, latency_us = timeline.trace, timeline.target, timeline.latency_us

    def count(engines: tuple[str, ...], holds: Callable[[Instruction], object] = bool) -> int:
        kinds = [kind for kind in timeline.kinds.values() if kind.first.engine in engines]
        return sum(kind.count for kind in kinds if holds(kind.first))

    barriers = count(ENGINES, lambda i: i.op == "core_barrier")
    queues = sorted({str(held.row) for held in timeline.held("queue")})
    unset = count(("vector",), lambda i: i.attributes.get("unset"))
    chosen = "ScalarE" if target.unset_engine_prefers_scalar else "VectorE"
    measured = any(source.kind == "measured" for source in target.sources.values())
    products = count(("tensor",), lambda i: "float32" in [a.dtype for a in i.reads])
    limited = target.tensor_ramp_seconds > 0.0 and 2.0 * timeline.busy_us["tensor"] >= latency_us
    tiny = 0  # of an engine that takes half of the run to issue its instructions
    for engine in ("gpsimd", "scalar", "vector"):
        issued = count((engine,))
        clock = getattr(target, f"{engine}_clock_hz")
        if 2.0 * issued * target.engine_min_cycles / clock * US > latency_us:
            tiny = issued
    effects = (
        (timeline.sbuf_overflow_bytes,
         f"spills: live tensors exceed SBUF by {timeline.sbuf_overflow_bytes} B per partition, "
         "and are timed as if they fitted"),
        (trace.psum_peak_banks > target.psum_banks,
         f"spills: live sums take {trace.psum_peak_banks} PSUM banks of {target.psum_banks}, "
         "and are timed as if they fitted"),
        (tiny,
         f"tiny instructions: {tiny} of at least {target.engine_min_cycles} cycles take half of "
         "the run; compilers merge such work, and published kernels with it took as long, two "
         "thirds or a sixteenth of the time"),
        (barriers, f"barriers: {barriers} wait for the other core, and cost nothing themselves"),
        (len(queues) > 1,
         f"mixed DMA generators: {', '.join(queues)} are taken to issue independently"),
        (unset,
         f"unknown engine: {unset} instructions are placed on {chosen}, where it can"),
        (trace.turns,
         "loops on the device: jumping back and fetching instructions are free"),
        (limited and products,
         f"TensorE's power limit: {products} float32 products keep TensorE busy for half of the "
         "run; hardware has been seen at half rate for part of such work, and at full rate too"),
        (not measured,
         f"{target.name}: no public measurement; documented rates and trn2's mechanisms"),
    )  # fmt: skip
    return tuple(sentence for matters, sentence in effects if matters)
