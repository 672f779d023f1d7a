"""Runs the source text of a kernel from the bytes that were read or verified.

`inspect.getsource`, tracebacks and the NKI compiler later get the same bytes from `linecache`, even
if the file has changed since.
"""

from __future__ import annotations

import linecache
from typing import Any


def run_source(text: str, filename: str, namespace: dict[str, Any]) -> None:
    """Execute `text` in `namespace`, and keep it as the source of `filename`.

    filename: stands in tracebacks and `co_filename`; nothing is read from it.
    """
    # an entry without a time is never compared with the file
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec", dont_inherit=True), namespace)  # noqa: S102
