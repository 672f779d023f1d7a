"""One function prices a piece: `price(piece, machine)`, in microseconds, with its source.

    kernel       simulated: the kernel that codegen makes, in the simulator's timing mode; or
                 estimated: the closed form of its work, without a schedule
    attention    simulated or estimated: the kernel of our family `attention`; where it has none,
                 bound or law: products and engine passes in prefill, bytes of the cache in decode
    pointwise    bound: HBM bytes of the region, or its engine operations
    copy         bound: bytes
    collective   published law (`collectives.py`)
    one of many  a kernel that sums over the cores between its products: simulated or estimated,
                 with the published law of the sum and of the wait for the other cores

A logical core is one physical core, as our kernels are launched (`kernels.base.CORES`), unless two
are asked for, as published systems on trn2 run. Then it is our kernel of two cores, which is what
the backend launches with `lnc=2`, with the published times of a barrier and of its exchanges; where
a family has none for the sizes, one core's kernel, for which the other core waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nmm_compiler.codegen.latency import LAUNCH_GAP_US, PRICES
from nmm_compiler.errors import CapacityError, ShapeError, SpecError
from nmm_compiler.kernels.base import KernelSpec, item_bytes
from nmm_compiler.prediction.collectives import (
    PAIR_BARRIER_US,
    PAIR_EXCHANGE_US,
    collective_us,
    wait_us,
)
from nmm_compiler.prediction.tensor_parallel import COLLECTIVES
from nmm_compiler.prediction.walk import Piece
from nmm_compiler.report.text import counted
from nmm_compiler.targets import Target

# Share of a line's figure that such figures have been off by, below and above, and why.
BANDS = {
    "simulated": (0.15, 0.15, "the timing model against published kernels (docs/timing.md)"),
    "estimated": (0.25, 0.8, "the closed form is 0.65 to 1.15 of what the simulator says"),
    # Such kernels wait for their sum for about half of their time: half of both bands.
    "simulated + law": (0.38, 1.1, "a kernel of ours, with the published law of its sum"),
    "estimated + law": (0.43, 1.4, "its closed form, with the published law of its sum"),
    "bound": (0.1, 1.0, "a bound: real kernels are slower"),
    "published law": (0.6, 2.0, "spread of the published measurements"),
    "fitted": (0.6, 2.0, "one constant, chosen on the published runs marked calibrate"),
}

# Engine passes over a tile of scores: a published fused kernel takes 28 us for 512 and 188 us for
# 2048 tokens of one head of 128 features on trn2, so 160 us for 3.93 M scores more.
SCORE_PASSES = 5.0
# Share of the HBM rate at which decode reads the cache: 5 to 11 ns per token and layer were
# published for Llama-2 70b and 13b on trn1 with one and two key heads (512 B a token and head).
CACHE_RATE_SHARE = 0.23
# Tokens from which two cores share the tokens, so that they exchange nothing.
MANY_TOKENS = 256


@dataclass(frozen=True)
class Machine:
    """The hardware: a target, physical cores per logical one, logical cores that share the model.

    lnc: 1 is how our kernels run. weights: the format of stored matrices: a dtype, or "int8" where
    no kernel here takes it. price: of a kernel, one of `codegen.latency.PRICES`.
    """

    target: Target
    lnc: int = 1
    tp: int = 1
    weights: str = "bfloat16"
    price: str = "simulated"

    @property
    def bytes_per_second(self) -> float:
        """HBM traffic that one logical core can reach."""
        return self.target.memory_bytes_per_second * self.lnc


@dataclass(frozen=True)
class Price:
    """Microseconds of one piece, computed once; their source; the specs that were priced."""

    us: float
    source: str
    how: str = ""
    launches: int = 1


_NOTED: list[dict[KernelSpec, None]] = []


@contextlib.contextmanager
def noted_kernels() -> Iterator[dict[KernelSpec, None]]:
    """Yield the kernels whose prices are asked for in the block, each once, in order."""
    noted: dict[KernelSpec, None] = {}
    _NOTED.append(noted)
    try:
        yield noted
    finally:
        _NOTED.pop()


def kernel_us(spec: KernelSpec, machine: Machine) -> float:
    """Return the microseconds of one kernel by the machine's price."""
    for noted in _NOTED:
        noted[spec] = None
    return PRICES[machine.price](spec, machine.target)


