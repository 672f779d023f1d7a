"""`make bench-ablation`: what each axis of the schedules is worth, on the layers of real models.

Every axis is switched off alone: candidates that use it are left out, and each kernel is chosen
again. A cell is the time of all layers' products of a model over that with all axes, in the
simulator; attention, norms, the head and launches are left out, which overstates effects. An axis
stays if a model of 1B or more gains 2 %, or where correctness or capacity need it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from model_sizes import MODELS, RATIO
from rich.console import Console
from rich.table import Table

from nmm_compiler.codegen import choose as chooser
from nmm_compiler.errors import CapacityError, SpecError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.linear.specs import (
    GatedMLPSpec,
    LowRankSharedSpec,
    LowRankSpec,
    MatmulSpec,
)
from nmm_compiler.targets import get

TOKENS = (1, 16, 512)
FORMS = ("low rank", "dense", "fp8")
FP8: dict[str, Any] = {"dtype": "float8_e4m3", "x_dtype": "bfloat16", "scales": "channel"}
"""fp8 weights with a scale for each output, and bfloat16 x."""


def rank(k: int, n: int) -> int:
    """Return the rank that keeps 1 - RATIO of the parameters, a multiple of 32."""
    return 32 * max(1, round(k * n * (1 - RATIO) / ((k + n) * 32)))


def layer(model: str, form: str, m: int) -> dict[str, KernelSpec]:
    """Return the kernels of one layer: its products without attention."""
    hidden, wide, q, kv = MODELS[model]
    if form != "low rank":
        fields = dict(FP8) if form == "fp8" else {}
        outputs = {"q": (hidden, q), "k": (hidden, kv), "v": (hidden, kv), "o": (q, hidden)}
        made: dict[str, KernelSpec] = {
            name: MatmulSpec(m=m, k=k, n=n, **fields) for name, (k, n) in outputs.items()
        }
        return made | {"mlp": GatedMLPSpec(m=m, k=hidden, n=wide, **fields)}
    pairs = tuple((rank(hidden, n), (n,)) for n in (q, kv, kv))
    return {
        "qkv": LowRankSharedSpec(m=m, k=hidden, pairs=pairs),
        "o": LowRankSpec(m=m, k=q, r=rank(q, hidden), n=hidden),
        "mlp": GatedMLPSpec(m=m, k=hidden, n=wide, r=rank(hidden, wide)),
    }


def rows(models: list[str], tokens: list[int]) -> Iterator[tuple[str, str, int, str, KernelSpec]]:
    """Yield (model, form, tokens, part, spec) of every kernel."""
    for model in models:
        for form in FORMS:
            for m in tokens:
                for part, spec in layer(model, form, m).items():
                    yield model, form, m, part, spec


Change = Callable[[Any], Any]
"""A schedule without an axis, None where it cannot be without."""


def changed(**fields: Any) -> Change:
    """Return what gives one field its plain value."""
    return lambda schedule: dataclasses.replace(schedule, **fields)


def only(keep: Callable[[Any], bool]) -> Change:
    """Return what leaves schedules out."""
    return lambda schedule: schedule if keep(schedule) else None


AXES: dict[str, Change] = {
    "all": changed(),
    "own_queue": changed(own_queue=False),
    "ahead": changed(ahead=False),
    "order": changed(order="strided_rows"),
    "x by DMA": lambda s: dataclasses.replace(s, x_load="tensor", banks=6, sums=min(s.sums, 6),
                                              order="strided_rows") if s.x_load == "dma" else s,
    "down (patches)": changed(down=1, sums=4),
    "sums": changed(sums=8),
    "load_bytes": changed(load_bytes=8192),
    "turned": only(lambda s: not s.turned),
    "block": only(lambda s: s.block <= 1024),
    "u_block": only(lambda s: s.u_block <= 512),
    "m_block": only(lambda s: s.m_block <= 512),
}  # fmt: skip
"""Name -> what a schedule becomes without the axis."""


def time_of(spec: KernelSpec, target: str, change: Change) -> float:
    """Return the simulated microseconds of the best of six schedules without an axis."""
    chip, made = get(target), {}
    for choice in chooser.rank(spec, chip):
        schedule = change(choice.schedule)
        if schedule is not None and schedule not in made:
            with contextlib.suppress(CapacityError, SpecError):
                schedule.check(spec, chip)
                made[schedule] = chooser.priced(spec, schedule, chip)
    ranked = sorted(made.values(), key=lambda choice: choice.cost_us)
    tried = []
    for choice in ranked[: chooser.SIMULATED_CANDIDATES]:
        us, _, in_order = chooser.simulated(spec, choice.schedule, chip)
        tried.append(max(us, in_order / (1 + chooser.IN_ORDER_SHARE)))
    return min(tried, default=math.inf)


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="Llama-3.2-1B,Llama-3.1-8B,Qwen3-8B")
    parser.add_argument("--m", default=",".join(map(str, TOKENS)))
    parser.add_argument("--axes", default=",".join(AXES))
    parser.add_argument("--target", default="trn2")
    given = parser.parse_args()
    cases = list(rows(given.models.split(","), [int(m) for m in given.m.split(",")]))
    names = list(dict.fromkeys((model, form, m) for model, form, m, _, _ in cases))
    table = Table("axis off", "worst row", *(f"{a} {b} m={m}" for a, b, m in names))
    plain: dict[KernelSpec, float] = {}
    for axis in dict.fromkeys(["all", *given.axes.split(",")]):
        seen: dict[KernelSpec, float] = {}
        for *_, spec in cases:
            if spec not in seen:
                seen[spec] = time_of(spec, given.target, AXES[axis])
        plain = plain or seen
        worst = max(seen[spec] / plain[spec] for spec in seen)
        shares = []
        for name in names:
            own = [spec for *key, _, spec in cases if tuple(key) == name]
            total = sum(map(seen.__getitem__, own)) / sum(map(plain.__getitem__, own))
            shares.append(f"{100 * (total - 1):.1f} %")
        table.add_row(axis, f"{100 * (worst - 1):.1f} %", *shares)
    Console(width=200).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
