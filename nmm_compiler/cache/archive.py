"""Entries as a plain tar archive, for `export`, `import_` and the objects of a shared store.

    <digest>/kernel.py, ..., <digest>/meta.json    the files of each entry, its manifest last
    index.json                                     the digests of all of them

Any tar program can read an archive. Reading one here takes regular files of these names and of the
size of an entry, verifies the sha256 of each, and finds by the index whether any are missing.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from nmm_compiler.cache.entry import (
    DIGEST,
    FILE_NAME,
    MANIFEST,
    MAX_ENTRY_BYTES,
    Entry,
    verified,
)
from nmm_compiler.errors import CacheTrustError, DamagedEntryError

INDEX = "index.json"
_FAULTS = (
    tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError
)  # fmt: skip


def pack(out: IO[bytes], entries: Iterable[Entry]) -> int:
    """Write an archive of the entries; return how many."""
    digests = []
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for entry in entries:
            digests.append(entry.key.digest)
            for name, data in entry.contents.items():
                _add(archive, f"{entry.key.digest}/{name}", data)
        _add(archive, INDEX, json.dumps(digests).encode())
    return len(digests)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o600
    archive.addfile(member, io.BytesIO(data))


def read(path: Path) -> Iterator[Entry]:
    """Yield the verified entries of an archive file; raises as `unpack` does, and OSError."""
    if path.exists() and not path.is_file():  # a FIFO must not hang
        raise CacheTrustError(f"{path} is not a regular file; pass an archive on disk")
    with _Bounded(path) as source:
        yield from unpack(source, str(path))


def unpack(source: IO[bytes], name: str) -> Iterator[Entry]:
    """Yield the verified entries of an archive; `name` is for messages.

    The whole archive is verified only when the iterator ends: use no entry before. Raises
    CacheTrustError for a member that no export writes, DamagedEntryError for bytes
    that do not match their sha256 or an archive that is not whole.
    """
    try:
        with tarfile.open(fileobj=source, mode="r:") as archive:
            yield from _entries(archive, name)
    except (*_FAULTS, DamagedEntryError) as error:
        raise DamagedEntryError(
            f"{name} is not a whole archive of `nmm build --archive`: {error!s:.300}; get it again"
        ) from None


def _entries(archive: tarfile.TarFile, name: str) -> Iterator[Entry]:
    complete: list[str] = []
    contents: dict[str, bytes] = {}  # of the entry that is being read
    for member in archive:
        digest, _, file = member.name.partition("/")
        is_ours = DIGEST.fullmatch(digest) and (file == MANIFEST or FILE_NAME.fullmatch(file))
        if (
            member.type != tarfile.REGTYPE
            or member.size + sum(map(len, contents.values())) > MAX_ENTRY_BYTES
            or not (is_ours or member.name == INDEX)
            or digest in complete
        ):
            raise CacheTrustError(
                f"{name} holds {member.name!r:.200} (tar type {member.type!r}, {member.size} B), "
                "which no archive of `nmm build --archive` does; nothing of it was taken"
            )
        contents[file] = archive.extractfile(member).read()  # type: ignore[union-attr]
        if member.name == INDEX:
            if json.loads(contents.pop(file)) != complete or contents or archive.next():
                raise DamagedEntryError(f"its {INDEX} is not that of the {len(complete)} entries")
            return
        if file == MANIFEST:
            yield verified(digest, contents)
            complete.append(digest)
            contents = {}
    raise DamagedEntryError(f"it ends without {INDEX}")


class _Bounded(io.FileIO):
    """A file whose reads are no larger than an entry, whatever a header claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most `size` bytes; raise ValueError for more than an entry may have."""
        if size is None or not 0 <= size <= MAX_ENTRY_BYTES:
            raise ValueError(f"a header of {size} bytes")
        return super().read(size)
