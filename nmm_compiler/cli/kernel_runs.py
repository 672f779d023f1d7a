"""What `nmm simulate` and `nmm profile` do with a kernel file, in a process of its own.

The arguments of a kernel as the command line gives them (`--arg NAME=VALUE`), a user's function
that says the right outputs (`--reference FILE:fn`), and profiles side by side. Only that process
loads this file, and the simulator with it.
"""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from nmm_compiler.cli import values
from nmm_compiler.cli.models import attribute_of, foreign
from nmm_compiler.errors import (
    OptionTypeError,
    ShapeError,
    UnknownNameError,
    nearest,
    user_file_error,
)
from nmm_compiler.outputs import write
from nmm_compiler.report.headline import not_told
from nmm_compiler.report.parts import Grid, Line, Part, Section
from nmm_compiler.simulator.loading.loader import load_file
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.timing.causes import statement
from nmm_compiler.simulator.timing.profile import Profile

_LARGEST_ARRAY_BYTES = 1 << 40
_SHORT_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16",
    "fp32": "float32", "f32": "float32", "fp8": "float8_e4m3",
}  # fmt: skip
_ROWS = 12
_FIGURES = ("latency", "roofline", "mfu", "mbu", "SBUF", "PSUM", "instructions")
"""Of those of a profile, the ones that profiles are compared by."""


def run(kernel: str, arguments: dict[str, Any], target: str, grid: int, **more: Any) -> Any:
    """Return the simulation of a kernel."""
    more |= {"target": target, "grid": grid, "max_instructions": values.MOST}
    return simulate(kernel, named=arguments, **more)


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
    """Return (name, value) of `x=128x512:bfloat16` (a random array), `x=@x.npy`, `n=8`, `op=add`.

    Raises ShapeError for a text that is none of these, FileError for a file that is no array.
    """
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ShapeError(
            f"--arg {text!r} is not NAME=SHAPE:DTYPE, NAME=@FILE.npy or NAME=VALUE, "
            "e.g. x=128x512:float32"
        )
    if value.startswith("@"):
        return name, _of_file(value[1:], data)
    shape_text, colon, dtype_text = value.partition(":")
    if not colon:
        return name, values.literal(value)
    return name, _random(text, shape_text, _SHORT_NAMES.get(dtype_text, dtype_text), seed, data)


def _random(text: str, shape_text: str, dtype_text: str, seed: int, data: bool) -> Any:
    sizes = shape_text.lower().split("x")
    if not all(size.isdecimal() and len(size) < 20 and int(size) > 0 for size in sizes):
        raise ShapeError(f"--arg {text!r}: shape {shape_text!r} is not like 128x512")
    kind = dtypes.ALL.get(dtype_text)
    allowed = {str(d) for d in dtypes.ALL.values() if d.kind != "packed"} - {"tfloat32"}
    if kind is None or kind not in allowed:
        known = nearest(dtype_text, sorted(allowed))
        raise ShapeError(f"--arg {text!r}: {dtype_text!r} is no dtype of NKI; use one of {known}")
    shape = tuple(map(int, sizes))
    if not data:
        return ArraySpec(shape, kind)
    if math.prod(shape) * 4 > _LARGEST_ARRAY_BYTES:
        raise ShapeError(f"--arg {text!r}: more than a TiB; nmm profile needs no data")
    generator = np.random.default_rng(seed)
    if kind.kind == "bool":
        return generator.integers(0, 2, shape).astype(np.bool_)
    if kind.kind == "int":
        return generator.integers(0, 100, shape).astype(kind.numpy)
    return generator.standard_normal(shape, dtype=np.float32).astype(kind.numpy)


