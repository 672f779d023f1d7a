"""NKI kernels: `nmm kernel` writes one; `nmm simulate` runs a file for its results, `nmm profile`
for its time, `nmm lint` checks it.

Every field of a family's spec is an option of `nmm kernel`: the record is the only list of them. A
file is executed as Python (not by lint). The commands on files run in a process of their own whose
time and memory are limited (`commands.py`, `limited.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nmm_compiler.cli import values
from nmm_compiler.errors import SpecError, UnknownNameError
from nmm_compiler.nki_api.lint import API_VERSION, VERSIONS, lint_file
from nmm_compiler.report.page import write_page
from nmm_compiler.report.parts import Code, Line, Section
from nmm_compiler.report.text import counted

_FIXED = {"variant", "family"}


def families_help() -> tuple[str, str]:
    """Return what the help says of the argument, and the fields of each family."""
    from nmm_compiler.kernels import FAMILIES

    lists = (f"{name}: {', '.join(map(_flag, _fields(name)))}" for name in FAMILIES)
    epilog = "\n\n".join(("Options of each family, the fields of its spec:", *lists))
    return ", ".join(FAMILIES), epilog


def kernel(
    context: typer.Context,
    family: values.Family,
    target: values.Target = "trn2",
    dialect: Annotated[
        str,
        values.choice_option(
            "dialect",
            "nmm_compiler.options:DIALECTS",
            "nki, or neuronxcc for NKI Beta 1; auto: what is installed, else nki",
        ),
    ] = "auto",
    check: Annotated[
        bool, typer.Option("--check", help="run the source in the simulator against float64")
    ] = False,
    print_source: Annotated[bool, typer.Option("--print", help="print the NKI source")] = False,
    schedules: Annotated[
        bool, typer.Option("--schedules", help="print the chosen schedule and runners-up")
    ] = False,
) -> values.Answer:
    """Write the NKI kernel of one shape; print where it is, its schedule and predicted profile.

    Every field of the family's spec is an option: sizes (--m tokens, --k inputs, --r rank, --n
    outputs), --dtype, --x-layout row or col, --activation, --bias, --lnc 2 for two cores, ...

    Example: nmm kernel lowrank --m 512 --k 2048 --r 1280 --n 8192 --target trn2 --check

    Example: nmm kernel lowrank_shared --m 16 --k 2048 --pairs 256:2048 --pairs 128:512,512

    Example: nmm kernel linear --m 8 --k 2880 --n 720 --groups 32 --top-k 4 --check

    Example: nmm kernel linear --m 8 --k 4096 --n 4096 --groups 8 --r 16 --check

    Example: nmm kernel attention --m 1 --context 8192 --heads 32 --kv-heads 8 --d 128 --check
    """
    from nmm_compiler.codegen.build import build_kernel
    from nmm_compiler.codegen.check_against_float64 import prove
    from nmm_compiler.codegen.choice_table import schedule_table
    from nmm_compiler.codegen.choose import choose
    from nmm_compiler.codegen.dialects import TITLES

    spec = make_spec(_of_linear(family, context.args), context.args)
    built = build_kernel(spec, target, dialect=dialect)
    profile = built.profile()
    proof = prove(built) if check else None
    choices = choose(spec, target) if schedules else ()
    path = str(built.path) if built.path.is_file() else None
    rows = [
        ("spec", built.spec), ("schedule", built.schedule),
        ("dialect", TITLES[built.dialect] or None),
        ("predicted", profile.summary()), *(("note", note) for note in spec.notes()),
        ("check", proof),
    ]  # fmt: skip
    return values.Answer(
        {
            "name": built.name, "dialect": built.dialect, "spec": built.spec.to_dict(),
            "schedule": built.schedule.to_dict(), "profile": profile.to_dict(), "path": path,
            "schedules": [
                {"schedule": c.schedule.to_dict(), "closed_form_us": c.cost_us,
                 "simulated_us": c.simulated_us, "instructions": c.instructions}
                for c in choices
            ],
            "proof": None if proof is None else proof.to_dict(),
        },
        [
            f"source    {path or 'in memory only: use --print'}",  # no path is broken
            [*(Line(f"{name:<9} {value}", hang=10) for name, value in rows if value is not None),
             profile.overview()[-1],
             *([Section("schedules", (schedule_table(choices),))] if schedules else [])],
            *([[Code(built.source)]] if print_source else []),
        ],
        passed=proof is None or proof.passed,
    )  # fmt: skip


def _of_linear(family: str, words: Sequence[str]) -> str:
    """Return the family of a linear layer: with --groups adapters, where it has a rank, or experts;
    "linear" is few-bit weights with a --weight format; else it is a matmul."""
    names = {name for name, _ in _options(words)}
    if family != "linear":
        return family
    if "groups" in names:
        return "adapters" if "r" in names else "experts"
    return "linear" if "weight" in names else "matmul"


def _fields(family: str) -> dict[str, inspect.Parameter]:
    from nmm_compiler.kernels import FAMILIES

    fields = inspect.signature(FAMILIES[family].spec_class).parameters
    return {name: field for name, field in fields.items() if name not in _FIXED}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def make_spec(family: str, words: Sequence[str]) -> Any:
    """Return the family's spec from its fields as options; raise for unknown and missing ones."""
    from nmm_compiler.kernels import FAMILIES

    fields = _fields(family)
    given: dict[str, Any] = {}
    for name, value in _options(words):
        if name not in fields:
            raise UnknownNameError(f"option of {family}", _flag(name), [*map(_flag, fields)])
        given[name] = [*given.get(name, ()), value] if name == "pairs" else _value(value)
    needed = [name for name, field in fields.items() if field.default is field.empty]
    missing = [_flag(name) for name in needed if name not in given]
    if missing:
        raise SpecError(f"{family} needs {', '.join(missing)}")
    return FAMILIES[family].spec_class(**given)


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (field, text) of `--name value`, `--name=value`, `--name` and `--no-name`."""
    left = list(words)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if not name.startswith("--"):
            raise SpecError(f"{name!r} is no option; every field of a spec is --name value")
        name = name.removeprefix("--").replace("-", "_")
        if not equals and left and not left[0].startswith("--"):
            value = left.pop(0)
        elif not equals:
            value = "false" if name.startswith("no_") else "true"
            name = name.removeprefix("no_")
        yield name, value


def _value(text: str) -> Any:
    several = tuple(map(values.literal, text.split(",")))
    return several if "," in text else several[0]


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
    return [
        (" ".join(one for one in picked if one not in texts), list(picked))
        for picked in itertools.product(*choices)
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
             **dataclasses.asdict(one)}
            for path, one in findings
        ],
        [
            # a finding is one line, for editors
            *([Code(f"{path}:{one}")] for path, one in findings),
            f"{said}, {counted(warnings, 'warning')}",
        ],
        passed=not (errors or (strict and warnings)),
    )  # fmt: skip