def price(piece: Piece, machine: Machine) -> Price:
    """Return the price of one piece, computed once."""
    if piece.kind == "kernel":
        return min((_row(way, machine) for way in piece.ways), key=_with_gaps)
    if piece.kind in COLLECTIVES:
        us = collective_us(piece.kind, piece.bytes, machine.tp, machine.target)
        return Price(us, "published law", f"{piece.bytes:,} B over {machine.tp} cores")
    if piece.kind == "attention":
        return _attention(piece, machine)
    if piece.kind == "pointwise":
        return _pointwise(piece, machine)
    return _bytes_and_flops(piece, machine)


def fastest(piece: Piece, machine: Machine) -> list[tuple[Piece, Price]]:
    """Return a piece with its price, or what computes it apart where that takes less, launches
    included."""
    whole = price(piece, machine)
    if not piece.apart:
        return [(piece, whole)]
    parts = [(one, price(one, machine)) for one in piece.apart]
    inside, apart = _with_gaps(whole), sum(_with_gaps(p) for _, p in parts)
    if not inside < apart:
        return parts
    said = f"{whole.how}; {apart:.1f} us as two products and a collective"
    return [(piece, dataclasses.replace(whole, how=said))]


def _with_gaps(price: Price) -> float:
    return price.us + price.launches * LAUNCH_GAP_US


def _row(specs: tuple[KernelSpec, ...], machine: Machine) -> Price:
    prices = [kernel_price(spec, machine) for spec in specs]
    sources = {p.source for p in prices}
    source = sources.pop() if len(sources) == 1 else "bound"
    how = " + ".join(p.how for p in prices)
    return Price(sum(p.us for p in prices), source, how, len(prices))


def kernel_price(spec: KernelSpec, machine: Machine) -> Price:
    """Return the price of a kernel on one logical core, as our backend launches it there.

    Prices are kept, but for "tuned", which depends on what the cache holds now, and while kernels
    are noted.
    """
    fresh = machine.price == "tuned" or _NOTED
    find = _kernel_price.__wrapped__ if fresh else _kernel_price
    return find(spec, machine)


@functools.lru_cache(maxsize=8192)
def _kernel_price(spec: KernelSpec, machine: Machine) -> Price:
    stored = with_weights(spec, machine.weights)
    if getattr(stored, "tp", 1) > 1:
        return _one_of_many(stored, machine)
    us, source, cores = _launched(stored, machine)
    return Price(us, source, stored.short() + (f" on {cores} cores" if cores > 1 else ""))


def _one_of_many(stored: Any, machine: Machine) -> Price:
    """Return the price of a kernel that sums over the cores of a group; infinite without one.

    Simulated ranks arrive together, so the wait for the others is added.
    """
    try:
        stored.check(machine.target)
        us = _shared_us(stored, machine)
        us = kernel_us(stored, machine) + _idle_core_us(machine) if us is None else us
    except (CapacityError, SpecError, ShapeError):
        us = math.inf
    wait, size = wait_us(stored.tp, machine.target), stored.exchanged_bytes()
    how = f"{stored.short()} on {stored.tp} cores, the sum of {size:,} B inside"
    return Price(us + wait, f"{_kernel_source(machine)} + law", how)


def _launched(stored: KernelSpec, machine: Machine) -> tuple[float, str, int]:
    """Return (microseconds, source, physical cores) of a kernel as our backend launches it."""
    us = _shared_us(stored, machine)
    if us is None:
        us, source = _one_core(stored, machine)
        return us + _idle_core_us(machine), source, 1
    if machine.weights == "int8":
        return _with_int8_us(us, stored, machine, machine.lnc), "bound", machine.lnc
    return us, _kernel_source(machine), machine.lnc


def _shared_us(stored: Any, machine: Machine) -> float | None:
    """Return the microseconds of our kernel of two cores; None where there is none for the sizes.

    A barrier is charged for the end of the kernel, which takes both cores, and for each exchange
    what is published beyond what the simulator says of it.
    """
    if machine.lnc == 1 or not hasattr(stored, "m"):
        return None
    spec = dataclasses.replace(stored, lnc=machine.lnc)
    if not spec.splits():
        return None
    try:
        us = kernel_us(spec, machine)
    except (CapacityError, SpecError, ShapeError):
        return None
    return us + PAIR_BARRIER_US + exchanges_of(spec) * beyond_simulated_us(machine.target)


def _idle_core_us(machine: Machine) -> float:
    """Return how much longer a kernel of one core takes where another core waits for it."""
    return PAIR_BARRIER_US if machine.lnc > 1 else 0.0


def beyond_simulated_us(target: Target) -> float:
    """Return what is published for an exchange of two cores, less what a DMA's start takes of it,
    which is in the kernel's own time."""
    return PAIR_EXCHANGE_US - 1e6 * (target.dma_start_latency_seconds + target.semaphore_seconds)


