"""The second level: entries at a declared fsspec URL, one tar object `v1/<digest>.tar` each.

Every miss reads here; only `Store.push` writes. An entry is returned only when its sha256s agree,
it is the entry that was asked for, it is signed where the URL names a key, and the caller's check
of each source (lint, for kernels) passes.

fsspec does not tell "no such entry" from "no such remote", and its HTTP files answer every fault
with FileNotFoundError. So this module reads http(s) itself. For other URLs, the first miss asks
whether the bucket or the directory exists.
"""

from __future__ import annotations

import io
import os
import secrets
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from nmm_compiler.cache import archive
from nmm_compiler.cache.entry import Entry
from nmm_compiler.cache.foreign import check_shape
from nmm_compiler.cache.signing import Signer, split_url
from nmm_compiler.errors import CacheTrustError, DamagedEntryError

Check = Callable[[str, str], None]
FOLDER = "v1"
ENTRY_SECONDS = 10.0
MAX_OBJECT_BYTES = archive.MAX_ENTRY_BYTES + (2 << 20)  # the manifest, headers, the end marker
_PIECE = 1 << 16
_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"})
_FILES = frozenset({"file", "local"})


@dataclass(frozen=True)
class Pushed:
    """What `push` did: digests sent now, and those that were there already, whole."""

    sent: tuple[str, ...]
    present: tuple[str, ...]

    def __str__(self) -> str:
        return f"{len(self.sent)} entries sent, {len(self.present)} were there"


def check_sources(entry: Entry, check: Check | None, origin: str) -> None:
    """Check each Python source of an entry from elsewhere: its shape, then `check(name, text)`.

    Raises CacheTrustError when there is no check, or one of the two refuses.
    """
    if check is None:
        raise CacheTrustError(
            f"entry {entry.key.digest[:12]} from {origin} is code and nobody gave a check for it; "
            "pass Store(..., check=...), as nmm_compiler.build_kernel does"
        )
    for name, text in entry.files.items():
        if not name.endswith(".py"):
            continue
        try:
            check_shape(name, text)
            check(name, text)
        except Exception as error:  # a check may refuse in any way; the reason goes on, raised
            raise CacheTrustError(
                f"{name} of entry {entry.key.digest[:12]} from {origin} was refused: {error}"
            ) from error


