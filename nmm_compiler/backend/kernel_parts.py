"""The part of a page on a model's kernels: one roofline, then a section for each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nmm_compiler.codegen.build import Kernel
from nmm_compiler.codegen.choice_table import schedule_table
from nmm_compiler.codegen.choose import choose
from nmm_compiler.report.parts import Line, Part, Section
from nmm_compiler.report.text import counted
from nmm_compiler.simulator.timing.profile import Profile
from nmm_compiler.simulator.timing.profile_parts import (
    engine_table,
    listings,
    roofline_drawing,
    time_drawing,
)

_KERNELS_SHOWN = 16


def kernel_parts(kernels: Sequence[Any]) -> list[Part]:
    """Return the roofline with all kernels, then a folded section for each of the slowest ones."""
    if not kernels:
        return []
    built: list[Kernel] = sorted(kernels, key=lambda k: -k.profile().latency_us)
    profiles = [kernel.profile() for kernel in built]
    target = built[0].target
    points = [
        (kernel.spec.short(), *_place(profile))
        for kernel, profile in zip(built, profiles, strict=True)
    ]
    peak, rate = target.peak_flops_per_second(), target.memory_bytes_per_second
    parts: list[Part] = [
        Section("kernels on the roofline", (roofline_drawing(points, target.name, peak, rate),))
    ]
    shown = built[:_KERNELS_SHOWN]
    parts += [Section(kernel.spec.short(), _of_kernel(kernel), folded=True)
              for kernel in shown]  # fmt: skip
    if len(built) > len(shown):
        more = counted(len(built) - len(shown), "faster kernel")
        parts.append(Line(f"{more} not shown one by one", "note"))
    return parts


def _place(profile: Profile) -> tuple[float, float]:
    """Return (FLOPs per HBM byte, FLOPs per second) of a kernel."""
    moved = max(profile.hbm_read_bytes + profile.hbm_write_bytes, 1)
    return profile.flops / moved, profile.flops * 1e6 / (profile.latency_us or 1.0)


def _of_kernel(kernel: Kernel) -> tuple[Part, ...]:
    profile = kernel.profile()
    found = profile.timeline
    return (
        Line(profile.summary(), "headline"),
        Line(f"{kernel.spec} as {kernel.schedule}"),
        engine_table(found),
        time_drawing(found),
        Section("schedule and runners-up", _runners_up(kernel), folded=True),
        Section("source", tuple(listings(found)), folded=True),
    )


def _runners_up(kernel: Kernel) -> tuple[Part, ...]:
    """Return the schedules that were tried; they are timed anew where the kernel was cached."""
    choices = choose(kernel.spec, kernel.target)
    table = schedule_table(choices)
    if choices[0].schedule == kernel.schedule:
        return (table,)
    given = "chosen by the caller or for another budget of instructions"
    return (Line(f"this kernel runs {kernel.schedule}, {given}", "note"), table)
