"""The arguments of a kernel as the command line gives them: `--arg NAME=VALUE`."""

from __future__ import annotations

import io
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nmm_compiler.cli import values
from nmm_compiler.errors import OptionTypeError, ShapeError, nearest, user_file_error
from nmm_compiler.outputs import write

if TYPE_CHECKING:
    import numpy as np

_LARGEST_ARRAY_BYTES = 1 << 40
_SHORT_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16",
    "fp32": "float32", "f32": "float32", "fp8": "float8_e4m3",
}  # fmt: skip

Arguments = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        help="NAME=SHAPE:DTYPE, a random array; NAME=@FILE.npy; or NAME=VALUE, a constant",
    ),
]


def arguments_of(texts: list[str], seed: int, *, data: bool) -> dict[str, Any]:
    """Return the kernel's arguments by name; without data an array is its shape and dtype."""
    arguments: dict[str, Any] = {}
    for i, text in enumerate(texts):
        name, value = parse_argument(text, seed + i, data=data)
        if name in arguments:
            raise ShapeError(f"--arg {text!r}: {name!r} is given twice; leave one out")
        arguments[name] = value
    return arguments


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
    import numpy as np

    from nmm_compiler.simulator.run import ArraySpec
    from nmm_compiler.simulator.tensors import dtypes

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
    import numpy as np

    from nmm_compiler.simulator.run import ArraySpec
    from nmm_compiler.simulator.tensors import dtypes

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
    import numpy as np

    plain = [one.astype(np.float32) if one.dtype.kind == "V" else one for one in outputs]
    arrays: Any = {f"out{i}": array for i, array in enumerate(plain)}
    archive = io.BytesIO()  # a zip file needs to know its place, which a device does not tell
    np.savez(archive, **arrays)
    write(path, lambda file: file.write(archive.getbuffer()))
