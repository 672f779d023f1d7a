"""Digests of the code that decides what is emitted, for the cache key.

Every file of the package counts, unless LEFT_OUT names it with the reason. So a new file, or a
whole new room, is in the key without being listed. One digest per room, so that `nmm cache list`
can say which room changed. Read once per process.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.targets import Target, get
from nmm_compiler.targets.this_machine import differences
from nmm_compiler.version import VERSION

_PACKAGE = Path(__file__).resolve().parent.parent
_LENGTH = 16

LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        "backend*": "decides which graphs call a kernel, not what the kernel says",
        "cache/*": "stores what was emitted",
        "cli/*": "prints what was emitted",
        "device/*": "tries constructs on a device; the key has what it found",
        "lowrank_models/*": "makes the weights",
        "mlir/*": "writes graphs",
        "passes/*": "finds the specs; the spec itself is in the key",
        "prediction/*": "adds up what kernels will take",
        "runtime/*": "runs what was emitted",
        "ops/*": "the torch ops that call kernels",
        "kernels/*/op.py": "the torch ops that call kernels",
        "__init__.py": "the door; its version is an entry of its own",
        "__main__.py": "the door of the command line",
        "py.typed": "a mark for type checkers",
    }
)
"""Pattern of a path inside the package (`*` crosses folders) -> why it cannot change a source."""

_NOT_CODE = ("*.pyc", "*.pyo", "*/__pycache__/*", "*~", ".*", "*/.*")


def covered_files(package: Path = _PACKAGE) -> Iterator[tuple[str, Path]]:
    """Yield (path inside the package, file) of every file that the key covers, in order."""
    found = sorted((p.relative_to(package).as_posix(), p) for p in package.rglob("*"))
    for name, path in found:
        left_out = any(fnmatch.fnmatchcase(name, pattern) for pattern in (*LEFT_OUT, *_NOT_CODE))
        if not left_out and path.is_file():
            yield name, path


@functools.lru_cache(maxsize=4)
def code_digests(package: Path = _PACKAGE) -> Mapping[str, str]:
    """Return room -> digest of the names and contents of its files; "." is the package's own."""
    rooms: dict[str, hashlib._Hash] = {}
    for name, path in covered_files(package):
        room = name.partition("/")[0] if "/" in name else "."
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        rooms.setdefault(room, hashlib.sha256()).update(f"{name}\0{content}\n".encode())
    return MappingProxyType({room: total.hexdigest()[:_LENGTH] for room, total in rooms.items()})


def key_fields(spec: KernelSpec, target: Target, budget: int) -> dict[str, Any]:
    """Return the fields that every cache key of a kernel has: what for, and by which code."""
    return {
        "family": spec.family,
        "spec": spec.to_dict(),
        "target": target.name,
        "machine": differences(target, get(target.name)),
        "instruction_budget": budget,
        "code": dict(code_digests()),
        "version": VERSION,
    }
