"""Microseconds of one launch, before it is built: `launch_us(spec, target, lnc, source)`.

A source is one of PRICES by name: "closed_form", from the spec alone, is the default of the passes
(its error against the simulator is in `prices.ways.ERRORS`, by tests/prices/test_estimate.py);
"simulated" is the kernel that `build_kernel` would build, in the simulator's timing mode; "tuned"
takes the schedules that `tune` found, where the cache has them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nmm_compiler.cache.key import Key
from nmm_compiler.cache.store import Store
from nmm_compiler.codegen.build_many import (
    WORTH_WORKERS,
    Progress,
    each,
    request_of,
    request_text,
)
from nmm_compiler.codegen.choose import choose, rank
from nmm_compiler.codegen.code_digests import key_fields
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.codegen.tuned import tuned_choice
from nmm_compiler.errors import CapacityError, ShapeError, SpecError
from nmm_compiler.kernels.base import WEIGHTS, KernelSpec
from nmm_compiler.kernels.experts.spec import ExpertsSpec
from nmm_compiler.kernels.linear.spec import LinearSpec
from nmm_compiler.options import INSTRUCTION_BUDGET, LARGEST_BUCKET, Options
from nmm_compiler.targets import Target
from nmm_compiler.targets.collective_time import collective_alone_us

_PRICE = "price.txt"
NO_KERNEL = (CapacityError, ShapeError, SpecError)
"""Why a spec has no kernel on a target."""

LAUNCH_GAP_US = 2.0
"""Time from one kernel to the next in one program; chosen on published decodes
(docs/latency.md)."""

# Core pair of one logical core: published for trn2 (NxD Inference and NKI notes).
PAIR_EXCHANGE_US = 9.2
PAIR_BARRIER_US = 3.0
# Median of all-reduces in a decode of 64 ranks, 44 us, over the isolated 17.5 us; the best took
# 17.5 us and one in ten more than 135 us.
WAIT_FACTOR = 44.0 / 17.5
WAIT_RANKS = 64

# Tokens from which two cores share the tokens, so that they exchange nothing.
MANY_TOKENS = 256


@functools.lru_cache(maxsize=4096)
def estimate_us(spec: KernelSpec, chip: Target) -> float:
    """Return the least closed form of a kernel's schedules, from its first instruction to its last.

    Raises CapacityError or SpecError where no schedule is legal.
    """
    if spec.exchanged_bytes():
        spec.check(chip)  # the closed form asks no target for its collectives
        alone = dataclasses.replace(spec, tp=1, tp_axis="")  # type: ignore[call-arg]
        return estimate_us(alone, chip) + collective_alone_us(
            spec.exchanged_bytes() / spec.lnc, spec.tp, chip
        )
    return rank(spec, chip)[0].cost_us


@functools.lru_cache(maxsize=4096)
def simulated_us(spec: KernelSpec, chip: Target) -> float:
    """Return the simulated microseconds of a kernel, from its first instruction to its last result.

    The schedule is the one that `build_kernel` takes. A call of more than LARGEST_BUCKET tokens a
    core is as many launches of that many, and one of the rest, where its family can split tokens.
    Prices are kept in the kernel cache. Raises CapacityError or SpecError, with the numbers, when
    no schedule is legal.
    """
    launches = launches_of(spec)
    if launches != {spec: 1}:
        return sum(count * simulated_us(one, chip) for one, count in launches.items())
    spec.check(chip)
    store = Store.for_kernels()
    if store.mode in ("off", "require"):
        return _simulate(spec, chip)
    key = price_key(spec, chip)
    entry = store.get_or_build(key, lambda: {_PRICE: repr(_simulate(spec, chip))})
    return float(entry.files[_PRICE])


def _simulate(spec: KernelSpec, chip: Target) -> float:
    us = choose(spec, chip)[0].simulated_us
    assert us is not None  # the first is of those that were simulated
    return us


def launches_of(spec: KernelSpec) -> dict[KernelSpec, int]:
    """Return the kernels that `simulated_us` simulates for a call, and how often each runs."""
    tokens, most = int(getattr(spec, "m", 0)), LARGEST_BUCKET * spec.lnc
    if tokens <= most or not spec.splits_tokens:
        return {spec: 1}
    blocks, rest = divmod(tokens, most)
    each_m = {most: blocks, rest: 1} if rest else {most: blocks}
    return {dataclasses.replace(spec, m=m): count for m, count in each_m.items()}


def price_key(spec: KernelSpec, chip: Target) -> Key:
    """Return the key in the kernel cache of the price that `simulated_us` gives one launch."""
    return Key.make({"price": "simulated_us", **key_fields(spec, chip, INSTRUCTION_BUDGET)})


def tuned_us(spec: KernelSpec, chip: Target) -> float:
    """Return the simulated microseconds of the schedule that `tune` found for a kernel.

    A kernel whose tuning is not in the cache on disk has the price of `simulated_us`. Long calls
    are split as there.
    """
    best = tuned_choice(spec, chip, INSTRUCTION_BUDGET, Store.for_kernels())
    if best is not None and best.simulated_us is not None:
        return best.simulated_us
    launches = launches_of(spec)
    if launches == {spec: 1}:
        return simulated_us(spec, chip)
    return sum(count * tuned_us(one, chip) for one, count in launches.items())


PRICES: dict[str, Callable[[KernelSpec, Target], float]] = {
    "closed_form": estimate_us, "simulated": simulated_us, "tuned": tuned_us,
}  # fmt: skip

_NOTED: list[dict[tuple[KernelSpec, Target], None]] = []


@contextlib.contextmanager
def noted_kernels() -> Iterator[dict[tuple[KernelSpec, Target], None]]:
    """Yield (kernel, target) of each price that is asked for in the block, once, in order."""
    noted: dict[tuple[KernelSpec, Target], None] = {}
    _NOTED.append(noted)
    try:
        yield noted
    finally:
        _NOTED.pop()


def kernel_us(spec: KernelSpec, chip: Target, source: str) -> float:
    """Return the microseconds of one kernel; raises one of NO_KERNEL where there is none."""
    for noted in _NOTED:
        noted[spec, chip] = None
    return PRICES[source](spec, chip)


def launch_us(spec: KernelSpec, chip: Target, lnc: int, source: str) -> float:
    """Return the microseconds of one launch on a logical core of `lnc` physical cores.

    Two cores share the kernel; one that they cannot share runs on one, for which the other waits.
    A barrier is charged for the end of the kernel, which takes both cores, and for each exchange
    what is published beyond what the simulator says of it. A kernel that sums over the ranks waits
    for them. Raises one of NO_KERNEL for what has no schedule.
    """
    alone = dataclasses.replace(spec, lnc=1) if spec.lnc > 1 else spec
    waits = wait_us(spec.tp, chip) if spec.exchanged_bytes() else 0.0
    if lnc > 1 and hasattr(spec, "m"):
        shared = dataclasses.replace(alone, lnc=lnc)
        with contextlib.suppress(*NO_KERNEL):
            if shared.splits():
                beyond = exchanges_of(shared) * beyond_simulated_us(chip)
                return kernel_us(shared, chip, source) + PAIR_BARRIER_US + beyond + waits
    return kernel_us(alone, chip, source) + (PAIR_BARRIER_US if lnc > 1 else 0.0) + waits


def row_us(row: tuple[KernelSpec, ...], chip: Target, lnc: int, source: str) -> float:
    """Return the time of launches one after the other, with a gap between two of them.

    Infinite where one of them has no legal schedule.
    """
    gaps = (len(row) - 1) * LAUNCH_GAP_US
    try:
        return sum(launch_us(spec, chip, lnc, source) for spec in row) + gaps
    except NO_KERNEL:
        return math.inf


def beyond_simulated_us(target: Target) -> float:
    """Return what is published for an exchange of two cores, less what a DMA's start takes of it,
    which is in the kernel's own time."""
    return PAIR_EXCHANGE_US - 1e6 * (target.dma_start_latency_seconds + target.semaphore_seconds)


