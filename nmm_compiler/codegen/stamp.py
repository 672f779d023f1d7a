"""Digests of the code that decides what is emitted, for the cache key.

A change of a template, of codegen or of the timing model makes a new key, so that a stale kernel is
never found. Read once per process.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

from nmm_compiler.codegen.specialize import template_text

_PACKAGE = Path(__file__).resolve().parent.parent
_LENGTH = 16


def _digest(texts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for text in texts:
        total.update(hashlib.sha256(text).digest())
    return total.hexdigest()[:_LENGTH]


@functools.lru_cache(maxsize=64)
def template_stamp(path: Path) -> str:
    """Return the digest of a template and of what it copies from its neighbours."""
    return _digest([template_text(path).encode()])


@functools.lru_cache(maxsize=1)
def source_stamp() -> str:
    """Return the digest of codegen and of the families."""
    names = ("emitted_file", "specialize", "fold_constants", "known_values", "choose", "cost")
    files = [_PACKAGE / "codegen" / f"{name}.py" for name in names]
    files += sorted(p for p in (_PACKAGE / "kernels").rglob("*.py") if p.stem != "op")
    return _digest(path.read_bytes() for path in files)


@functools.lru_cache(maxsize=1)
def search_stamp() -> str:
    """Return the digest of what ranks schedules: the simulator and the targets."""
    files = sorted((_PACKAGE / "simulator").rglob("*.py")) + sorted(
        (_PACKAGE / "targets").glob("*.py")
    )
    return _digest(path.read_bytes() for path in files)
