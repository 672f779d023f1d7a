"""`nmm profile`: where the time of an NKI kernel goes, and what would save some.

`nmm compare`: two kernels, or one with several values of an argument, side by side.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nmm_compiler.cli import values
from nmm_compiler.cli.kernel_arguments import Arguments, arguments_of, variants
from nmm_compiler.cli.limited import run_limited
from nmm_compiler.cli.show import show, show_json
from nmm_compiler.errors import OptionTypeError

if TYPE_CHECKING:
    from nmm_compiler.report.parts import Part
    from nmm_compiler.simulator.timing.profile import Profile

_MODULES = (
    "ml_dtypes",
    "nmm_compiler.simulator.run",
    "nmm_compiler.simulator.timing.profile",
)
_LINES_SHOWN = 12


def profile(
    kernel: Annotated[str, typer.Argument(help="FILE.py:function, an NKI kernel")],
    arg: Arguments = None,
    target: values.Target = "trn2",
    grid: values.Grid = 1,
    advice: Annotated[bool, typer.Option(help="time what changes would save")] = True,
    path: Annotated[
        bool, typer.Option("--path", help="print each step of the critical path")
    ] = False,
    as_json: values.AsJson = False,
    html: values.Html = None,
    trace: values.Trace = None,
    time_limit: values.TimeLimit = 60,
    memory_limit: values.MemoryLimit = 4,
    max_instructions: values.MaxInstructions = 10_000_000,
) -> None:
    """Say where the time of FILE.py:kernel goes: by engine, source line and instruction.

    The kernel runs without data, so arrays need shape and type only. "critical us" is a line's
    share of the critical path; these figures add up to the latency. Each advice is the same run
    timed again with one thing changed. All figures are simulated.

    Example: nmm profile add.py:add_kernel --arg a=128x4096:bf16 --arg b=128x4096:bf16
    """

    def work() -> dict[str, Any]:
        from nmm_compiler.report.page import write_page

        found = _timed(kernel, arg or [], target, grid, max_instructions, quiet=as_json)
        ranked = found.advice() if advice else ()
        parts = found.parts_with_advice(ranked) if advice else found.parts()
        if path:
            parts = [*parts, found.path_part()]
        if html is not None:
            write_page(f"{kernel} on {target}", [*parts, *found.source()], html)
        if trace is not None:
            found.to_chrome_trace(trace)
        return {
            "text": _text(parts),
            "json": found.to_dict() | found.where() | {"advice": [a.to_dict() for a in ranked]},
        }

    found = run_limited(
        work, what=kernel, seconds=time_limit, gigabytes=memory_limit, modules=_MODULES
    )
    _print(found, as_json, html, trace)


def compare(
    kernels: Annotated[list[str], typer.Argument(help="FILE.py:function, one or several")],
    arg: Arguments = None,
    target: values.Target = "trn2",
    grid: values.Grid = 1,
    as_json: values.AsJson = False,
    html: values.Html = None,
    trace: values.Trace = None,
    time_limit: values.TimeLimit = 60,
    memory_limit: values.MemoryLimit = 4,
    max_instructions: values.MaxInstructions = 10_000_000,
) -> None:
    """Time several kernels, or one with several values of an argument, and print them side by side.

    --trace writes one file with all timelines, one below the other.

    Example: nmm compare a.py:kernel b.py:kernel --arg x=128x4096:bf16

    Example: nmm compare add.py:add_kernel --arg a=128x4096:bf16 --arg b=128x4096:bf16
    --arg block=128,512,2048
    """
    runs = [
        (" ".join(filter(None, (name if len(kernels) > 1 else "", label))), name, texts)
        for name in kernels
        for label, texts in variants(arg or [])
    ]
    if len(runs) < 2:
        raise OptionTypeError(
            "kernels", kernels[0], "two kernels, or one and an --arg with several values, n=1,2"
        )

    def work() -> dict[str, Any]:
        from nmm_compiler.cli.comparison import comparison_parts
        from nmm_compiler.report.page import write_page
        from nmm_compiler.simulator.timing.profile import write_trace

        found = {
            label: _timed(name, texts, target, grid, max_instructions, quiet=as_json)
            for label, name, texts in runs
        }
        parts = comparison_parts(found, _LINES_SHOWN)
        if html is not None:
            write_page(f"{len(found)} kernels on {target}", comparison_parts(found, None), html)
        if trace is not None:
            write_trace(found, trace)
        profiles = {label: one.to_dict() | one.where() for label, one in found.items()}
        return {"text": _text(parts), "json": profiles}

    found = run_limited(
        work, what=kernels[0], seconds=time_limit, gigabytes=memory_limit, modules=_MODULES
    )
    _print(found, as_json, html, trace)


def _timed(
    kernel: str, texts: list[str], target: str, grid: int, most: int, *, quiet: bool
) -> Profile:
    """Return the profile of a kernel, run without data."""
    from nmm_compiler.simulator.run import simulate

    with contextlib.redirect_stdout(sys.stderr if quiet else sys.stdout):
        run = simulate(
            kernel, target=target, grid=grid, mode="timing", max_instructions=most,
            named=arguments_of(texts, 0, data=False),
        )  # fmt: skip
    assert run.profile is not None
    return run.profile


def _text(parts: list[Part]) -> str:
    from nmm_compiler.report.text import as_text

    return as_text(parts)


def _print(found: dict[str, Any], as_json: bool, html: Path | None, trace: Path | None) -> None:
    if as_json:
        show_json(found["json"])
        return
    show(found["text"])
    if html is not None:
        show(f"\nreport: {html}")
    if trace is not None:
        show(f"trace: {trace} (open it at ui.perfetto.dev)")
