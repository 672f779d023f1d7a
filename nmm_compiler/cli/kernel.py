"""`nmm kernel`: writes one kernel; prints its schedule, predicted profile and check."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperArgument

from nmm_compiler.cli import values
from nmm_compiler.cli.help_text import PlainCommand
from nmm_compiler.cli.show import show, show_json, write_html
from nmm_compiler.errors import OptionTypeError, SpecError, UnknownNameError
from nmm_compiler.outputs import write_text
from nmm_compiler.report.parts import Grid, Line, Part, Section

if TYPE_CHECKING:
    from nmm_compiler.codegen.build import Kernel
    from nmm_compiler.codegen.check_against_float64 import Proof
    from nmm_compiler.codegen.choose import Choice
    from nmm_compiler.kernels.base import KernelSpec
    from nmm_compiler.prices.ways import Ways


class KernelCommand(PlainCommand):
    """The command `kernel`: its help lists the kernel families."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; only the help loads the families."""
        from nmm_compiler.kernels import FAMILIES

        for parameter in self.params:
            if parameter.name == "family" and isinstance(parameter, TyperArgument):
                parameter.help = ", ".join(FAMILIES)
        super().format_help(ctx, formatter)


def _axes() -> tuple[str, ...]:
    from nmm_compiler.kernels.over_ranks import AXES

    return AXES


def kernel(
    family: values.Family,
    m: Annotated[int, values.size_option(help_="tokens")],
    k: Annotated[int | None, values.size_option(help_="input features")] = None,
    n: Annotated[
        int | None, values.size_option(help_="output features, or the intermediate size")
    ] = None,
    r: Annotated[int | None, values.size_option(help_="rank")] = None,
    pairs: Annotated[
        list[str] | None,
        typer.Option(help="of a shared x, once for each u: R:N, or R:N,N for several v of one u"),
    ] = None,
    context: Annotated[int | None, values.size_option(help_="of attention: keys")] = None,
    heads: Annotated[int | None, values.size_option(help_="of attention")] = None,
    kv_heads: Annotated[int | None, values.size_option(help_="heads of keys and values")] = None,
    d: Annotated[int | None, values.size_option(help_="head size")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16, float32 or float8_e4m3")
    ] = None,
    scales: Annotated[
        str | None, typer.Option(help="of float8_e4m3 weights: tensor or channel")
    ] = None,
    intermediate: Annotated[
        str | None, typer.Option(help="kept between products as: operand, float32 or float8_e4m3")
    ] = None,
    target: values.Target = "trn2",
    dialect: Annotated[
        str | None,
        typer.Option(help="nki, or neuronxcc for NKI Beta 1; default: what is installed, else nki"),
    ] = None,
    lnc: Annotated[
        int | None, typer.Option(min=1, max=2, help="physical cores of a logical one: 1 or 2")
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="ranks that share it; lowrank, sizes of the whole"),
    ] = None,
    tp_axis: Annotated[
        str | None,
        values.choice_option(
            "axis", _axes, "what ranks share: columns, rows, rank; default: what is fastest"
        ),
    ] = None,
    x_layout: Annotated[str | None, typer.Option(help=r"row \[m, k] or col \[k, m]")] = None,
    out_layout: Annotated[str | None, typer.Option(help=r"row \[m, n] or col \[n, m]")] = None,
    bias: Annotated[bool | None, typer.Option("--bias/--no-bias")] = None,
    activation: Annotated[str | None, typer.Option(help="epilogue or gate function")] = None,
    field: Annotated[
        list[str] | None, typer.Option("--set", help="any other field of the spec: NAME=VALUE")
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
    repro: Annotated[
        Path | None,
        values.output_option("--repro", help_="write a script that builds and checks this kernel"),
    ] = None,
    seed: values.Seed = 0,
) -> None:
    """Write the NKI kernel of one shape; print where it is, its schedule and predicted profile.

    Example: nmm kernel lowrank --m 512 --k 2048 --r 1280 --n 8192 --target trn2 --check

    Example: nmm kernel lowrank --m 512 --k 2048 --r 256 --n 1024 --target trn1 --dialect neuronxcc

    Example: nmm kernel lowrank_shared --m 16 --k 2048 --pairs 256:2048 --pairs 128:512,512

    Example: nmm kernel gated_mlp --m 1 --k 2048 --n 8192 --r 1280 --lnc 2 --check

    Example: nmm kernel lowrank --m 16 --k 8192 --r 1024 --n 2048 --tp 4 --check

    Example: nmm kernel attention --m 1 --context 8192 --heads 32 --kv-heads 8 --d 128 --check
    """
    from nmm_compiler.codegen.build import build_kernel
    from nmm_compiler.codegen.choice_table import schedule_table
    from nmm_compiler.codegen.dialects import TITLES

    given: dict[str, Any] = {
        "m": m, "k": k, "r": r, "n": n, "pairs": pairs, "dtype": dtype,
        "x_layout": x_layout, "out_layout": out_layout, "bias": bias, "activation": activation,
        "scales": scales, "intermediate": intermediate,
        "lnc": lnc, "context": context, "heads": heads, "kv_heads": kv_heads, "d": d,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value not in (None, [])}
    if tp_axis is not None and tp is None:
        raise OptionTypeError("tp_axis", tp_axis, "it with --tp, the number of ranks")
    spec = make_spec(family, given, field or [])
    ways = _rank_ways(spec, tp, target) if tp not in (None, 1) else {}
    whole = spec
    if ways:
        spec = spec.sharded(tp, tp_axis or min(ways, key=lambda axis: ways[axis].fused))
    built = build_kernel(spec, target, dialect=dialect)
    profile = built.profile()
    proof = _prove(built, seed) if check else None
    one = dataclasses.replace(spec, lnc=1) if spec.lnc > 1 else None
    one_core = build_kernel(one, target, dialect=dialect).profile() if one is not None else None
    choices = _choices(spec, target) if schedules or html is not None or as_json else ()
    if trace is not None:
        profile.to_chrome_trace(trace)
    if out is not None:
        write_text(out, built.source)
    if repro is not None:
        write_text(repro, built.reproducer(seed))
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
        show([Line(f"spec      {built.spec}", hang=10),
              Line(f"schedule  {built.schedule}", hang=10)])  # fmt: skip
        show(f"source    {_path(built)}")
        if built.dialect != "nki":
            show(f"dialect   {TITLES[built.dialect]}")
        show([Line(f"predicted {profile.summary()}", hang=10)])
        if one_core is not None:
            times = one_core.latency_us / profile.latency_us
            text = f"{one_core.latency_us:.2f} us simulated; two are {times:.2f} times as fast"
            show([Line(f"one core  {text}", hang=10)])
        if ways:
            head = ("axis", "one kernel us", "apart us", "bytes summed")
            rows = [
                (axis, f"{way.fused:.1f}", f"{way.separate:.1f}",
                 f"{whole.sharded(tp, axis).exchanged_bytes():,}")
                for axis, way in ways.items()
            ]  # fmt: skip
            grid = Grid.of(head, rows, right=head[1:])
            show([Section(f"ways to share it between {tp} ranks", (grid,))])
        for note in spec.notes():
            show([Line(f"note      {note}", hang=10)], style="yellow")
        show([profile.overview()[-1]])
        if schedules:
            show([Section("schedules", (schedule_table(choices),))])
        if trace is not None:
            show(f"trace     {trace} (open it at ui.perfetto.dev)")
        if out is not None:
            show(f"written   {out}")
        if repro is not None:
            show(f"script    {repro}")
        if html is not None:
            show(f"report    {html}")
        if print_source:
            print(built.source, end="")
        if proof is not None:
            show([Line(f"check     {proof}", hang=10)], style="green" if proof.passed else "red")
    if proof is not None and not proof.passed:
        raise typer.Exit(1)