class Remote:
    """Reads and writes entries below one fsspec URL."""

    def __init__(self, url: str) -> None:
        self.url, self._trusted = split_url(url)
        self._opened: tuple[Any, str] | None = None
        self._is_there = False

    def __str__(self) -> str:
        """Return the URL without what may be a password."""
        parts = urlsplit(self.url)
        if "@" not in parts.netloc:
            return self.url
        return parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]).geturl()

    def _open(self) -> tuple[Any, str]:
        """Return the filesystem and the folder; raises what fsspec raises for a bad URL."""
        if self._opened is None:
            import fsspec.core

            filesystem, path = fsspec.core.url_to_fs(self.url)
            self._opened = filesystem, f"{path.rstrip('/')}/{FOLDER}"
        return self._opened

    def get(self, digest: str) -> Entry | None:
        """Return the entry, its sha256s verified, or None when the URL has none.

        Raises TimeoutError after ENTRY_SECONDS, DamagedEntryError or CacheTrustError for what is
        not to be taken, and whatever the filesystem raises when it cannot be reached.
        """
        name = f"{self}/{FOLDER}/{digest}.tar"
        data = _within(ENTRY_SECONDS, lambda end: self._read(digest, end), name)
        if data is None:
            return None
        if len(data) > MAX_OBJECT_BYTES:
            raise CacheTrustError(f"{name} has over {MAX_OBJECT_BYTES} bytes")
        entries = list(archive.unpack(io.BytesIO(data), name, self._trusted))
        if [entry.key.digest for entry in entries] != [digest]:
            raise DamagedEntryError(f"{name} does not hold that one entry")
        return entries[0]

    def _read(self, digest: str, end: float) -> bytes | None:
        """Return the object's bytes, one more than allowed at most, or None when there is none."""
        if urlsplit(self.url).scheme in ("http", "https"):
            return _read_http(f"{self.url.rstrip('/')}/{FOLDER}/{digest}.tar", end)
        filesystem, folder = self._open()
        path = f"{folder}/{digest}.tar"
        try:
            if _names(filesystem) & _FILES:
                return _read_file(path, end)
            with filesystem.open(path, "rb") as source:
                return _pieces(source, end)
        except FileNotFoundError:
            self._look(filesystem, folder)
            return None

    def _look(self, filesystem: Any, folder: str) -> None:
        """Raise FileNotFoundError when the bucket or the directory of the URL is not there."""
        root = folder.removesuffix(f"/{FOLDER}")
        if self._is_there:
            return
        if _names(filesystem) & _FILES and not os.path.isdir(root or "/"):
            raise FileNotFoundError(f"{root} is no directory")
        if _names(filesystem) & _BUCKETS:
            bucket = root.lstrip("/").partition("/")[0]
            try:
                filesystem.ls(bucket, refresh=True)
            except PermissionError:
                pass  # entries may be read by those who may not list
            except FileNotFoundError:
                raise FileNotFoundError(f"there is no bucket {bucket!r}") from None
        self._is_there = True

    def push(self, entries: Iterable[Entry], signer: Signer | None = None) -> Pushed:
        """Send the entries that the URL does not have whole, signed if a signer is given.

        Raises what the filesystem raises."""
        filesystem, folder = self._open()
        filesystem.makedirs(folder, exist_ok=True)
        sent, present = [], []
        for entry in entries:
            digest = entry.key.digest
            try:
                there = self.get(digest)
            except (DamagedEntryError, CacheTrustError, FileNotFoundError):
                there = None  # replaced by ours
            if there is not None:
                present.append(digest)
                continue
            self._put(filesystem, f"{folder}/{digest}.tar", archive.pack_one(entry, signer))
            sent.append(digest)
        return Pushed(tuple(sent), tuple(present))

    def _put(self, filesystem: Any, path: str, data: bytes) -> None:
        """Write one object: at once where that is atomic (object stores), else by a rename."""
        if not _names(filesystem) & {*_FILES, "sftp", "ssh", "smb"}:
            filesystem.pipe_file(path, data)
            return
        temporary = f"{path}.{secrets.token_hex(8)}.tmp"
        filesystem.pipe_file(temporary, data)
        filesystem.mv(temporary, path)


def _names(filesystem: Any) -> frozenset[str]:
    protocols = filesystem.protocol
    return frozenset((protocols,) if isinstance(protocols, str) else protocols)


def _within(seconds: float, read: Callable[[float], bytes | None], what: str) -> bytes | None:
    """Return `read(deadline)`, or raise TimeoutError: some filesystems wait without end.

    The reader goes on in a daemon thread then, until it notices the deadline or the process ends.
    """
    done: list[bytes | None] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            done.append(read(time.monotonic() + seconds))
        except Exception as error:  # raised again in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=work, name="nmm-remote-cache", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed.pop()
    if not done:
        raise TimeoutError(f"{what} was not there after {seconds:g} s")
    return done[0]


def _pieces(source: Any, end: float) -> bytes:
    data = bytearray()
    while len(data) <= MAX_OBJECT_BYTES:
        piece = source.read(min(_PIECE, MAX_OBJECT_BYTES + 1 - len(data)))
        if not piece:
            break
        if time.monotonic() > end:
            raise TimeoutError("it comes too slowly")
        data += piece
    return bytes(data)


def _read_http(url: str, end: float) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=max(0.1, end - time.monotonic())) as answer:
            data = _pieces(_AsItComes(answer), end)
            wanted = answer.headers.get("Content-Length", "")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (404, 410):
            return None
        raise
    if wanted.isdecimal() and len(data) < min(int(wanted), MAX_OBJECT_BYTES + 1):
        raise ConnectionError(f"{len(data)} of {wanted} bytes came")
    return data


class _AsItComes(io.RawIOBase):
    """Reads an HTTP answer in the pieces that arrive, so that a slow server meets the deadline."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes, as soon as any are there."""
        return bytes(self._answer.read1(size))


def _read_file(path: str, end: float) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not hang
    with open(handle, "rb") as source:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise CacheTrustError(f"{path} is not a regular file")
        return _pieces(source, end)
