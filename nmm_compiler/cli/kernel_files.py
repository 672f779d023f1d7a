"""NKI kernel files: `nmm simulate` for results, `nmm profile` for time, `nmm lint` for errors.

A file is executed as Python (not by lint). These commands run in a process of their own whose time
and memory are limited (`commands.py`, `limited.py`).
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from nmm_compiler.cli import values
from nmm_compiler.nki_api.lint import API_VERSION, VERSIONS, lint_file
from nmm_compiler.report.page import write_page
from nmm_compiler.report.parts import Code
from nmm_compiler.report.text import counted

Arguments = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        help="NAME=SHAPE:DTYPE, a random array; NAME=@FILE.npy; or NAME=VALUE, a constant",
    ),
]


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
) -> values.Answer:
    """Run FILE.py:kernel in the simulator and print outputs, profile and warnings.

    What the kernel prints is shown. The file is executed as Python, with all rights of the user,
    in a process of its own whose time and memory are limited. Do not run files that you do not
    trust. Outputs agree with the reference within what rounding explains.

    Example: nmm simulate add.py:add_kernel --arg a=128x512:bf16 --arg b=@b.npy
    --reference add.py:add_in_numpy --save out.npz
    """
    from nmm_compiler.cli import kernel_runs as runs

    arguments = runs.arguments_of(arg or [], 0, data=True)
    wanted = None if reference is None else runs.reference_of(reference, arguments)
    result = runs.run(kernel, arguments, target, grid)
    agreements = []
    if wanted is not None:
        arrays = [v for v in arguments.values() if hasattr(v, "dtype")]
        agreements = runs.compare(result.outputs, wanted, arrays)
    shown = [result.overview(), *map(runs.said, agreements)]
    if save_to is not None:
        runs.save(save_to, result.outputs)
        shown.append(f"outputs: {save_to}")
    passed = all(one["passed"] for one in agreements)
    return values.Answer(result.to_dict() | {"reference": agreements}, shown, passed)


def profile(
    kernels: Annotated[list[str], typer.Argument(help="FILE.py:function, one or several")],
    arg: Arguments = None,
    target: values.Target = "trn2",
    grid: values.Grid = 1,
    html: values.Html = None,
    trace: values.Trace = None,
) -> values.Answer:
    """Say where the time of FILE.py:kernel goes: by engine, source line and instruction.

    The kernel runs without data, so arrays need shape and type only. "critical us" is a line's
    share of the critical path; these figures add up to the latency. Each advice is the same run
    timed again with one thing changed. Several kernels, or one with several values of an argument,
    are put side by side. All figures are simulated.

    Example: nmm profile add.py:add_kernel --arg a=128x4096:bf16 --arg b=128x4096:bf16

    Example: nmm profile add.py:add_kernel --arg a=128x4096:bf16 --arg b=128x4096:bf16
    --arg block=128,512,2048
    """
    from nmm_compiler.cli import kernel_runs
    from nmm_compiler.simulator.timing.profile import write_trace

    runs = [
        (" ".join(filter(None, (name if len(kernels) > 1 else "", label))), name, texts)
        for name in kernels
        for label, texts in variants(arg or [])
    ]

    profiles: dict[str, Any] = {}
    for label, name, texts in runs:
        shapes = kernel_runs.arguments_of(texts, 0, data=False)
        profiles[label] = kernel_runs.run(name, shapes, target, grid, mode="timing").profile
    first, *others = profiles.values()
    data: Any = {label: one.to_dict() | one.where() for label, one in profiles.items()}
    if others:
        parts = page = kernel_runs.comparison_parts(profiles)
    else:
        ranked = first.advice()
        parts, page = first.parts(ranked), first.page_parts(ranked)
        data = data[runs[0][0]] | {"advice": [one.to_dict() for one in ranked]}
    written = []
    if html is not None:
        write_page(f"{', '.join(kernels)} on {target}", page, html)
        written.append(f"\nreport: {html}")
    if trace is not None:
        write_trace(profiles, trace)
        written.append(f"trace: {trace} (open it at ui.perfetto.dev)")
    return values.Answer(data, [parts, *written])


def variants(texts: list[str]) -> list[tuple[str, list[str]]]:
    """Return (label, arguments) of each combination of the values that commas separate.

    `block=128,512` gives two runs, labelled `block=128` and `block=512`.
    """
    choices = []
    for text in texts:
        name, _, value = text.partition("=")
        several = "," in value and not value.startswith("@")
        choices.append([f"{name}={one}" for one in value.split(",")] if several else [text])
    many = [i for i, choice in enumerate(choices) if len(choice) > 1]
    return [
        (" ".join(picked[i] for i in many), list(picked)) for picked in itertools.product(*choices)
    ]


def lint(
    files: Annotated[list[Path], typer.Argument(help="kernel files", metavar="FILE.py...")],
    nki: Annotated[
        str,
        values.choice_option(
            "NKI version",
            "nmm_compiler.nki_api.lint:VERSIONS",
            f"NKI version, one of {', '.join(VERSIONS)}",
        ),
    ] = API_VERSION,
    strict: Annotated[bool, typer.Option(help="count warnings as errors")] = False,
) -> values.Answer:
    """Check kernel files against the documented NKI API and the Python its compiler accepts.

    Nothing of a file is executed. Exit code: 0 clean (warnings are shown), 1 errors found, 2 a file
    or version that cannot be read, or files that are past a limit.

    Example: nmm lint my_kernel.py --nki 0.6
    """
    findings = [(path, finding) for path in files for finding in lint_file(path, nki=nki)]
    errors = sum(finding.is_error for _, finding in findings)
    warnings = len(findings) - errors
    said = f"{counted(len(files), 'file')}, NKI {nki}: {counted(errors, 'error')}"
    return values.Answer(
        [
            {"file": str(path), "severity": "error" if one.is_error else "warning",
             **{name: getattr(one, name) for name in ("line", "column", "code", "message")}}
            for path, one in findings
        ],
        [
            # a finding is one line, for editors
            *([Code(f"{path}:{one.line}:{one.column} {one.code} {one.message}")]
              for path, one in findings),
            f"{said}, {counted(warnings, 'warning')}",
        ],
        passed=not (errors or (strict and warnings)),
    )  # fmt: skip
