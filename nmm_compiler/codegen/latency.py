"""The predicted time of a kernel on a target, before it is built.

`ways_us` compares one call with two products and one dense product, for every decision of the
passes and of `compress`; `pays_from` returns the token count from which low rank pays. Both take a
price of one kernel, PRICES by name: "closed_form", from the spec alone, is the default of the
passes; "simulated", one simulation per spec and target, is that of whole-model predictions; "tuned"
takes the schedules that `tune` found, where the cache has them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

from nmm_compiler.cache.key import Key
from nmm_compiler.cache.store import Store
from nmm_compiler.codegen.choose import choose, rank, simulated
from nmm_compiler.codegen.code_digests import code_fields
from nmm_compiler.codegen.estimate import estimate_us
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.codegen.tuned import tuned_choice
from nmm_compiler.errors import CapacityError, SpecError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.schedule import KernelSchedule
from nmm_compiler.options import INSTRUCTION_BUDGET
from nmm_compiler.records import Record
from nmm_compiler.targets import Target, get
from nmm_compiler.targets.this_machine import differences

_PRICE = "price.txt"


LAUNCH_GAP_US = 2.0
"""Time from one kernel to the next in one program; chosen on published decodes
(docs/latency.md)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ways(Record):
    """Predicted microseconds of one computation: one call, its products one by one, one dense."""

    fused: float
    separate: float
    dense: float

    @property
    def best(self) -> str:
        """The fastest way: "fused", "separate" or "dense"; the earlier one where two are equal."""
        return min(("fused", "separate", "dense"), key=lambda way: getattr(self, way))


Price = Callable[[KernelSpec, str | Target], float]


def calls_us(specs: Iterable[KernelSpec], target: str | Target, price: Price) -> float:
    """Return the time of kernels one after the other, with a gap for each.

    Infinite where one of them has no legal schedule.
    """
    try:
        return sum(price(spec, target) + LAUNCH_GAP_US for spec in specs)
    except (CapacityError, SpecError):
        return math.inf


def ways_us(spec: KernelSpec, target: str | Target, price: Price | None = None) -> Ways:
    """Return the time of `spec` as one call, as separate products, and dense, gaps included.

    dense: the faster one of one product for each result and one kernel for all.

    price: microseconds of one kernel; default `simulated_us`. A way without a legal schedule takes
    infinitely long.
    """
    one = price or simulated_us
    separate, dense = spec.as_products()
    whole = spec.as_one_dense()
    kinds = ((spec,), separate, dense, *(() if whole is None else ((whole,),)))
    fused, products, *denses = (calls_us(specs, target, one) for specs in kinds)
    return Ways(fused=fused, separate=products, dense=min(denses))


BREAK_EVEN_TOKENS = (1, 4, 16, 64, 128, 256, 512)


def pays_from(spec: KernelSpec, target: str | Target, price: Price | None = None) -> int | None:
    """Return the token count from which low rank beats dense at every larger one; None: never.

    Counts of BREAK_EVEN_TOKENS are tried.
    """
    first: int | None = None
    for tokens in reversed(BREAK_EVEN_TOKENS):
        found = ways_us(_with_tokens(spec, tokens), target, price)
        if min(found.fused, found.separate) >= found.dense:
            break
        first = tokens
    return first


MOST_TOKENS = 512
"""Tokens that `simulated_us` runs at once: longer calls are launches of that many, which keeps each
within the budget of instructions, and 512 tokens are enough for the weights to be read in time."""
FEW_TOKENS = 128
"""Below this, `simulated_us` searches like `build_kernel`: small kernels simulate fast."""


def simulated_us(spec: KernelSpec, target: str | Target) -> float:
    """Return the simulated microseconds of a kernel, from its first instruction to its last result.

    Below FEW_TOKENS tokens the schedule is the one that `build_kernel` takes; above it is the one
    that the closed form ranks first, so that a built kernel is no slower in the simulator. A call
    of more than MOST_TOKENS tokens a core is as many calls of that many, and one of the rest, where
    its family can split tokens. Prices are kept in the kernel cache. Raises CapacityError or
    SpecError, with the numbers, when no schedule is legal.
    """
    return _simulated_us(spec, machine_target(target))


