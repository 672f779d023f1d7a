"""`make bench-ablation`: what each axis of the schedules is worth, on the layers of real models.

Every axis is switched off alone: candidates that use it are left out, and each kernel is chosen
again. A cell is the time of all layers' products of a model over that with all axes, in the
simulator; attention, norms, the head and launches are left out, which overstates effects. An axis
stays if a model of 1B or more gains 2 %, or where correctness or capacity need it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import typer
from kernel_specs import MODELS, rank
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
TILE = 32
"""Ranks are multiples of it."""
FP8: dict[str, Any] = {"dtype": "float8_e4m3", "x_dtype": "bfloat16", "scales": "channel"}
"""fp8 weights with a scale for each output, and bfloat16 x."""


def layer(model: str, form: str, m: int) -> list[KernelSpec]:
    """Return the kernels of one layer: its products without attention."""
    hidden, wide, q, kv = MODELS[model]
    if form != "low rank":
        fields = dict(FP8) if form == "fp8" else {}
        sizes = (hidden, q), (hidden, kv), (hidden, kv), (q, hidden)
        products = [MatmulSpec(m=m, k=k, n=n, **fields) for k, n in sizes]
        return [*products, GatedMLPSpec(m=m, k=hidden, n=wide, **fields)]
    pairs = tuple((rank(hidden, n, TILE), (n,)) for n in (q, kv, kv))
    return [
        LowRankSharedSpec(m=m, k=hidden, pairs=pairs),
        LowRankSpec(m=m, k=q, r=rank(q, hidden, TILE), n=hidden),
        GatedMLPSpec(m=m, k=hidden, n=wide, r=rank(hidden, wide, TILE)),
    ]


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
    found = math.inf
    for choice in ranked[: chooser.SIMULATED_CANDIDATES]:
        us, _, in_order = chooser.simulated(spec, choice.schedule, chip)
        found = min(found, max(us, in_order / (1 + chooser.IN_ORDER_SHARE)))
    return found


def main(
    models: str = "Llama-3.2-1B,Llama-3.1-8B,Qwen3-8B",
    m: str = ",".join(map(str, TOKENS)),
    axes: str = ",".join(AXES),
    target: str = "trn2",
) -> None:
    """Print what each axis is worth for the layers of models, with M tokens."""
    sizes = [int(count) for count in m.split(",")]
    layers = {
        f"{model} {form} m={count}": layer(model, form, count)
        for model in models.split(",") for form in FORMS for count in sizes
    }  # fmt: skip
    specs = list(dict.fromkeys(spec for parts in layers.values() for spec in parts))
    table = Table("axis off", "worst row", *layers)
    plain: dict[KernelSpec, float] = {}
    for axis in dict.fromkeys(["all", *axes.split(",")]):
        seen = {spec: time_of(spec, target, AXES[axis]) for spec in specs}
        plain = plain or seen
        shares = [max(seen[spec] / plain[spec] for spec in specs)]
        for parts in layers.values():
            shares.append(sum(map(seen.__getitem__, parts)) / sum(map(plain.__getitem__, parts)))
        table.add_row(axis, *(f"{100 * (share - 1):.1f} %" for share in shares))
    Console(width=200).print(table)


if __name__ == "__main__":
    typer.run(main)
