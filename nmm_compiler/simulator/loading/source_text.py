"""Reads the source text of a kernel file, and runs it from the bytes that were read or verified.

`inspect.getsource`, tracebacks and the NKI compiler later get the same bytes from `linecache`, even
if the file has changed since.
"""

from __future__ import annotations

import linecache
import stat
from pathlib import Path
from typing import Any

from nmm_compiler.errors import FileError

LARGEST_SOURCE_BYTES = 4 << 20  # the largest public NKI kernel file has 0.2 MB


def read_source(path: Path) -> str:
    """Return the text of a source file.

    Raises FileError for a file that is not regular (a pipe would never end), is larger than 4
    MiB, is not UTF-8, or cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileError(f"{path} is no regular file; pass a Python file")
        with path.open("rb") as file:
            data = file.read(LARGEST_SOURCE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, FileError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{path} cannot be read: {reason}") from error
    if len(data) > LARGEST_SOURCE_BYTES:
        raise FileError(
            f"{path} is larger than {LARGEST_SOURCE_BYTES:,} B, so no kernel source; split it"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None


def run_source(text: str, filename: str, namespace: dict[str, Any]) -> None:
    """Execute `text` in `namespace`, and keep it as the source of `filename`.

    filename: stands in tracebacks and `co_filename`; nothing is read from it.
    """
    # an entry without a time is never compared with the file
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec", dont_inherit=True), namespace)  # noqa: S102
