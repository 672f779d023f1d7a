"""Entries as a tar archive: `export`, `import_`, and one entry per object at a remote level.

An archive holds regular files named `<digest>/<file>` and nothing else. The reader extracts
nothing: it takes names and bytes, refuses every other kind of member (links, devices, paths that
lead elsewhere, sparse files, doubled names) and bounds what a small archive may unpack to. Equal
entries give equal bytes.
"""

from __future__ import annotations

import gzip
import io
import os
import secrets
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from nmm_compiler.cache.entry import MANIFEST, Entry, check_digest, check_name, parse
from nmm_compiler.cache.trust import MAX_FILE_BYTES
from nmm_compiler.errors import CacheKeyError, CacheTrustError, DamagedEntryError

MAX_FILES_PER_ENTRY = 64
MAX_ARCHIVE_BYTES = 8 << 30
_HEADER_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


def pack(entries: Iterable[Entry], out: BinaryIO) -> int:
    """Write a tar archive of the entries; return how many. The manifest comes first in each."""
    count = 0
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for entry in entries:
            members = {MANIFEST: entry.manifest}
            members |= {name: text.encode() for name, text in sorted(entry.files.items())}
            for name, data in members.items():
                info = tarfile.TarInfo(f"{entry.key.digest}/{name}")
                info.size, info.mode = len(data), 0o600
                archive.addfile(info, io.BytesIO(data))
            count += 1
    return count


def pack_one(entry: Entry) -> bytes:
    """Return the archive of one entry."""
    out = io.BytesIO()
    pack([entry], out)
    return out.getvalue()


def unpack(source: BinaryIO, name: str) -> Iterator[Entry]:
    """Yield the verified entries of an archive, plain or gzip; `name` is for messages.

    Raises CacheTrustError for a member that has no business there, DamagedEntryError for bytes
    that do not match their sha256 or an archive that is cut short.
    """
    head = source.read(2)
    source.seek(0)
    stream: _Readable = source
    if head == _GZIP_MAGIC:
        stream = gzip.GzipFile(fileobj=source, mode="rb")
    bounded = _Bounded(stream, name)
    seen: set[str] = set()
    digest, contents = "", dict[str, bytes]()
    try:
        with tarfile.open(fileobj=bounded, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                bounded.start_member()
                folder, file = _split(member, name)
                if folder != digest:
                    if contents:
                        yield _entry(digest, contents, name)
                    if folder in seen:
                        raise CacheTrustError(f"{name} holds entry {folder[:12]} twice")
                    seen.add(folder)
                    digest, contents = folder, {}
                if file in contents or len(contents) > MAX_FILES_PER_ENTRY:
                    raise CacheTrustError(f"{name} holds {folder[:12]}/{file} twice, or too much")
                data = archive.extractfile(member)
                assert data is not None  # a regular file, as `_split` made sure
                contents[file] = data.read(MAX_FILE_BYTES + 1)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DamagedEntryError(
            f"{name} is not a whole tar archive: {error}; get it again"
        ) from None
    if contents:
        yield _entry(digest, contents, name)


def write(path: Path, entries: Iterable[Entry]) -> int:
    """Write an archive file, compressed when its name ends in .gz or .tgz; return the count.

    It appears under its name when it is complete. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as raw:
            if path.suffix in (".gz", ".tgz"):
                with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
                    count = pack(entries, packed)  # type: ignore[arg-type]
            else:
                count = pack(entries, raw)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def read(path: Path) -> Iterator[Entry]:
    """Yield the verified entries of an archive file; raises as `unpack` does, and OSError."""
    with open(path, "rb") as source:
        yield from unpack(source, str(path))


def _split(member: tarfile.TarInfo, archive: str) -> tuple[str, str]:
    """Return (digest, file name) of a member, or refuse it."""
    folder, _, file = member.name.partition("/")
    regular = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()
    try:
        named = check_digest(folder) and (file == MANIFEST or check_name(file) == file)
    except CacheKeyError:
        named = False
    if not (regular and named and member.size <= MAX_FILE_BYTES):
        raise CacheTrustError(
            f"{archive} holds {member.name!r} (tar type {member.type!r}, {member.size} B), which "
            "is no file of a cache entry; nothing of the archive was taken. Make archives with "
            "`nmm cache export`"
        )
    return folder, file


def _entry(digest: str, contents: dict[str, bytes], archive: str) -> Entry:
    raw = contents.pop(MANIFEST, None)
    if raw is None:
        raise DamagedEntryError(f"{archive}: entry {digest[:12]} has no {MANIFEST}; get it again")
    try:
        return parse(raw, digest).entry(contents, None)
    except DamagedEntryError as error:
        raise DamagedEntryError(f"{archive}: entry {digest[:12]}: {error}; get it again") from None


class _Bounded:
    """A reader that gives up on an archive that unpacks to too much, in all or in one member."""

    def __init__(self, source: _Readable, name: str) -> None:
        self._source, self._name, self._left = source, name, MAX_ARCHIVE_BYTES
        self.start_member()

    def start_member(self) -> None:
        """Allow one more file, its headers and what is read ahead."""
        self._member_left = MAX_FILE_BYTES + _HEADER_BYTES

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self._left -= len(data)
        self._member_left -= len(data)
        if min(self._left, self._member_left) < 0:
            raise CacheTrustError(
                f"{self._name} unpacks to more than an archive of cache entries can (a file of "
                f"{MAX_FILE_BYTES} B, {MAX_ARCHIVE_BYTES} B in all); nothing was taken"
            )
        return data
