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
from nmm_compiler.report.parts import Line

_MODULES = (
    "ml_dtypes",
    "nmm_compiler.simulator.run",
    "nmm_compiler.simulator.timing.profile",
    "nmm_compiler.cli.reference_check",
)


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
        from nmm_compiler.simulator.run import simulate as run

        arguments = arguments_of(arg or [], 0, data=True)
        wanted = None if reference is None else check.reference_of(reference, arguments)
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
            result = run(
                kernel, target=target, grid=grid, max_instructions=values.MOST, named=arguments
            )
        assert result.outputs is not None
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

    answer = run_limited(
        work, what=kernel, seconds=time_limit, gigabytes=memory_limit, modules=_MODULES
    )
    if as_json:
        show_json(answer["json"])
    else:
        show(answer["text"])
        for note in answer["notes"]:
            show([Line(note)], style="red" if "DIFFERS" in note else "")
        if save_to is not None:
            show(f"outputs: {save_to}")
    if not answer["passed"]:
        raise typer.Exit(1)
