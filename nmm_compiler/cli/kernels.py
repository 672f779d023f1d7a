"""NKI kernels: `nmm kernel` writes one; `nmm simulate` runs a file for its results, `nmm profile`
for its time, `nmm lint` checks it.

Every field of a family's spec is an option of `nmm kernel`: the record is the only list of them.
The arguments of a file's kernel are `--arg NAME=VALUE`; a user's function says the right outputs
(`--reference FILE:fn`). A file is executed as Python (not by lint). The commands on files run in a
process of their own whose time and memory are limited (`commands.py`, `limited.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import typer

from nmm_compiler.cli import values
from nmm_compiler.cli.models import foreign, named_in_file
from nmm_compiler.codegen.check_against_float64 import Proof, compare, prove
from nmm_compiler.errors import ShapeError, SpecError, UnknownNameError, user_file_error
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.nki_api.lint import API_VERSION, VERSIONS, lint_file
from nmm_compiler.options import is_of, name_of
from nmm_compiler.outputs import write
from nmm_compiler.records import hints_of
from nmm_compiler.report.headline import not_told
from nmm_compiler.report.parts import Code, Grid, Line, Part, Section
from nmm_compiler.report.text import counted
from nmm_compiler.simulator.loading.loader import load_file
from nmm_compiler.simulator.run import ArraySpec, simulate as run_file
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.timing.causes import statement
from nmm_compiler.simulator.timing.chrome_trace import write_trace
from nmm_compiler.simulator.timing.profile import Profile

_LARGEST_ARRAY_BYTES = 1 << 40
_SHORT_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16",
    "fp32": "float32", "f32": "float32", "fp8": "float8_e4m3",
}  # fmt: skip
_NARROWER = {"float64": "float32", "int64": "int32"}
"""What stands for types that NKI lacks."""
_ROWS = 12
_FIGURES = ("latency", "roofline", "mfu", "mbu", "SBUF", "PSUM", "instructions")
"""Of those of a profile, in its order, the ones that profiles are compared by."""


def kernel(
    context: typer.Context,
    family: Annotated[
        str,
        values.choice_option(
            "kernel family",
            "nmm_compiler.kernels:FAMILIES",
            "see below",
            metavar="FAMILY",
            declare=typer.Argument,
        ),
    ],
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
    as_json: values.Json = False,
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
    from nmm_compiler.codegen.choose import choose, schedule_table
    from nmm_compiler.codegen.dialects import TITLES

    spec = make_spec(_of_linear(family, context.args), context.args)
    built = build_kernel(spec, target, dialect=dialect)
    profile = built.profile()
    proof = prove(built) if check else None
    choices = choose(spec, target) if schedules else ()
    path = str(built.path) if built.path.is_file() else None
    rows = [
        ("source", path or "in memory only: use --print"),
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
            *(Line(f"{name:<9} {value}", hang=10) for name, value in rows if value is not None),
            profile.overview()[-1],
            *([Section("schedules", (schedule_table(choices),))] if schedules else []),
            *([Code(built.source)] if print_source else []),
        ],
        passed=proof is None or proof.passed,
    )  # fmt: skip


def _of_linear(family: str, words: Sequence[str]) -> str:
    """Return the family of a linear layer: with --groups adapters, where it has a rank, or experts;
    "linear" is few-bit weights with a --weight format; else it is a matmul."""
    names = {word.partition("=")[0] for word in words}
    if family != "linear":
        return family
    if "--groups" in names:
        return "adapters" if "--r" in names else "experts"
    return "linear" if "--weight" in names else "matmul"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


OPTIONS = "\n\n".join(
    ("Options of each family, the fields of its spec:",
     *(f"{family}: {', '.join(map(_flag, inspect.signature(kind.spec_class).parameters))}"
       for family, kind in FAMILIES.items()))
)  # fmt: skip
"""What the help of `nmm kernel` ends with."""


def make_spec(family: str, words: Sequence[str]) -> Any:
    """Return the family's spec from its fields as options; raise for unknown and missing ones.

    An option is `--name value`, `--name=value`, `--name` for true or `--no-name` for false.
    """
    fields = inspect.signature(FAMILIES[family].spec_class).parameters
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    for name in fields:
        read: Any = {"action": "append"} if name == "pairs" else {"type": _value}
        parser.add_argument(_flag(name), f"--{name}", nargs="?", const=True, **read)
        off = _flag(f"no_{name}"), f"--no_{name}"
        parser.add_argument(*off, dest=name, action="store_const", const=False)
    try:
        given, others = parser.parse_known_args(words)
    except argparse.ArgumentError as error:  # a value behind --no-name
        raise SpecError(f"{family}: {error}") from None
    if others:
        raise UnknownNameError(f"option of {family}", others[0], [*map(_flag, fields)])
    needed = [name for name, field in fields.items() if field.default is field.empty]
    missing = [_flag(name) for name in needed if name not in given]
    if missing:
        raise SpecError(f"{family} needs {', '.join(missing)}")
    spec_class: Any = FAMILIES[family].spec_class
    hints = hints_of(spec_class)
    for name, value in vars(given).items():
        if name != "pairs" and not is_of(value, hints[name]):
            raise SpecError(f"{family}: {_flag(name)} is {value!r}; pass {name_of(hints[name])}")
    return spec_class(**vars(given))


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
        Path | None,
        values.option(values.output_file, "FILE", "write the outputs here, as .npz", "--save"),
    ] = None,
    time_limit: values.TimeLimit = 15,
    memory_limit: values.MemoryLimit = 4,
    as_json: values.Json = False,
) -> values.Answer:
    """Run FILE.py:kernel in the simulator and print outputs, profile and warnings.

    What the kernel prints is shown. The file is executed as Python, with all rights of the user,
    in a process of its own whose time and memory are limited. Do not run files that you do not
    trust. Outputs agree with the reference within what rounding explains.

    Example: nmm simulate add.py:add_kernel --arg a=128x512:bf16 --arg b=@b.npy
    --reference add.py:add_in_numpy --save out.npz
    """
    arguments = arguments_of(arg or [], data=True)
    wanted = None if reference is None else reference_of(reference, arguments)
    result: Any = run_file(kernel, named=arguments, target=target, grid=grid)
    shown, proof = result.overview(), None
    if wanted is not None:
        inputs = [v for v in arguments.values() if hasattr(v, "dtype")]
        proof = compared(kernel, result.outputs, wanted, inputs)
        shown.append(Line(f"compared with {reference}: {proof}"))
    if save_to is not None:
        save(save_to, result.outputs)
        shown.append(Line(f"outputs: {save_to}"))
    checked = None if proof is None else proof.to_dict()
    passed = proof is None or proof.passed
    return values.Answer(result.to_dict() | {"reference": checked}, shown, passed)


def profile(
    kernels: Annotated[list[str], typer.Argument(help="FILE.py:function, one or several")],
    arg: Arguments = None,
    target: values.Target = "trn2",
    grid: values.Grid = 1,
    html: values.Html = None,
    trace: Annotated[
        Path | None, values.option(values.output_file, "FILE", "write a Chrome/Perfetto trace here")
    ] = None,
    time_limit: values.TimeLimit = 60,
    memory_limit: values.MemoryLimit = 4,
    as_json: values.Json = False,
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
    runs = [
        (" ".join(filter(None, (name if len(kernels) > 1 else "", label))), name, texts)
        for name in kernels
        for label, texts in variants(arg or [])
    ]

    profiles: dict[str, Any] = {}
    for label, name, texts in runs:
        shapes = arguments_of(texts, data=False)
        run = run_file(name, named=shapes, target=target, grid=grid, mode="timing")
        profiles[label] = run.profile
    first, *others = profiles.values()
    data: Any = {label: one.to_dict() | one.where() for label, one in profiles.items()}
    if others:
        parts = page = comparison_parts(profiles)
    else:
        ranked = first.advice()
        parts, page = first.parts(ranked), first.page_parts(ranked)
        data = data[runs[0][0]] | {"advice": [one.to_dict() for one in ranked]}
    shown = [*parts]
    if trace is not None:
        write_trace(profiles, trace)
        shown.append(Line(f"trace: {trace} (open it at ui.perfetto.dev)"))
    return values.Answer(data, shown, page=(f"{', '.join(kernels)} on {target}", page))


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


def arguments_of(texts: list[str], *, data: bool) -> dict[str, Any]:
    """Return the kernel's arguments by name; without data an array is its shape and dtype.

    Raises ShapeError for a text that is no argument, FileError for a file that is no array.
    """
    arguments: dict[str, Any] = {}
    for i, text in enumerate(texts):
        name, _, value = text.partition("=")
        if not (name and value):
            raise ShapeError(
                f"--arg {text!r} is not NAME=SHAPE:DTYPE, NAME=@FILE.npy or NAME=VALUE, "
                "e.g. x=128x512:float32"
            )
        if name in arguments:
            raise ShapeError(f"--arg {text!r}: {name!r} is given twice; leave one out")
        arguments[name] = _argument(text, value, i, data)
    return arguments


def _argument(text: str, value: str, seed: int, data: bool) -> Any:
    """Return what `128x512:bfloat16` (a random array), `@x.npy`, `8` or `add` stands for."""
    if value.startswith("@"):
        return _of_file(value[1:], data)
    shape_text, colon, dtype_text = value.partition(":")
    if not colon:
        return values.literal(value)
    dtype_text, sizes = _SHORT_NAMES.get(dtype_text, dtype_text), shape_text.lower().split("x")
    if not all(size.isdecimal() and len(size) < 20 and int(size) > 0 for size in sizes):
        raise ShapeError(f"--arg {text!r}: shape {shape_text!r} is not like 128x512")
    kinds = {n: d for n, d in dtypes.ALL.items() if d.kind != "packed" and d != "tfloat32"}
    if dtype_text not in kinds:
        raise UnknownNameError(f"dtype of --arg {text!r}:", dtype_text, sorted(kinds))
    kind, shape = kinds[dtype_text], tuple(map(int, sizes))
    if not data:
        return ArraySpec(shape, kind)
    if math.prod(shape) * 4 > _LARGEST_ARRAY_BYTES:
        raise ShapeError(f"--arg {text!r}: more than a TiB; nmm profile needs no data")
    generator = np.random.default_rng(seed)
    if kind.kind in ("bool", "int"):
        return generator.integers(0, 2 if kind.kind == "bool" else 100, shape).astype(kind.numpy)
    return generator.standard_normal(shape, dtype=np.float32).astype(kind.numpy)


def _of_file(name: str, data: bool) -> Any:
    """Return the array of FILE.npy or FILE.npy:DTYPE; without data its shape and dtype.

    float64 and int64, which NKI lacks, become float32 and int32.
    """
    path, _, dtype = name.rpartition(":")
    kind = dtypes.ALL.get(_SHORT_NAMES.get(dtype, dtype)) if path else None
    path = path if kind is not None else name
    try:
        array: np.ndarray = np.lib.format.open_memmap(path, mode="r")
        narrower = _NARROWER.get(array.dtype.name, array.dtype)
        wanted = np.dtype(narrower if kind is None else kind.numpy)
        # np.save writes bfloat16 as bytes of no type
        array = array.view(wanted) if array.dtype.kind == "V" else array.astype(wanted)
    except (OSError, ValueError, TypeError) as error:
        raise user_file_error(path, "--arg takes a .npy file", error) from error
    return array if data else ArraySpec(array.shape, array.dtype)


def save(path: Path, outputs: tuple[np.ndarray, ...]) -> None:
    """Write outputs to an .npz as out0, out1, ...; types that NumPy lacks become float32."""
    plain = [one.astype(np.float32) if one.dtype.kind == "V" else one for one in outputs]
    arrays: Any = {f"out{i}": array for i, array in enumerate(plain)}
    archive = io.BytesIO()  # a zip file needs to know its place, which a device does not tell
    np.savez(archive, **arrays)
    write(path, lambda file: file.write(archive.getbuffer()))


def tolerance(arrays: Sequence[np.ndarray]) -> float:
    """Return eps of the coarsest type plus that of float32 times sqrt of the longest dimension.

    A sum of K products of independent rounding errors is off by about eps sqrt(K); the longest
    dimension is the longest sum that a kernel can make of its inputs.
    """
    coarsest = [float(ml_dtypes.finfo(a.dtype).eps) for a in arrays if a.dtype.kind in "fV"]
    longest = max((size for array in arrays for size in array.shape), default=1)
    return max(coarsest) + float(np.finfo(np.float32).eps) * math.sqrt(longest) if coarsest else 0.0


def reference_of(name: str, arguments: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
    """Return what FILE.py:function gives for the kernel's arguments.

    It is called by name if it has parameters of these names, else with the arrays in order. Raises
    FileError for what it raises.
    """
    # stand-ins: it may be in the kernel's file
    called = named_in_file("reference", name, lambda path: vars(load_file(Path(path))))
    copies = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    arrays = [v for v in copies.values() if isinstance(v, np.ndarray)]
    with foreign(name, f"{name}() raised"):
        by_name = set(copies) <= set(inspect.signature(called).parameters)
        result = called(**copies) if by_name else called(*arrays)
        several = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(np.asarray(one, dtype=np.float64) for one in several)


def compared(
    kernel: str, outputs: Sequence[np.ndarray], wanted: Sequence[np.ndarray],
    inputs: Sequence[np.ndarray],
) -> Proof:  # fmt: skip
    """Return how outputs compare with the reference, under a share of its largest value.

    Raises ShapeError where shapes differ.
    """
    shapes, right = ([one.shape for one in arrays] for arrays in (outputs, wanted))
    if shapes != right:
        raise ShapeError(
            f"outputs of {kernel} have shapes {shapes}, those of the reference {right}"
        )
    rtol = tolerance((*outputs, *inputs))
    bounds = tuple(rtol * float(np.abs(one).max(initial=0)) for one in wanted)
    return compare(kernel, tuple(outputs), tuple(wanted), bounds)


def comparison_parts(profiles: Mapping[str, Profile]) -> list[Part]:
    """Return the comparison of named profiles with the first of them."""
    first, *_ = profiles.values()
    best = min(profiles, key=lambda name: profiles[name].latency_us)
    gain = first.latency_us / profiles[best].latency_us
    error = max(profiles[best].error_band.mean, first.error_band.mean)
    headline = f"fastest: {best}, {profiles[best].latency_us:.2f} us simulated on {first.target}, "
    if profiles[best] is not first:
        headline += not_told(gain, error, "the first")
    lines = {
        name: {
            f"{one.line:>4} {statement(one.file, one.line) or one.name}": one.path_us
            for one in profile.by_line()
        }
        for name, profile in profiles.items()
    }
    operations = {
        name: {f"{one.name} on {one.engine}": one.path_us for one in profile.by_instruction()}
        for name, profile in profiles.items()
    }
    rows = [
        (*(value for figure, value, _ in one.figures().rows if figure in _FIGURES), name)
        for name, one in profiles.items()
    ]
    return [
        Line(f"{headline}{gain:.2f} times as fast as the first", "headline"),
        Grid.of((*_FIGURES, "kernel"), rows, right=_FIGURES),
        Section("critical us of each source line", (_differences(lines, "source line"),)),
        Section("critical us of each instruction", (_differences(operations, "what"),)),
    ]


def _differences(columns: Mapping[str, Mapping[str, float]], what: str) -> Grid:
    """Return the rows that differ most."""
    texts = dict.fromkeys(text for each in columns.values() for text in each)
    rows = [([each.get(text, 0.0) for each in columns.values()], text) for text in texts]
    rows.sort(key=lambda row: min(row[0]) - max(row[0]))
    shown = [(*(f"{us:.2f}" for us in each), text) for each, text in rows[:_ROWS]]
    head = tuple(name.rpartition("/")[2] for name in columns)
    return Grid.of((*head, what), shown, right=head)


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
    time_limit: values.TimeLimit = 60,
    as_json: values.Json = False,
) -> values.Answer:
    """Check kernel files against the documented NKI API and the Python its compiler accepts.

    Nothing of a file is executed. Exit code: 0 clean (warnings are shown), 1 errors found, 2 a file
    or version that cannot be read, or files that take too long, or more than 2 GiB.

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
            *([Code("\n".join(f"{path}:{one}" for path, one in findings))] if findings else []),
            Line(f"{said}, {counted(warnings, 'warning')}"),
        ],
        passed=not (errors or (strict and warnings)),
    )  # fmt: skip
