"""`nmm build`: fills the kernel cache before a model is deployed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nmm_compiler.cli import values
from nmm_compiler.cli.wanted_kernels import (
    Cores,
    Jobs,
    Ratios,
    Targets,
    Tokens,
    Wanted,
    lines_of,
    wanted_kernels,
)
from nmm_compiler.options import DTYPES, FACTOR_SPLITS
from nmm_compiler.outputs import write_text


def build(
    wanted: Wanted,
    target: Targets = "trn2",
    ratio: Ratios = None,
    tokens: Tokens = None,
    tp: Cores = "1",
    split: Annotated[
        str,
        values.choice_option("split", lambda: FACTOR_SPLITS, "how these cut factors: row or rank"),
    ] = "row",
    dtype: Annotated[
        str, values.choice_option("dtype", lambda: DTYPES, "bfloat16, float16 or float32")
    ] = "bfloat16",
    include: Annotated[list[str] | None, typer.Option(help="only layers like mlp, q_proj")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="never these layers")] = None,
    jobs: Jobs = None,
    to_list: Annotated[
        Path | None, values.output_option("--list", help_="write the kernels here, build none")
    ] = None,
    as_json: values.AsJson = False,
) -> None:
    """Build every kernel that a model launches into the cache; what is there is left alone.

    After a kill or Ctrl-C the same command goes on where it was.

    Example: nmm build llama-3.2-1b --ratio 0.2 --target trn2,trn3 --tp 1,4 --jobs 8

    Example: nmm build specs.jsonl --json
    """
    from nmm_compiler.cache.store import Store
    from nmm_compiler.cli.progress import steps
    from nmm_compiler.cli.show import show, show_json
    from nmm_compiler.codegen.build_many import fill
    from nmm_compiler.options import cache_dir
    from nmm_compiler.report.text import counted

    if to_list is None:
        Store.open()  # refuses a directory that others can write, before any work
    with steps(f"reading {wanted}") as step:
        found = wanted_kernels(
            wanted, target, ratio=ratio, tokens=tokens, tp=tp, progress=step,
            split=split, dtype=dtype, include=include, exclude=exclude,
        )  # fmt: skip
        if to_list is not None:
            write_text(to_list, lines_of(found))
            show(f"{counted(len(found), 'kernel')}: {to_list}")
            return
        filled = fill(found, jobs=jobs, progress=step)
    if as_json:
        show_json({**filled.to_dict(), "cache": str(cache_dir())})
    else:
        show(f"{filled}; cache: {cache_dir()}")
        for one in filled.failed:
            show(f"failed: {one.kernel} for {one.target}: {one.reason}", style="red")
    if filled.failed:
        raise typer.Exit(1)
