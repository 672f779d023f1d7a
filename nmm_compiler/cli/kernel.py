"""`nmm kernel`: writes one kernel; prints its schedule, predicted profile and check.

Every field of the family's spec is an option of the command: the record is the only list of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperArgument

from nmm_compiler.cli import values
from nmm_compiler.cli.help_text import PlainCommand
from nmm_compiler.cli.show import show, show_json, write_html
from nmm_compiler.errors import SpecError, UnknownNameError
from nmm_compiler.options import DIALECTS
from nmm_compiler.outputs import write_text
from nmm_compiler.report.parts import Grid, Line, Part, Section

if TYPE_CHECKING:
    from nmm_compiler.codegen.build import Kernel
    from nmm_compiler.codegen.check_against_float64 import Proof
    from nmm_compiler.codegen.choose import Choice
    from nmm_compiler.prices.ways import Ways

_FIXED = {"variant", "family"}


class KernelCommand(PlainCommand):
    """The command `kernel`: its help lists the kernel families with their fields."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; only the help loads the families."""
        from nmm_compiler.kernels import FAMILIES

        for parameter in self.params:
            if parameter.name == "family" and isinstance(parameter, TyperArgument):
                parameter.help = ", ".join(FAMILIES)
        lists = (
            f"{name}: {', '.join(_flag(field.name) for field in _fields(name).values())}"
            for name in FAMILIES
        )
        self.epilog = "\n\n".join(("Options of each family, the fields of its spec:", *lists))
        super().format_help(ctx, formatter)


def kernel(
    context: typer.Context,
    family: values.Family,
    target: values.Target = "trn2",
    dialect: Annotated[
        str | None,
        values.choice_option(
            "dialect",
            lambda: DIALECTS[1:],
            "nki, or neuronxcc for NKI Beta 1; default: what is installed, else nki",
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="ranks that share it; lowrank, sizes of the whole"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="run the source in the simulator against float64")
    ] = False,
    print_source: Annotated[bool, typer.Option("--print", help="print the NKI source")] = False,
    schedules: Annotated[
        bool, typer.Option("--schedules", help="print the chosen schedule and runners-up")
    ] = False,
    as_json: values.AsJson = False,
    html: values.Html = None,
    trace: values.Trace = None,
    out: Annotated[Path | None, values.output_option(help_="also write the source here")] = None,
) -> None:
    """Write the NKI kernel of one shape; print where it is, its schedule and predicted profile.

    Every field of the family's spec is an option: sizes (--m tokens, --k inputs, --r rank, --n
    outputs), --dtype, --x-layout row or col, --activation, --bias, --lnc 2 for two cores, ...

    Example: nmm kernel lowrank --m 512 --k 2048 --r 1280 --n 8192 --target trn2 --check

    Example: nmm kernel lowrank_shared --m 16 --k 2048 --pairs 256:2048 --pairs 128:512,512

    Example: nmm kernel attention --m 1 --context 8192 --heads 32 --kv-heads 8 --d 128 --check
    """
    from nmm_compiler.codegen.build import build_kernel
    from nmm_compiler.codegen.choice_table import schedule_table
    from nmm_compiler.codegen.choose import choose
    from nmm_compiler.codegen.dialects import TITLES

    spec = whole = make_spec(family, context.args)
    ways: Mapping[str, Ways] = {}
    if tp not in (None, 1):
        from nmm_compiler.prices.ways import rank_ways

        if spec.family != "lowrank":
            raise SpecError(f"--tp shares kernels of family lowrank, not {spec.family}; drop --tp")
        ways = rank_ways(spec, tp, target)
        fastest = min(ways, key=lambda axis: ways[axis].fused)
        spec = spec.sharded(tp, spec.tp_axis if "--tp-axis" in context.args else fastest)
    built = build_kernel(spec, target, dialect=dialect)
    profile = built.profile()
    proof = _prove(built) if check else None
    choices = choose(spec, target) if schedules or html is not None else ()
    if trace is not None:
        profile.to_chrome_trace(trace)
    if out is not None:
        write_text(out, built.source)
    if html is not None:
        parts: list[Part] = [Line(f"{built.spec} as {built.schedule}")]
        parts += [Line(str(proof), "plain" if proof.passed else "warning")] if proof else []
        table = Section("schedule and runners-up", (schedule_table(choices),), folded=True)
        write_html(spec.short(), [*parts, *profile.report(), table], html, said=False)
    if as_json:
        plain = _plain(built, choices if schedules else (), proof)
        show_json(
            plain | ({"ways": {axis: way.to_dict() for axis, way in ways.items()}} if ways else {})
        )
    else:
        place = str(built.path) if built.path.is_file() else "in memory only: use --print or --out"
        dialect_said = TITLES[built.dialect] if built.dialect != "nki" else None
        rows = [
            ("spec", built.spec), ("schedule", built.schedule), ("dialect", dialect_said),
            ("predicted", profile.summary()), *(("note", note) for note in spec.notes()),
            ("trace", trace and f"{trace} (open it at ui.perfetto.dev)"),
            ("written", out), ("report", html),
        ]  # fmt: skip
        show(f"source    {place}")  # a line of its own: no path is broken
        show([Line(f"{name:<9} {value}", hang=10) for name, value in rows if value is not None])
        if ways:
            head = ("axis", "one kernel us", "apart us", "bytes summed")
            shares = [
                (axis, f"{way.fused:.1f}", f"{way.separate:.1f}",
                 f"{whole.sharded(tp, axis).exchanged_bytes():,}")
                for axis, way in ways.items()
            ]  # fmt: skip
            grid = Grid.of(head, shares, right=head[1:])
            show([Section(f"ways to share it between {tp} ranks", (grid,))])
        show([profile.overview()[-1]])
        if schedules:
            show([Section("schedules", (schedule_table(choices),))])
        if print_source:
            print(built.source, end="")
        if proof is not None:
            show([Line(f"check     {proof}", hang=10)], style="green" if proof.passed else "red")
    if proof is not None and not proof.passed:
        raise typer.Exit(1)


def _plain(built: Kernel, choices: Sequence[Choice], proof: Proof | None) -> dict[str, Any]:
    """Return the kernel as JSON data."""
    return {
        "name": built.name,
        "dialect": built.dialect,
        "spec": built.spec.to_dict(),
        "schedule": built.schedule.to_dict(),
        "path": str(built.path) if built.path.is_file() else None,
        "profile": built.profile().to_dict(),
        "schedules": [
            {"schedule": c.schedule.to_dict(), "closed_form_us": c.cost_us,
             "simulated_us": c.simulated_us, "instructions": c.instructions}
            for c in choices
        ],
        "proof": None if proof is None else proof.to_dict(),
    }  # fmt: skip


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
        several = fields[name].name == "pairs"
        given[name] = [*given.get(name, ()), value] if several else _value(value)
    missing = [
        _flag(name)
        for name, field in fields.items()
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and name not in given
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
    if "," in text:
        return tuple(map(_value, text.split(",")))
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _prove(built: Kernel) -> Proof:
    """Run the emitted source on random arrays; return its error against float64 and the bound."""
    from nmm_compiler.codegen.check_against_float64 import prove

    return prove(built)
