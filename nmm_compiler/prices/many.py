"""Simulates the prices of many kernels at once, in processes of their own, each kernel once.

`price_many` puts the prices into the kernel cache, where `simulated_us` then finds them. Without a
cache that can be written they are simulated here, and this process keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from nmm_compiler.cache.store import Store
from nmm_compiler.codegen.build_many import each, request_of, request_text
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.codegen.workers import cores
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.options import Options
from nmm_compiler.prices.kernel import launches_of, price_key, simulated_us

Progress = Callable[[str, int, int], None]
"""Called with (what is done now, how many are done, how many there are)."""
# A worker takes 1.4 CPU s before its first kernel.
_WORTH_WORKERS = 8


def price_many(
    requests: Iterable[tuple[KernelSpec, str]],
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Simulate the prices that the cache lacks; return how many kernels were simulated.

    requests: (spec, target). jobs: processes at once, by default one for each core. A kernel
    without a price, as no schedule is legal, is left to `simulated_us`, which raises the reason.
    """
    missing = _missing(requests)
    count = min(jobs or cores(), len(missing))
    if count >= 2 and len(missing) >= _WORTH_WORKERS and Store.for_kernels().mode == "rw":
        each(
            price_one, missing, _text, lambda one, _: f"simulated {one[0].short()} on {one[1]}",
            whole=len(missing), executor=None, jobs=count, progress=progress,
        )  # fmt: skip
        return len(missing)
    for done, (spec, target) in enumerate(missing):
        if progress is not None:
            progress(f"simulating {spec.short()} on {target}", done, len(missing))
        price_one(_text(spec, target))
    return len(missing)


def _text(spec: KernelSpec, target: str) -> str:
    return request_text(spec, target, Options())


def price_one(text: str) -> str:
    """Simulate the kernel of a request; return its microseconds as JSON, null without a kernel."""
    spec, target, _ = request_of(json.loads(text))
    try:
        return json.dumps(simulated_us(spec, target))
    except NmmError:
        return "null"


def _missing(requests: Iterable[tuple[KernelSpec, str]]) -> list[tuple[KernelSpec, str]]:
    """Return each launch whose price the cache lacks, once, those with the most work first."""
    wanted = {(one, target): None for spec, target in requests for one in launches_of(spec)}
    keys = {price_key(spec, machine_target(name)): (spec, name) for spec, name in wanted}
    store = Store.for_kernels()
    absent = list(keys) if store.mode in ("off", "require") else store.missing(list(keys))
    return sorted((keys[key] for key in absent), key=lambda one: -one[0].flops())
