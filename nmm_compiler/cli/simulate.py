"""`nmm simulate`: run any NKI kernel file on a CPU, with strict checks and predicted timing."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from nmm_compiler.cli import values
from nmm_compiler.cli.limited import run_limited
from nmm_compiler.errors import ShapeError

_EPILOG = (
    "Example: nmm simulate add.py:add_kernel --arg a=128x512:bfloat16 --arg b=128x512:bfloat16 "
    "--trace add.json"
)
_LARGEST_ARRAY_BYTES = 1 << 40


def simulate(
    kernel: Annotated[str, typer.Argument(help="FILE.py:function, an NKI kernel")],
    arg: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SHAPE:DTYPE, a random array; or NAME=VALUE, a constant"),
    ] = None,
    target: values.Target = "trn2",
    grid: Annotated[int, typer.Option(min=1, max=2, help="programs: 1, or 2 for LNC=2")] = 1,
    mode: Annotated[str, typer.Option(help="full, functional or timing")] = "full",
    strict: Annotated[bool, typer.Option(help="--no-strict records warnings instead")] = True,
    seed: values.Seed = 0,
    trace: values.Trace = None,
    time_limit: Annotated[float, typer.Option(help="seconds that the run may take", min=0)] = 15,
    memory_limit: Annotated[float, typer.Option(help="GiB that the run may add", min=0)] = 4,
    max_instructions: Annotated[
        int, typer.Option(help="instructions that the kernel may execute", min=1)
    ] = 10_000_000,
) -> None:
    """Run FILE.py:kernel in the simulator and print outputs, profile and warnings.

    The file is executed as Python, with all rights of the user, in a process of its own whose time,
    memory and instructions are limited. Do not run files that you do not trust.
    """

    def work() -> list[tuple[str, str]]:
        from nmm_compiler.simulator.run import simulate as run

        arguments = arguments_of(arg or [], seed, data=mode != "timing")
        result = run(
            kernel, target=target, grid=grid, mode=mode, strict=strict,
            max_instructions=max_instructions, named=arguments,
        )  # fmt: skip
        lines = [
            (f"output {i}: shape {tuple(output.shape)} dtype {output.dtype}", "")
            for i, output in enumerate(result.outputs or ())
        ]
        lines += [(f"warning: {warning}", "yellow") for warning in result.warnings]
        if result.profile is not None:
            lines.append((str(result.profile), ""))
            if trace is not None:
                result.profile.to_chrome_trace(trace)
                lines.append((f"trace: {trace} (open it at ui.perfetto.dev)", ""))
        return lines

    shown = run_limited(
        work,
        what=kernel,
        seconds=time_limit,
        gigabytes=memory_limit,
        modules=(
            "ml_dtypes",
            "nmm_compiler.simulator.run",
            "nmm_compiler.simulator.timing.profile",
        ),
    )
    console = Console(markup=False)
    for text, style in shown:
        console.print(text, style=style or None, markup=False, soft_wrap=True)


simulate.__doc__ = f"{simulate.__doc__}\n\n{_EPILOG}"


def arguments_of(texts: list[str], seed: int, *, data: bool) -> dict[str, Any]:
    """Return the kernel's arguments by name; without data an array is its shape and dtype."""
    arguments: dict[str, Any] = {}
    for i, text in enumerate(texts):
        name, value = parse_argument(text, seed + i, data=data)
        if name in arguments:
            raise ShapeError(f"--arg {text!r}: {name!r} is given twice; leave one out")
        arguments[name] = value
    return arguments


def parse_argument(text: str, seed: int, *, data: bool = True) -> tuple[str, Any]:
    """Return (name, value) of `x=128x512:bfloat16` (a random array), `n=8` or `op=add`."""
    import math

    import numpy as np

    from nmm_compiler.simulator.run import ArraySpec
    from nmm_compiler.simulator.tensors import dtypes

    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ShapeError(
            f"--arg {text!r} is not NAME=SHAPE:DTYPE or NAME=VALUE, e.g. x=128x512:float32"
        )
    shape_text, colon, dtype_text = value.partition(":")
    if not colon:
        for convert in (int, float):
            try:
                return name, convert(value)
            except ValueError:
                continue
        return name, {"True": True, "False": False, "None": None}.get(value, value)
    sizes = shape_text.lower().split("x")
    if not all(size.isdecimal() and len(size) < 20 and int(size) > 0 for size in sizes):
        raise ShapeError(f"--arg {text!r}: shape {shape_text!r} is not like 128x512")
    kind = dtypes.ALL.get(dtype_text)
    allowed = {str(d) for d in dtypes.ALL.values() if d.kind != "packed"} - {"tfloat32"}
    if kind is None or kind not in allowed:
        known = ", ".join(sorted(allowed))
        raise ShapeError(f"--arg {text!r}: {dtype_text!r} is no dtype of NKI; use one of {known}")
    shape = tuple(map(int, sizes))
    if not data:
        return name, ArraySpec(shape, kind)
    if math.prod(shape) * 4 > _LARGEST_ARRAY_BYTES:
        raise ShapeError(f"--arg {text!r}: more than a TiB; use --mode timing, which needs no data")
    generator = np.random.default_rng(seed)
    if kind.kind == "bool":
        return name, generator.integers(0, 2, shape).astype(np.bool_)
    if kind.kind == "int":
        return name, generator.integers(0, 100, shape).astype(kind.numpy)
    return name, generator.standard_normal(shape, dtype=np.float32).astype(kind.numpy)
