"""`nmm profile`: where the time of an NKI kernel goes; several kernels are put side by side."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nmm_compiler.cli import values
from nmm_compiler.cli.kernel_arguments import Arguments, arguments_of, variants
from nmm_compiler.cli.limited import run_limited
from nmm_compiler.cli.show import show, show_json

if TYPE_CHECKING:
    from nmm_compiler.simulator.timing.profile import Profile

_MODULES = (
    "ml_dtypes",
    "nmm_compiler.simulator.run",
    "nmm_compiler.simulator.timing.profile",
    "nmm_compiler.cli.comparison",
)


def profile(
    kernels: Annotated[list[str], typer.Argument(help="FILE.py:function, one or several")],
    arg: Arguments = None,
    target: values.Target = "trn2",
    grid: values.Grid = 1,
    as_json: values.AsJson = False,
    html: values.Html = None,
    trace: values.Trace = None,
    time_limit: values.TimeLimit = 60,
    memory_limit: values.MemoryLimit = 4,
) -> None:
    """Say where the time of FILE.py:kernel goes: by engine, source line and instruction.

    The kernel runs without data, so arrays need shape and type only. "critical us" is a line's
    share of the critical path; these figures add up to the latency. Each advice is the same run
    timed again with one thing changed. Several kernels, or one with several values of an argument,
    are put side by side. All figures are simulated.

    Example: nmm profile add.py:add_kernel --arg a=128x4096:bf16 --arg b=128x4096:bf16

    Example: nmm profile add.py:add_kernel --arg a=128x4096:bf16 --arg b=128x4096:bf16
    --arg block=128,512,2048
    """
    runs = [
        (" ".join(filter(None, (name if len(kernels) > 1 else "", label))), name, texts)
        for name in kernels
        for label, texts in variants(arg or [])
    ]

    def work() -> dict[str, Any]:
        from nmm_compiler.cli.comparison import comparison_parts
        from nmm_compiler.report.page import write_page
        from nmm_compiler.report.text import as_text
        from nmm_compiler.simulator.timing.profile import write_trace

        found = {
            label: _timed(name, texts, target, grid, quiet=as_json) for label, name, texts in runs
        }
        first, *others = found.values()
        data: Any = {label: one.to_dict() | one.where() for label, one in found.items()}
        if others:
            parts, page = comparison_parts(found), []
        else:
            ranked = first.advice()
            parts, page = first.parts_with_advice(ranked), [first.path_part(), *first.source()]
            data = data[runs[0][0]] | {"advice": [one.to_dict() for one in ranked]}
        if html is not None:
            write_page(f"{', '.join(kernels)} on {target}", [*parts, *page], html)
        if trace is not None and others:
            write_trace(found, trace)
        elif trace is not None:
            first.to_chrome_trace(trace)
        return {"text": as_text(parts), "json": data}

    said = run_limited(
        work, what=kernels[0], seconds=time_limit, gigabytes=memory_limit, modules=_MODULES
    )
    if as_json:
        show_json(said["json"])
        return
    show(said["text"])
    if html is not None:
        show(f"\nreport: {html}")
    if trace is not None:
        show(f"trace: {trace} (open it at ui.perfetto.dev)")


def _timed(kernel: str, texts: list[str], target: str, grid: int, *, quiet: bool) -> Profile:
    """Return the profile of a kernel, run without data. quiet: its prints go to standard error."""
    from nmm_compiler.simulator.run import simulate

    with contextlib.redirect_stdout(sys.stderr if quiet else sys.stdout):
        run = simulate(
            kernel, target=target, grid=grid, mode="timing", max_instructions=values.MOST,
            named=arguments_of(texts, 0, data=False),
        )  # fmt: skip
    assert run.profile is not None
    return run.profile
