"""`nmm kernel`: writes one kernel; prints its schedule, predicted profile and check.

Every field of the family's spec is an option of the command: the record is the only list of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from nmm_compiler.cli import values
from nmm_compiler.errors import SpecError, UnknownNameError
from nmm_compiler.report.parts import Code, Line, Section

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


def _fields(family: str) -> dict[str, dataclasses.Field[Any]]:
    from nmm_compiler.kernels import FAMILIES

    if family not in FAMILIES:
        raise UnknownNameError("kernel family", family, list(FAMILIES))
    return {f.name: f for f in dataclasses.fields(FAMILIES[family].spec_class)
            if f.name not in _FIXED}  # fmt: skip


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
    defaults = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [
        _flag(name)
        for name, field in fields.items()
        if (field.default, field.default_factory) == defaults and name not in given
    ]
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
