"""Marks of the entries on disk whose sources passed `foreign.check_shape`.

Parsing a kernel takes ten times as long as reading its entry, so a source is parsed once on this
disk and not once in each process. The file `.checked` of an entry's directory holds one line: the
digest of the rules and the sha256 of the manifest, which holds the sha256 of each file. Where a
rule or a byte of the entry has changed, the line differs and the source is parsed again; so it is
where a kill has cut the line.

No archive and no remote level can bring a mark, since no file of an entry has a name that starts
with a dot. A mark that somebody else could have written does not count.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from pathlib import Path

from nmm_compiler.cache import foreign, trust
from nmm_compiler.cache.entry import Entry
from nmm_compiler.errors import DamagedEntryError

MARK = ".checked"


@functools.cache
def rules() -> str:
    """Return the digest of the rules: the file that holds them, and the grammar it parses with."""
    assert foreign.__file__ is not None
    text = Path(foreign.__file__).read_bytes() + repr(sys.version_info[:2]).encode()
    return hashlib.sha256(text).hexdigest()


def _line(entry: Entry) -> bytes:
    return f"{rules()} {hashlib.sha256(entry.manifest).hexdigest()}\n".encode()


def is_marked(entry: Entry, believed: frozenset[int]) -> bool:
    """Return whether the entry passed these rules with these bytes.

    believed: the user ids whose marks count.
    """
    if entry.directory is None:
        return False
    try:
        folder = trust.open_entry(entry.directory, believed)
    except (OSError, DamagedEntryError):
        return False
    try:
        return trust.read_file(MARK, folder, believed)[0] == _line(entry)
    except (OSError, DamagedEntryError):
        return False
    finally:
        os.close(folder)


def mark(entry: Entry) -> None:
    """Write that the entry passed; where that fails, the next process checks again."""
    if entry.directory is None:
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        handle = os.open(entry.directory / MARK, flags, 0o600)
        with open(handle, "wb") as file:
            file.write(_line(entry))
