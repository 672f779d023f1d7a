"""`nmm kernel`: one specialized kernel, its schedule, its predicted profile, its proof."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nmm_compiler.cli import values
from nmm_compiler.errors import SpecError, UnknownNameError
from nmm_compiler.outputs import write_text


def kernel(
    family: Annotated[
        str, typer.Argument(help="lowrank, lowrank_shared, matmul, gated_mlp_up or gated_mlp")
    ],
    m: Annotated[int, values.size_option(help_="tokens")],
    k: Annotated[int, values.size_option(help_="input features")],
    n: Annotated[
        int | None, values.size_option(help_="output features (gated_mlp: intermediate size)")
    ] = None,
    r: Annotated[int | None, values.size_option(help_="rank")] = None,
    pairs: Annotated[
        list[str] | None,
        typer.Option(help="lowrank_shared, once for each u: R:N, or R:N,N for several v of one u"),
    ] = None,
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
    x_layout: Annotated[str | None, typer.Option(help="row [m, k] or col [k, m]")] = None,
    out_layout: Annotated[str | None, typer.Option(help="row [m, n] or col [n, m]")] = None,
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
    trace: values.Trace = None,
    out: Annotated[Path | None, values.output_option(help_="also write the source here")] = None,
    seed: values.Seed = 0,
) -> None:
    """Write the NKI kernel of one shape; print where it is, its schedule and predicted profile.

    Example: nmm kernel lowrank --m 512 --k 2048 --r 1280 --n 8192 --target trn2 --check

    Example: nmm kernel lowrank_shared --m 16 --k 2048 --pairs 256:2048 --pairs 128:512,512
    """
    from nmm_compiler.codegen.build import build_kernel

    console = Console(markup=False)
    given: dict[str, Any] = {
        "m": m, "k": k, "r": r, "n": n, "pairs": pairs, "dtype": dtype,
        "x_layout": x_layout, "out_layout": out_layout, "bias": bias, "activation": activation,
        "scales": scales, "intermediate": intermediate,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value not in (None, [])}
    spec = make_spec(family, given, field or [])
    built = build_kernel(spec, target)
    console.print(f"spec      {built.spec}", markup=False, soft_wrap=True)
    console.print(f"schedule  {built.schedule}", markup=False, soft_wrap=True)
    console.print(f"source    {built.path}", markup=False, soft_wrap=True)
    profile = built.profile()
    console.print(f"predicted {profile}", markup=False, soft_wrap=True)
    for note in spec.notes():
        console.print(f"note      {note}", style="yellow", markup=False, soft_wrap=True)
    if schedules:
        _print_schedules(console, spec, target)
    if trace is not None:
        profile.to_chrome_trace(trace)
        console.print(f"trace     {trace} (open it at ui.perfetto.dev)")
    if out is not None:
        write_text(out, built.source)
    if print_source:
        console.file.write(built.source)
    if check and not _check(console, built, seed):
        raise typer.Exit(1)


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


def _print_schedules(console: Console, spec: Any, target: str) -> None:
    from nmm_compiler.codegen.choose import choose

    table = Table(
        "rank", "schedule", "instructions", "closed form us", "simulated us", title="schedules"
    )
    for i, choice in enumerate(choose(spec, target)):
        simulated = "-" if choice.simulated_us is None else f"{choice.simulated_us:.1f}"
        count = f"{choice.instructions:,}"
        table.add_row(str(i), str(choice.schedule), count, f"{choice.cost_us:.1f}", simulated)
    console.print(table)


def _check(console: Console, built: Any, seed: int) -> bool:
    """Run the emitted source on random arrays; print the error against float64 and its bound."""
    from nmm_compiler.codegen.check_against_float64 import prove

    proof = prove(built, seed=seed)
    console.print(f"check     {proof}", markup=False, style="green" if proof.passed else "red")
    return bool(proof.passed)
