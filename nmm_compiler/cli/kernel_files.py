"""`nmm simulate` and `nmm profile`: any NKI kernel file on a CPU, its results or its time.

A file is executed as Python, in a process of its own whose time and memory are limited.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from nmm_compiler.cli import values
from nmm_compiler.cli.kernel_arguments import Arguments, arguments_of, save, variants
from nmm_compiler.cli.limited import run_limited
from nmm_compiler.cli.show import show, show_json
from nmm_compiler.report.parts import Line

_MODULES = ("ml_dtypes", "nmm_compiler.simulator.run", "nmm_compiler.simulator.timing.profile")


def simulate(
    kernel: Annotated[str, typer.Argument(help="FILE.py:function, an NKI kernel")],
    arg: Arguments = None,
    target: values.Target = "trn2",
    grid: values.Grid = 1,
    reference: Annotated[
        str | None, typer.Option(help="FILE.py:function that gives the right outputs")
    ] = None,
    save_to: Annotated[
        Path | None, values.output_option("--save", help_="write the outputs here, as .npz")
    ] = None,
    as_json: values.AsJson = False,
    time_limit: values.TimeLimit = 15,
    memory_limit: values.MemoryLimit = 4,
) -> None:
    """Run FILE.py:kernel in the simulator and print outputs, profile and warnings.

    What the kernel prints is shown. The file is executed as Python, with all rights of the user,
    in a process of its own whose time and memory are limited. Do not run files that you do not
    trust. Outputs agree with the reference within what rounding explains.

    Example: nmm simulate add.py:add_kernel --arg a=128x512:bf16 --arg b=@b.npy
    --reference add.py:add_in_numpy --save out.npz
    """

    def work() -> dict[str, Any]:
        from nmm_compiler.cli import reference_check as check

        arguments = arguments_of(arg or [], 0, data=True)
        wanted = None if reference is None else check.reference_of(reference, arguments)
        result = _run(kernel, arguments, target, grid, quiet=as_json)
        agreements = []
        if wanted is not None:
            arrays = [v for v in arguments.values() if hasattr(v, "dtype")]
            agreements = check.compare(result.outputs, wanted, arrays)
        if save_to is not None:
            save(save_to, result.outputs)
        return {
            "text": result.overview(),
            "notes": [check.said(one) for one in agreements],
            "passed": all(one["passed"] for one in agreements),
            "json": result.to_dict() | {"reference": agreements},
        }

    answer = _answer(work, kernel, time_limit, memory_limit, as_json)
    if not as_json:
        for note in answer["notes"]:
            show([Line(note)], style="red" if "DIFFERS" in note else "")
        if save_to is not None:
            show(f"outputs: {save_to}")
    if not answer["passed"]:
        raise typer.Exit(1)


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

        profiles: dict[str, Any] = {}
        for label, name, texts in runs:
            shapes = arguments_of(texts, 0, data=False)
            profiles[label] = _run(name, shapes, target, grid, quiet=as_json, mode="timing").profile
        first, *others = profiles.values()
        data: Any = {label: one.to_dict() | one.where() for label, one in profiles.items()}
        if others:
            parts = page = comparison_parts(profiles)
        else:
            ranked = first.advice()
            parts, page = first.parts(ranked), first.page_parts(ranked)
            data = data[runs[0][0]] | {"advice": [one.to_dict() for one in ranked]}
        if html is not None:
            write_page(f"{', '.join(kernels)} on {target}", page, html)
        if trace is not None:
            write_trace(profiles, trace)
        return {"text": as_text(parts), "json": data}

    _answer(work, kernels[0], time_limit, memory_limit, as_json)
    if html is not None and not as_json:
        show(f"\nreport: {html}")
    if trace is not None and not as_json:
        show(f"trace: {trace} (open it at ui.perfetto.dev)")


def _run(
    kernel: str, arguments: dict[str, Any], target: str, grid: int, *, quiet: bool, **more: Any
) -> Any:
    """Return the simulation of a kernel. quiet: what it prints goes to standard error."""
    from nmm_compiler.simulator.run import simulate as run

    with contextlib.redirect_stdout(sys.stderr if quiet else sys.stdout):
        return run(
            kernel, target=target, grid=grid, max_instructions=values.MOST, named=arguments, **more
        )


def _answer(
    work: Callable[[], dict[str, Any]], what: str, seconds: float, gigabytes: float, as_json: bool
) -> dict[str, Any]:
    """Run the work within its limits, print its text or its JSON, and return what it returned."""
    answer: dict[str, Any] = run_limited(
        work, what=what, seconds=seconds, gigabytes=gigabytes, modules=_MODULES
    )
    show_json(answer["json"]) if as_json else show(answer["text"])
    return answer