def exchanges_of(spec: Any) -> int:
    """Return how often two cores exchange values in a kernel: experts once, for the last sums."""
    if isinstance(spec, ExpertsSpec):
        return 1
    linear = isinstance(spec, LinearSpec) and spec.m < MANY_TOKENS and WEIGHTS in spec.splits()
    return spec.share(WEIGHTS).exchanges if linear else 0


# -- collectives between cores ------------------------------------------------------------------

COLLECTIVES = ("all_reduce", "all_gather")

# Isolated latencies come from the target. In a running model the cores do not arrive at the same
# time, and waiting is most of a small collective.


def collective_us(kind: str, size: int, ranks: int, target: Target) -> float:
    """Return microseconds of a collective; size: bytes of its whole result.

    kind: all_reduce or all_gather, which moves half as much.
    """
    moved = size if kind == "all_reduce" else size / 2
    alone = collective_alone_us(max(moved, 1.0), ranks, target)
    return alone + wait_us(ranks, target)


def wait_us(ranks: int, target: Target) -> float:
    """Return how long a core waits for the others: it grows with the steps of a tree of ranks."""
    steps = math.log2(ranks) / math.log2(WAIT_RANKS)
    return (WAIT_FACTOR - 1.0) * steps * collective_alone_us(1.0, ranks, target)


# -- the prices of many kernels, in processes of their own --------------------------------------


def price_many(
    requests: Iterable[tuple[KernelSpec, str]],
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Simulate the prices that the kernel cache lacks, each once, where they are worth processes.

    `simulated_us` finds them there, and simulates the others itself.

    requests: (spec, target). jobs: processes at once, by default one for each core. A kernel
    without a price, as no schedule is legal, is left to `simulated_us`, which raises the reason.
    """
    store = Store.for_kernels()
    if store.mode != "rw":
        return
    keys = {
        price_key(one, machine_target(name)): (one, name)
        for spec, name in requests
        for one in launches_of(spec)
    }
    if len(store.missing(list(keys))) >= WORTH_WORKERS:
        each(
            price_one, keys, lambda spec, target: request_text(spec, target, Options()),
            lambda one, _: f"simulated {one[0].short()} on {one[1]}",
            store=store, executor=None, jobs=jobs, progress=progress,
        )  # fmt: skip


def price_one(text: str) -> str:
    """Simulate the kernel of a request; return its microseconds. Raises where there is none."""
    spec, target, _ = request_of(json.loads(text))
    return str(simulated_us(spec, machine_target(target)))
