"""Rows of a long benchmark in a file of JSON lines: a run that is interrupted continues there.

A row is written as soon as it is known. Nothing is ever taken away from the file by a run: of two
rows of one key the later one counts. A row names the `version` of the code that made it, and is
stale under another.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nmm_compiler

Row = dict[str, Any]
DECIDE = ("kernels", "codegen", "simulator", "targets", "passes", "prediction")  # every figure
PACKAGE = Path(nmm_compiler.__file__).parent


@functools.cache
def version() -> str:
    """Return a digest of the code that decides figures."""
    files = sorted(path for room in DECIDE for path in (PACKAGE / room).rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:12]


def is_stale(row: Row) -> bool:
    """Return whether other code than today's made a row."""
    return bool(row["code"] != version())


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, in its order; none if there is no file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def computed(
    path: Path, jobs: Sequence[Any], rows_of: Callable[[Any], list[Row]], workers: int
) -> Iterator[Row]:
    """Yield the rows of each job as workers finish it, after they were appended to the file.

    rows_of: a function of a module, or a partial of one: it runs in fresh processes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        path.open("a", encoding="utf-8") as file,
        multiprocessing.get_context("spawn").Pool(workers) as pool,
    ):
        for done, rows in enumerate(pool.imap_unordered(rows_of, jobs), 1):
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            print(f"{done} of {len(jobs)}", file=sys.stderr, flush=True)
            yield from rows
