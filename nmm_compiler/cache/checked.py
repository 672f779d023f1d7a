"""Marks of the entries on disk whose sources passed `foreign.check_shape`.

Parsing a kernel takes ten times as long as reading its entry, so a source is parsed once on this
disk and not once in each process. `v1/.checked/<digest>` holds one line: the digest of the rules
and the sha256 of the entry's manifest, which holds the sha256 of each file. Where a rule or a byte
of the entry has changed, the line differs and the source is parsed again.

No archive and no remote level can bring a mark, and a mark that somebody else could have written
does not count.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from nmm_compiler.cache import foreign, trust
from nmm_compiler.cache.entry import Entry
from nmm_compiler.errors import DamagedEntryError

FOLDER = ".checked"


@functools.cache
def rules() -> str:
    """Return the digest of the rules: the file that holds them, and the grammar it parses with."""
    assert foreign.__file__ is not None
    text = Path(foreign.__file__).read_bytes() + repr(sys.version_info[:2]).encode()
    return hashlib.sha256(text).hexdigest()


def _line(entry: Entry) -> bytes:
    return f"{rules()} {hashlib.sha256(entry.manifest).hexdigest()}\n".encode()


def is_marked(folder: Path, entry: Entry, believed: frozenset[int]) -> bool:
    """Return whether the entry passed these rules with these bytes.

    folder: of the entries. believed: the user ids whose marks count.
    """
    try:
        marks = trust.open_entry(folder / FOLDER, believed)
    except (OSError, DamagedEntryError):
        return False
    try:
        return trust.read_file(entry.key.digest, marks, believed)[0] == _line(entry)
    except (OSError, DamagedEntryError):
        return False
    finally:
        os.close(marks)


def mark(folder: Path, entry: Entry) -> None:
    """Write that the entry passed; where that fails, the next process checks again."""
    marks = folder / FOLDER
    stage = marks / f"{entry.key.digest}.{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):  # it is there, or opening the mark fails too
        os.mkdir(marks, 0o700)
    try:
        handle = os.open(stage, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as file:
            file.write(_line(entry))
        os.rename(stage, marks / entry.key.digest)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(stage)


def unmark(folder: Path, digest: str) -> None:
    """Delete the mark of an entry that is deleted."""
    with contextlib.suppress(OSError):
        os.unlink(folder / FOLDER / digest)


def clear(folder: Path, names: Sequence[str] | None = None) -> None:
    """Delete the marks that have no entry, and what killed writers left.

    names: of the entries, where they are known. A mark of an entry that is newer may go with them.
    """
    try:
        marks = os.listdir(folder / FOLDER)
    except OSError:
        return
    for name in set(marks).difference(os.listdir(folder) if names is None else names):
        unmark(folder, name)
