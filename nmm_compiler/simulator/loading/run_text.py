"""Runs the source text of a kernel as the bytes that were read or verified.

Whoever asks for the source of an executed function later (`inspect.getsource`, tracebacks, the NKI
compiler) gets the same bytes from `linecache`, whatever has become of the file meanwhile.
"""

from __future__ import annotations

import linecache
from typing import Any


def run_source(text: str, filename: str, namespace: dict[str, Any]) -> None:
    """Execute `text` in `namespace`, and keep it as the source that `filename` is shown with.

    filename: stands in tracebacks and `co_filename`; nothing is read from it.
    """
    # an entry without a time is never compared with the file
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec", dont_inherit=True), namespace)  # noqa: S102
