"""Entries as a tar archive: `export`, `import_`, and one entry per object at a remote level.

    <digest>/meta.json, then the files it lists, in order, then <digest>/meta.json.minisig if signed
    ...
    end.json      how many entries, and the sha256 of every byte before it; then two zero blocks

Any tar program can unpack an archive. Reading one is stricter: each header must be, byte for byte,
the one that `pack` writes for that name and size. So an archive can hold no links, devices, long
names, sparse maps or paths that lead elsewhere. A file must be as large as its manifest, which is
read first, says. A cut or a flipped bit anywhere is detected. Equal entries give equal bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import secrets
import stat
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from nmm_compiler.cache.entry import (
    MANIFEST,
    MAX_ENTRY_BYTES,
    MAX_FILES_PER_ENTRY,
    MAX_MANIFEST_BYTES,
    SIGNATURE,
    Entry,
    check_digest,
    parse,
)
from nmm_compiler.cache.signing import Signer, Trusted
from nmm_compiler.errors import CacheTrustError, DamagedEntryError

MAX_ARCHIVE_BYTES = 8 << 30
END = "end.json"
_END_BYTES = 1024
_MAX_SIGNATURE_BYTES = 4096
_BLOCK = tarfile.BLOCKSIZE
_GZIP_MAGIC = b"\x1f\x8b"


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.USTAR_FORMAT)


def _member(name: str, data: bytes) -> bytes:
    return _header(name, len(data)) + data + b"\0" * (-len(data) % _BLOCK)


def _end(count: int, sha256: str) -> bytes:
    data = json.dumps({"entries": count, "sha256": sha256}).encode().ljust(_END_BYTES)
    return _member(END, data) + b"\0" * (2 * _BLOCK)


def pack(entries: Iterable[Entry], out: BinaryIO, signer: Signer | None = None) -> int:
    """Write a tar archive of the entries, signed if a signer is given; return how many."""
    count, total = 0, hashlib.sha256()
    for entry in entries:
        members = {MANIFEST: entry.manifest}
        members |= {name: text.encode() for name, text in sorted(entry.files.items())}
        if signer is not None:
            members[SIGNATURE] = signer.sign(entry.key.digest, entry.manifest)
        for name, data in members.items():
            packed = _member(f"{entry.key.digest}/{name}", data)
            total.update(packed)
            out.write(packed)
        count += 1
    out.write(_end(count, total.hexdigest()))
    return count


def pack_one(entry: Entry, signer: Signer | None = None) -> bytes:
    """Return the archive of one entry."""
    out = io.BytesIO()
    pack([entry], out, signer)
    return out.getvalue()


def unpack(source: BinaryIO, name: str, trusted: Trusted | None = None) -> Iterator[Entry]:
    """Yield the verified entries of an archive, plain or gzip; `name` is for messages.

    trusted: public keys, of which one must have signed each entry; None requires no signature. The
    whole archive is verified only when the iterator ends: use no entry before. Raises
    CacheTrustError for a member that no export writes, DamagedEntryError for bytes
    that do not match their sha256 or an archive that is cut short or changed.
    """
    head = source.read(2)
    source.seek(0)
    stream: _Readable = source
    if head == _GZIP_MAGIC:
        stream = gzip.GzipFile(fileobj=source, mode="rb")
    try:
        yield from _Reader(stream, name, trusted).entries()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DamagedEntryError(
            f"{name} is not a whole tar archive: {error}; get it again"
        ) from None


class _Reader:
    """Reads one archive from front to back; holds one entry at a time."""

    def __init__(self, stream: _Readable, name: str, trusted: Trusted | None) -> None:
        self._stream, self._name, self._trusted = stream, name, trusted
        self._total, self._left = hashlib.sha256(), MAX_ARCHIVE_BYTES

    def entries(self) -> Iterator[Entry]:
        """Yield the entries; raise when the end marker does not agree with what was read."""
        seen: set[str] = set()
        block = self._read(_BLOCK)
        while not block.startswith(END.encode() + b"\0"):
            digest, size = self._place(block, MANIFEST, MAX_MANIFEST_BYTES)
            if digest in seen:
                raise CacheTrustError(f"{self._name} holds entry {digest[:12]} twice")
            seen.add(digest)
            entry, block = self._entry(digest, self._contents(block, size))
            yield entry
        wanted = _end(len(seen), self._total.hexdigest())
        if block + self._read(len(wanted) - _BLOCK) != wanted:
            raise DamagedEntryError(
                f"{self._name} is not a whole tar archive: its end marker is not that of the "
                f"{len(seen)} entries before it; get it again"
            )
        if self._stream.read(1):  # also makes gzip check its CRC
            raise DamagedEntryError(f"{self._name} goes on behind its end marker; get it again")

    def _entry(self, digest: str, raw: bytes) -> tuple[Entry, bytes]:
        """Read the files of a manifest; return their entry and the header that comes after."""
        where = f"{self._name}: entry {digest[:12]}"
        try:
            manifest = parse(raw, digest)
            contents = {}
            for name, (size, _) in sorted(manifest.files.items()):
                block = self._read(_BLOCK)
                self._place(block, name, size, digest)
                contents[name] = self._contents(block, size)
            entry = manifest.entry(contents, None)
        except DamagedEntryError as error:
            raise DamagedEntryError(f"{where}: {error}; get it again") from None
        block = self._read(_BLOCK)
        signature = None
        if _name(block) == f"{digest}/{SIGNATURE}":
            _, size = self._place(block, SIGNATURE, _MAX_SIGNATURE_BYTES, digest)
            signature = self._contents(block, size)
            block = self._read(_BLOCK)
        if self._trusted is not None:
            self._trusted.check(raw, signature, where)
        return entry, block

    def _place(self, block: bytes, name: str, limit: int, digest: str = "") -> tuple[str, int]:
        """Return (digest, size) of a header that must be the one `pack` writes for `name`."""
        found = _name(block).partition("/")[0]
        size = block[124:135]
        wanted = int(size, 8) if size.isdigit() and not set(size) - set(b"01234567") else -1
        if (
            check_digest(found)
            and found == (digest or found)
            and 0 <= wanted <= limit
            and block == _header(f"{found}/{name}", wanted)
        ):
            return found, wanted
        raise CacheTrustError(
            f"{self._name} holds {_name(block)!r:.200} (tar type {block[156:157]!r}) where "
            f"{name!r:.120} of at most {limit} B belongs; nothing of the archive was taken. Make "
            "archives with `nmm cache export`"
        )

    def _contents(self, header: bytes, size: int) -> bytes:
        padded = self._read(size + -size % _BLOCK)
        self._total.update(header + padded)
        return padded[:size]

    def _read(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise CacheTrustError(
                f"{self._name} unpacks to over {MAX_ARCHIVE_BYTES} B; nothing was taken"
            )
        data = bytearray()
        while len(data) < size:
            piece = self._stream.read(min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError("it ends too early")
            data += piece
        return bytes(data)


def _name(block: bytes) -> str:
    """Return the name of a header: the prefix field, if any, a slash, and the name field."""
    parts = (block[345:500].rstrip(b"\0"), block[:100].rstrip(b"\0"))
    return b"/".join(part for part in parts if part).decode("ascii", "backslashreplace")


def write(path: Path, entries: Iterable[Entry], signer: Signer | None = None) -> int:
    """Write an archive file, compressed when its name ends in .gz or .tgz; return the count.

    The file gets its name when it is complete. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as raw:
            if path.suffix in (".gz", ".tgz"):
                with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
                    count = pack(entries, packed, signer)  # type: ignore[arg-type]
            else:
                count = pack(entries, raw, signer)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def read(path: Path, trusted: Trusted | None = None) -> Iterator[Entry]:
    """Yield the verified entries of an archive file; raises as `unpack` does, and OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not hang
    with open(handle, "rb") as source:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise CacheTrustError(f"{path} is not a regular file; pass an archive on disk")
        yield from unpack(source, str(path), trusted)


__all__ = ["MAX_ENTRY_BYTES", "MAX_FILES_PER_ENTRY", "pack", "pack_one", "read", "unpack", "write"]
