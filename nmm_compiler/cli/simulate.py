"""`nmm simulate`: run any NKI kernel file on a CPU, with strict checks and predicted timing."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nmm_compiler.cli import values
from nmm_compiler.cli.kernel_arguments import Arguments, arguments_of, save
from nmm_compiler.cli.limited import run_limited
from nmm_compiler.cli.show import show, show_json
from nmm_compiler.errors import OptionTypeError
from nmm_compiler.report.parts import Line

_MODULES = (
    "ml_dtypes",
    "nmm_compiler.simulator.run",
    "nmm_compiler.simulator.timing.profile",
    "nmm_compiler.cli.reference_check",
)


def _modes() -> tuple[str, ...]:
    from nmm_compiler.simulator.run import MODES

    return MODES


def simulate(
    kernel: Annotated[str, typer.Argument(help="FILE.py:function, an NKI kernel")],
    arg: Arguments = None,
    target: values.Target = "trn2",
    grid: values.Grid = 1,
    mode: Annotated[
        str, values.choice_option("mode", _modes, "full, functional or timing")
    ] = "full",
    strict: Annotated[bool, typer.Option(help="--no-strict records warnings instead")] = True,
    seed: values.Seed = 0,
    reference: Annotated[
        str | None, typer.Option(help="FILE.py:function that gives the right outputs")
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(
            help="largest error, as a share of the reference's largest value; by default what "
            "rounding explains",
            min=0,
        ),
    ] = None,
    save_to: Annotated[
        Path | None, values.output_option("--save", help_="write the outputs here, as .npz")
    ] = None,
    as_json: values.AsJson = False,
    html: values.Html = None,
    trace: values.Trace = None,
    time_limit: values.TimeLimit = 15,
    memory_limit: values.MemoryLimit = 4,
    max_instructions: values.MaxInstructions = 10_000_000,
) -> None:
    """Run FILE.py:kernel in the simulator and print outputs, profile and warnings.

    What the kernel prints is shown. The file is executed as Python, with all rights of the user,
    in a process of its own whose time, memory and instructions are limited. Do not run files that
    you do not trust.

    Example: nmm simulate add.py:add_kernel --arg a=128x512:bf16 --arg b=@b.npy
    --reference add.py:add_in_numpy --save out.npz
    """
    needs_data = [n for n, v in (("reference", reference), ("save", save_to)) if v is not None]
    if mode == "timing" and needs_data:
        raise OptionTypeError("mode", mode, f"full or functional: --{needs_data[0]} needs outputs")
    needs_time = [n for n, v in (("html", html), ("trace", trace)) if v is not None]
    if mode == "functional" and needs_time:
        raise OptionTypeError("mode", mode, f"full or timing: --{needs_time[0]} needs the profile")

    def work() -> dict[str, Any]:
        from nmm_compiler.cli import reference_check as check
        from nmm_compiler.report.page import write_page
        from nmm_compiler.simulator.run import simulate as run

        arguments = arguments_of(arg or [], seed, data=mode != "timing")
        wanted = None if reference is None else check.reference_of(reference, arguments)
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
            result = run(
                kernel, target=target, grid=grid, mode=mode, strict=strict,
                max_instructions=max_instructions, named=arguments,
            )  # fmt: skip
        agreements: tuple[check.Agreement, ...] = ()
        if wanted is not None and result.outputs is not None:
            arrays = [v for v in arguments.values() if hasattr(v, "dtype")]
            share = check.default_rtol(result.outputs, arrays) if rtol is None else rtol
            agreements = check.compare(result.outputs, wanted, share)
        notes = [str(agreement) for agreement in agreements]
        for path, what in ((save_to, "outputs"), (trace, "trace"), (html, "report")):
            if path is not None:
                notes.append(f"{what}: {path}" + _open_with(what))
        if save_to is not None and result.outputs is not None:
            save(save_to, result.outputs)
        if result.profile is not None:
            if trace is not None:
                result.profile.to_chrome_trace(trace)
            if html is not None:
                write_page(f"{kernel} on {target}", result.report(), html)
        return {
            "text": result.overview(),
            "notes": notes,
            "passed": all(agreement.passed for agreement in agreements),
            "json": result.to_dict() | {"reference": [a.to_dict() for a in agreements]},
        }

    found = run_limited(
        work, what=kernel, seconds=time_limit, gigabytes=memory_limit, modules=_MODULES
    )
    if as_json:
        show_json(found["json"])
    else:
        show(found["text"])
        for note in found["notes"]:
            show([Line(note)], style="red" if "DIFFERS" in note else "")
    if not found["passed"]:
        raise typer.Exit(1)


def _open_with(what: str) -> str:
    return " (open it at ui.perfetto.dev)" if what == "trace" else ""
