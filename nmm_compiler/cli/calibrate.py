"""`nmm calibrate`: measured against predicted times of a device -> a target of that machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from nmm_compiler import outputs
from nmm_compiler.cli import values
from nmm_compiler.cli.show import show, show_json
from nmm_compiler.report.parts import Line


def calibrate(
    verdicts: Annotated[
        Path,
        typer.Argument(
            help="the file that nmm doctor --device wrote", metavar="FILE", parser=values.input_file
        ),
    ],
    out: Annotated[
        Path | None,
        values.output_option("--out", "-o", help_="write the target here: a name ending in .json"),
    ] = None,
    as_json: values.AsJson = False,
) -> None:
    """Fit a target's constants to the times of a device, engine by engine.

    Every command with --target takes the file that --out writes, and so does the option target of
    torch.compile.

    Example: nmm calibrate verdicts.json --out my-trn2.json
    """
    from nmm_compiler.runtime.calibrated_target import calibrate as fit
    from nmm_compiler.targets.this_machine import FILE

    if out is not None and not out.name.endswith(FILE):
        raise typer.BadParameter(f"--out {out}: a target's file ends in {FILE}")
    found = fit(verdicts)
    if out is not None:
        outputs.write_text(out, json.dumps(found.file(), indent=1) + "\n")
    if as_json:
        show_json(found.to_dict())
    else:
        use = [Line(f"use it with --target {out}")] if out is not None else []
        show([*found.parts(), *use])
