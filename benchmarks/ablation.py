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
from kernel_specs import listed
from rich.console import Console
from rich.table import Table

from nmm_compiler.codegen import choose as chooser
from nmm_compiler.errors import CapacityError, SpecError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.targets import get

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
    "x by DMA": lambda s: dataclasses.replace(s, x_load="tensor", banks=6)
                          if s.x_load == "dma" else s,
    "down (patches)": changed(down=1),
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
    m: str = "1,16,512",
    axes: str = ",".join(AXES),
    target: str = "trn2",
) -> None:
    """Print what each axis is worth for the layers of models, with M tokens."""
    sizes = [int(count) for count in m.split(",")]
    layers: dict[str, list[KernelSpec]] = {}
    for name, spec in listed("ablation", sizes, models.split(",")):
        layers.setdefault(name, []).append(spec)
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