def exchanges_of(spec: Any) -> int:
    """Return how often two cores exchange values in a kernel that halves its weights."""
    if spec.m >= MANY_TOKENS or spec.family in ("matmul", "attention"):
        return 0
    ranks = ("r", "gate_r", "up_r", "down_r")
    factors = hasattr(spec, "pairs") or any(getattr(spec, name, 0) for name in ranks)
    return int(factors) + int(spec.family == "gated_mlp")


def _one_core(spec: KernelSpec, machine: Machine) -> tuple[float, str]:
    target, known = machine.target, _kernel_source(machine)
    try:
        us, source = kernel_us(spec, machine), known
    except (CapacityError, SpecError, ShapeError):
        parts = spec.parts()
        if parts:
            us, source = sum(kernel_us(one, machine) for one, _ in parts), known
        else:
            us, source = spec.roofline_us(target), "bound"
    if machine.weights == "int8":
        return _with_int8_us(us, spec, machine, 1), "bound"
    return us, source


def _with_int8_us(us: float, spec: KernelSpec, machine: Machine, cores: int) -> float:
    """Return the microseconds with int8 weights of a kernel that takes `us` with bfloat16.

    No family here reads int8: half the bytes of bfloat16.
    """
    compute = spec.flops() / (cores * machine.target.peak_flops_per_second("bfloat16"))
    return max(us / 2, 1e6 * compute)


def _kernel_source(machine: Machine) -> str:
    return "estimated" if machine.price == "closed_form" else "simulated"


def with_weights(spec: Any, weights: str) -> Any:
    """Return the spec for weights of another format, the same where its family has none."""
    names = {f.name for f in dataclasses.fields(spec)}
    if not weights.startswith("float8") or "scales" not in names:
        return spec
    return dataclasses.replace(spec, dtype=weights, scales="channel")


def _attention(piece: Piece, machine: Machine) -> Price:
    """Return the price of our kernel; a bound or a law where there is none."""
    assert piece.attention is not None
    for (spec,) in piece.ways:
        with contextlib.suppress(CapacityError, SpecError):
            us = _shared_us(spec, machine)
            us = kernel_us(spec, machine) + _idle_core_us(machine) if us is None else us
            return Price(us, _kernel_source(machine), spec.short())
    batch, heads, _, queries, keys, features, causal = piece.attention
    target = machine.target
    memory = piece.bytes / machine.bytes_per_second
    if queries == 1:
        us = 1e6 * memory / CACHE_RATE_SHARE
        return Price(us, "published law", f"{keys:,} tokens in the cache, {heads} heads")
    scores = batch * heads * queries * keys * (0.5 if causal else 1.0) / machine.lnc
    lanes = target.partitions
    engines = SCORE_PASSES * scores / (lanes * target.vector_clock_hz)
    passes = 2 * scores * math.ceil(features / lanes) / lanes
    tensor = passes / target.tensor_clock_hz
    how = f"{queries:,} x {keys:,} scores, {heads} heads{', causal' if causal else ''}"
    return Price(1e6 * max(memory, engines, tensor), "bound", how)


def _pointwise(piece: Piece, machine: Machine) -> Price:
    target = machine.target
    fixed = (
        target.engine_isolated_overhead_cycles / target.vector_clock_hz
        + target.engine_semaphore_seconds
    )
    lanes = target.partitions * machine.lnc
    rate = lanes * (target.vector_clock_hz + target.scalar_clock_hz)
    engines = sum(fixed + size / rate for size in piece.elements)
    moved = piece.bytes / machine.bytes_per_second
    start = target.dma_start_latency_seconds + target.semaphore_seconds
    how = f"{counted(len(piece.elements), 'operation')}, {piece.bytes:,} B"
    return Price(1e6 * (start + max(engines, moved)), "bound", how)


def _bytes_and_flops(piece: Piece, machine: Machine) -> Price:
    target = machine.target
    compute = piece.flops / (target.peak_flops_per_second(piece.dtype) * machine.lnc)
    start = target.dma_start_latency_seconds + target.semaphore_seconds
    us = 1e6 * (start + max(compute, piece.bytes / machine.bytes_per_second))
    return Price(us, "bound", f"{piece.bytes:,} B")


def stored_bytes(dtype: str, weights: str) -> int:
    """Return bytes of one element of a stored matrix."""
    return 1 if weights == "int8" else item_bytes(weights if weights != "bfloat16" else dtype)
