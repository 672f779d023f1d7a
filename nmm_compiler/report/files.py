"""Files that are written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from nmm_compiler.errors import OutputError


def write_whole(path: str | Path, chunks: Iterable[str]) -> Path:
    """Write the chunks to `path` through a file beside it; return the path.

    Raises OutputError if it cannot be written; the file that was there before is then untouched.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.writelines(chunks)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    return path