@functools.lru_cache(maxsize=4096)
def _simulated_us(spec: KernelSpec, chip: Target) -> float:
    launches = launches_of(spec)
    if launches != {spec: 1}:
        return sum(count * _simulated_us(one, chip) for one, count in launches.items())
    spec.check(chip)
    store = Store.for_kernels()
    if store.mode in ("off", "require"):
        return _simulate(spec, chip)
    key = price_key(spec, chip)
    entry = store.get_or_build(key, lambda: {_PRICE: repr(_simulate(spec, chip))})
    return float(entry.files[_PRICE])


def launches_of(spec: KernelSpec) -> dict[KernelSpec, int]:
    """Return the kernels that `simulated_us` simulates for a call, and how often each runs."""
    tokens, most = int(getattr(spec, "m", 0)), MOST_TOKENS * spec.lnc
    if tokens <= most or not spec.splits_tokens:
        return {spec: 1}
    blocks, rest = divmod(tokens, most)
    made = {_with_tokens(spec, most): blocks}
    return made | ({_with_tokens(spec, rest): 1} if rest else {})


def price_key(spec: KernelSpec, chip: Target) -> Key:
    """Return the key in the kernel cache of the price that `simulated_us` gives one launch."""
    return Key.make(
        {
            "price": "simulated_us",
            "spec": spec.digest(64),
            "target": chip.name,
            "machine": differences(chip, get(chip.name)),
            **code_fields(),
        }
    )


def tuned_us(spec: KernelSpec, target: str | Target) -> float:
    """Return the simulated microseconds of the schedule that `tune` found for a kernel.

    A kernel whose tuning is not in the cache on disk has the price of `simulated_us`. Long calls
    are split as there.
    """
    chip, tokens = machine_target(target), int(getattr(spec, "m", 0))
    best = tuned_choice(spec, chip, INSTRUCTION_BUDGET, Store.for_kernels())
    if best is not None and best.simulated_us is not None:
        return best.simulated_us
    most = MOST_TOKENS * spec.lnc
    if tokens <= most or not spec.splits_tokens:
        return simulated_us(spec, target)
    blocks, rest = divmod(tokens, most)
    each = tuned_us(_with_tokens(spec, most), target)
    return blocks * each + (tuned_us(_with_tokens(spec, rest), target) if rest else 0.0)


PRICES: dict[str, Price] = {
    "closed_form": estimate_us, "simulated": simulated_us, "tuned": tuned_us,
}  # fmt: skip


def price_on(name: str, lnc: int = 1) -> Price:
    """Return a price of PRICES, of kernels that run on so many physical cores.

    A kernel that two cores cannot share is priced on one.
    """
    return PRICES[name] if lnc == 1 else functools.partial(_on_cores, PRICES[name], lnc)


def _on_cores(price: Price, lnc: int, spec: KernelSpec, target: str | Target) -> float:
    shared = dataclasses.replace(spec, lnc=lnc)
    return price(shared if shared.splits() else spec, target)


def _simulate(spec: KernelSpec, chip: Target) -> float:
    if int(getattr(spec, "m", 0)) < FEW_TOKENS:
        best = choose(spec, chip)[0]
        if best.simulated_us is not None:
            return best.simulated_us
        return simulated(spec, best.schedule, chip)[0]
    firsts: dict[str, KernelSchedule] = {}  # of each way in which cores share the kernel
    for choice in rank(spec, chip):
        firsts.setdefault(choice.schedule.split, choice.schedule)
    return min(simulated(spec, schedule, chip)[0] for schedule in firsts.values())


def _with_tokens(spec: KernelSpec, tokens: int) -> KernelSpec:
    return dataclasses.replace(spec, m=tokens)