def _rank_ways(spec: Any, tp: int | None, target: str) -> dict[str, Ways]:
    """Return the ways in which ranks can share the product of a lowrank kernel, by axis."""
    from nmm_compiler.prices.ways import rank_ways

    if spec.family != "lowrank":
        raise SpecError(f"--tp shares kernels of family lowrank, not {spec.family}; drop --tp")
    return rank_ways(spec, tp or 1, target)


def _path(built: Kernel) -> str:
    """Return where the source is, or that it is nowhere, as no cache directory can be written."""
    return str(built.path) if built.path.is_file() else "in memory only: use --print or --out"


def _plain(built: Kernel, choices: tuple[Choice, ...], proof: Proof | None) -> dict[str, Any]:
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


def make_spec(family: str, given: dict[str, Any], more: list[str]) -> Any:
    """Return the family's spec from options and `NAME=VALUE` texts; raise for unknown names."""
    from nmm_compiler.kernels import FAMILIES

    if family not in FAMILIES:
        raise UnknownNameError("kernel family", family, list(FAMILIES))
    spec_class = FAMILIES[family].spec_class
    fields = {f.name: f for f in dataclasses.fields(spec_class)}
    for text in more:
        name, equals, value = text.partition("=")
        if not equals:
            raise SpecError(f"--set {text!r} is not NAME=VALUE")
        given[name] = _parse(value) if "," not in value else tuple(map(_parse, value.split(",")))
    fixed = {"variant", "family"}
    for name in given:
        if name not in fields or name in fixed:
            raise UnknownNameError(f"field of {family}", name, sorted(fields))
    missing = [
        f.name
        for f in fields.values()
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in given
    ]
    if missing:
        raise SpecError(f"{family} needs {', '.join('--' + name for name in missing)}")
    return spec_class(**given)


def _parse(value: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return words[value.lower()]
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            continue
    return value


def _choices(spec: KernelSpec, target: str) -> tuple[Choice, ...]:
    from nmm_compiler.codegen.choose import choose

    return choose(spec, target)


def _prove(built: Kernel, seed: int) -> Proof:
    """Run the emitted source on random arrays; return its error against float64 and the bound."""
    from nmm_compiler.codegen.check_against_float64 import prove

    return prove(built, seed=seed)