def _of_file(name: str, data: bool) -> Any:
    """Return the array of FILE.npy or FILE.npy:DTYPE; without data its shape and dtype.

    float64 and int64, which NKI lacks, become float32 and int32.
    """
    path, _, dtype = name.rpartition(":")
    kind = dtypes.ALL.get(_SHORT_NAMES.get(dtype, dtype)) if path else None
    path = path if kind is not None else name
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise user_file_error(path, "--arg takes a .npy file", error) from error
    if not isinstance(array, np.ndarray):
        raise OptionTypeError("arg", path, "a .npy file: an .npz holds several arrays")
    narrower = {"float64": np.float32, "int64": np.int32}.get(array.dtype.name)
    if kind is not None:  # np.save writes bfloat16 as bytes of no type
        same = array.dtype.kind == "V" and array.dtype.itemsize == kind.numpy.itemsize
        array = array.view(kind.numpy) if same else array.astype(kind.numpy)
    elif narrower is not None:
        array = array.astype(narrower)
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
    file, colon, function = name.rpartition(":")
    if not (colon and file.endswith(".py")):
        raise UnknownNameError("reference", name, ["FILE.py:function"])
    # stand-ins: it may be in the kernel's file
    called = attribute_of(file, function, lambda path: vars(load_file(Path(path))))
    copies = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    arrays = [v for v in copies.values() if isinstance(v, np.ndarray)]
    with foreign(file, f"{function}() raised"):
        by_name = set(copies) <= set(inspect.signature(called).parameters)
        result = called(**copies) if by_name else called(*arrays)
        several = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(np.asarray(one, dtype=np.float64) for one in several)


def compare(
    outputs: Sequence[np.ndarray], wanted: Sequence[np.ndarray], inputs: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """Return how far each output is from the reference, as a share of the reference's largest
    value. Raises ShapeError where shapes differ."""
    rtol = tolerance((*outputs, *inputs))
    if len(outputs) != len(wanted):
        raise ShapeError(f"the kernel has {len(outputs)} outputs, the reference {len(wanted)}")
    agreements = []
    for i, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
        if got.shape != want.shape:
            raise ShapeError(f"output {i} has shape {got.shape}, the reference {want.shape}")
        off = np.abs(got.astype(np.float64) - want)
        worst = np.unravel_index(int(np.argmax(np.nan_to_num(off, nan=np.inf))), off.shape)
        error = float(off.max()) / (float(np.abs(want).max()) or 1.0)
        figures = {"output": i, "error": error, "rtol": rtol, "worst": [int(at) for at in worst]}
        agreements.append({**figures, "passed": error <= rtol})  # NaN is not
    return agreements


def said(figures: Mapping[str, Any]) -> str:
    """Return one of the comparisons in words."""
    verdict = "agrees with" if figures["passed"] else "DIFFERS from"
    return (
        f"output {figures['output']} {verdict} the reference: largest error "
        f"{figures['error']:.3g} of the largest value, tolerance {figures['rtol']:.3g}, at "
        f"{figures['worst']}"
    )


def comparison_parts(found: Mapping[str, Profile]) -> list[Part]:
    """Return the comparison of named profiles with the first of them."""
    first, *_ = found.values()
    best = min(found, key=lambda name: found[name].latency_us)
    gain = first.latency_us / found[best].latency_us
    error = max(found[best].error_band.mean, first.error_band.mean)
    headline = f"fastest: {best}, {found[best].latency_us:.2f} us simulated on {first.target}, "
    if found[best] is not first:
        headline += not_told(gain, error, "the first")
    lines: dict[str, dict[str, float]] = {}
    operations: dict[str, dict[str, float]] = {}
    rows = []
    for name, profile in found.items():
        lines[name] = {
            f"{one.line:>4} {statement(one.file, one.line) or one.name}": one.path_us
            for one in profile.by_line()
        }
        operations[name] = {
            f"{one.name} on {one.engine}": one.path_us for one in profile.by_instruction()
        }
        figures = {figure: value for figure, value, _ in profile.figures().rows}
        rows.append((*map(figures.__getitem__, _FIGURES), name))
    return [
        Line(f"{headline}{gain:.2f} times as fast as the first", "headline"),
        Grid.of((*_FIGURES, "kernel"), rows, right=_FIGURES),
        Section("critical us of each source line", (_differences(lines, "source line"),)),
        Section("critical us of each instruction", (_differences(operations, "what"),)),
    ]


def _differences(found: Mapping[str, Mapping[str, float]], what: str) -> Grid:
    """Return the rows that differ most."""

    def spread(text: str) -> float:
        figures = [each.get(text, 0.0) for each in found.values()]
        return max(figures) - min(figures)

    texts = dict.fromkeys(text for each in found.values() for text in each)
    rows = [
        (*(f"{each[text]:.2f}" if text in each else "-" for each in found.values()), text)
        for text in sorted(texts, key=spread, reverse=True)[:_ROWS]
    ]
    head = tuple(name.rpartition("/")[2] for name in found)
    return Grid.of((*head, what), rows, right=head)
