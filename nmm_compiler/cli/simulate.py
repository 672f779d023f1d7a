"""`nmm simulate`: run any NKI kernel file on a CPU, with strict checks and predicted timing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from nmm_compiler.errors import ShapeError

_EPILOG = (
    "Example: nmm simulate add.py:add_kernel --arg a=128x512:bfloat16 --arg b=128x512:bfloat16 "
    "--trace add.json"
)


def simulate(
    kernel: Annotated[str, typer.Argument(help="FILE.py:function, an NKI kernel")],
    arg: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SHAPE:DTYPE, a random array; or NAME=VALUE, a constant"),
    ] = None,
    target: Annotated[str, typer.Option(help="trn1, trn2 or trn3")] = "trn2",
    grid: Annotated[int, typer.Option(help="programs: 1, or 2 for LNC=2")] = 1,
    mode: Annotated[str, typer.Option(help="full, functional or timing")] = "full",
    strict: Annotated[bool, typer.Option(help="--no-strict records warnings instead")] = True,
    seed: Annotated[int, typer.Option(help="seed of the random arrays")] = 0,
    trace: Annotated[Path | None, typer.Option(help="write a Chrome/Perfetto trace here")] = None,
) -> None:
    """Run FILE.py:kernel in the simulator and print outputs, profile and warnings."""
    from nmm_compiler.simulator.run import simulate as run

    console = Console()
    arguments = [parse_argument(text, seed + i) for i, text in enumerate(arg or ())]
    result = run(
        kernel, target=target, grid=grid, mode=mode, strict=strict, **dict(arguments)
    )  # fmt: skip
    for i, output in enumerate(result.outputs or ()):
        console.print(f"output {i}: shape {tuple(output.shape)} dtype {output.dtype}")
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    if result.profile is not None:
        console.print(str(result.profile), markup=False, soft_wrap=True)
        if trace is not None:
            result.profile.to_chrome_trace(trace)
            console.print(f"trace: {trace} (open it at ui.perfetto.dev)")


simulate.__doc__ = f"{simulate.__doc__}\n\n{_EPILOG}"


def parse_argument(text: str, seed: int) -> tuple[str, Any]:
    """Return (name, value) of `x=128x512:bfloat16` (a random array), `n=8` or `op=add`."""
    import ml_dtypes
    import numpy as np

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
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ShapeError(f"--arg {text!r}: shape {shape_text!r} is not like 128x512")
    try:
        dtype = np.dtype(getattr(ml_dtypes, dtype_text, dtype_text))
    except TypeError:
        raise ShapeError(f"--arg {text!r}: {dtype_text!r} is no NumPy or ml_dtypes dtype") from None
    generator = np.random.default_rng(seed)
    shape = tuple(map(int, sizes))
    if dtype.kind in "iu":
        return name, generator.integers(0, 100, shape).astype(dtype)
    return name, generator.standard_normal(shape, dtype=np.float32).astype(dtype)
