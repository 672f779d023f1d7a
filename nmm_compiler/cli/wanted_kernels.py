"""The kernels that `nmm build` and `nmm tune` are asked for: a model's, or those of a file.

A file has one JSON object on each line: {"family": ..., "spec": {...}, "target": ...}; without a
target the line is for each one of --target. `nmm build --list FILE` writes such a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nmm_compiler.cli import values
from nmm_compiler.errors import NmmError, UserFileError

if TYPE_CHECKING:
    from nmm_compiler.kernels.base import KernelSpec

SUFFIX = ".jsonl"
Wanted = Annotated[str, values.model_argument(", or SPECS.jsonl", also=SUFFIX)]
Targets = Annotated[str, values.list_option("target", "targets, as trn1,trn2,trn3")]
Ratios = Annotated[
    str | None, values.list_option("share", "shares of the parameters; none: the model as it is")
]
Tokens = Annotated[
    str | None, values.list_option("size", "tokens of a call; the buckets 1, 2, 4 ... 4096")
]
Cores = Annotated[str, values.list_option("size", "cores that share the model")]
Jobs = Annotated[int | None, values.size_option(help_="processes at once; one for each core")]


def wanted_kernels(
    given: str,
    target: str,
    *,
    ratio: str | None = None,
    tokens: str | None = None,
    tp: str = "1",
    progress: Callable[..., None],
    **more: Any,
) -> list[tuple[KernelSpec, str]]:
    """Return (spec, target) of each kernel; texts have commas between their values.

    more: what `model_kernels` takes besides. Raises UserFileError for a line that is no kernel.
    """
    targets = target.split(",")
    if given.endswith(SUFFIX):
        return _of_file(Path(given), targets)
    from nmm_compiler.cli import models
    from nmm_compiler.prediction.model_kernels import BUCKETS, model_kernels

    models.require_transformers("a model without its weights")
    return model_kernels(
        models.described(given),
        targets,
        ratios=[None] if ratio is None else [float(part) for part in ratio.split(",")],
        tokens=BUCKETS if tokens is None else [int(part) for part in tokens.split(",")],
        tps=[int(part) for part in tp.split(",")],
        progress=progress,
        **more,
    )


def _of_file(path: Path, targets: Sequence[str]) -> list[tuple[KernelSpec, str]]:
    from nmm_compiler.codegen.build_many import request_of

    found: dict[tuple[KernelSpec, str], None] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except ValueError as error:
        raise UserFileError(str(path), "it must be UTF-8 text", error) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
            spec, named, _ = request_of(told)
        except (ValueError, RecursionError, NmmError) as error:
            raise UserFileError(str(path), "each line is one kernel", error, number) from error
        for one in [named] if "target" in told else targets:
            found[spec, one] = None
    if not found:
        raise UserFileError(str(path), "each line is one kernel", ValueError("it is empty"))
    return list(found)


def lines_of(wanted: Iterable[tuple[KernelSpec, str]]) -> str:
    """Return the text of a file of kernels."""
    rows = ({"family": s.family, "spec": s.to_dict(), "target": t} for s, t in wanted)
    return "".join(f"{json.dumps(row)}\n" for row in rows)
