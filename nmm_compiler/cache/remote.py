"""The second level: entries at a declared fsspec URL, one tar object `v1/<digest>.tar` each.

Reading is part of every miss; writing is only ever asked for (`Store.push`). Nothing that comes
from here is handed out before its sha256s agree, it is the entry that was asked for, and the
caller's check of each source (lint, for kernels) has passed.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from nmm_compiler.cache import archive
from nmm_compiler.cache.entry import Entry
from nmm_compiler.cache.foreign import check_shape
from nmm_compiler.cache.trust import MAX_FILE_BYTES
from nmm_compiler.errors import CacheTrustError, DamagedEntryError

Check = Callable[[str, str], None]
FOLDER = "v1"


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
        self.url = url
        self._opened: tuple[Any, str] | None = None

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

        Raises DamagedEntryError or CacheTrustError for what is not to be taken, and whatever the
        filesystem raises when it cannot be reached.
        """
        filesystem, folder = self._open()
        path = f"{folder}/{digest}.tar"
        limit = MAX_FILE_BYTES
        try:
            with filesystem.open(path, "rb") as source:
                data = source.read(limit + 1)
        except FileNotFoundError:
            return None
        if len(data) > limit:
            raise CacheTrustError(f"{self}/{FOLDER}/{digest}.tar has over {limit} bytes")
        entries = list(archive.unpack(io.BytesIO(data), f"{self}/{FOLDER}/{digest}.tar"))
        if [entry.key.digest for entry in entries] != [digest]:
            raise DamagedEntryError(f"{self}/{FOLDER}/{digest}.tar does not hold that one entry")
        return entries[0]

    def push(self, entries: Iterable[Entry]) -> Pushed:
        """Send the entries that the URL does not have whole; raises what the filesystem raises."""
        filesystem, folder = self._open()
        filesystem.makedirs(folder, exist_ok=True)
        sent, present = [], []
        for entry in entries:
            digest = entry.key.digest
            try:
                there = self.get(digest)
            except (DamagedEntryError, CacheTrustError):
                there = None  # replaced by ours
            if there is not None:
                present.append(digest)
                continue
            self._put(filesystem, f"{folder}/{digest}.tar", archive.pack_one(entry))
            sent.append(digest)
        return Pushed(tuple(sent), tuple(present))

    def _put(self, filesystem: Any, path: str, data: bytes) -> None:
        """Write one object: at once where that is atomic (object stores), else by a rename."""
        protocols = filesystem.protocol
        names = (protocols,) if isinstance(protocols, str) else tuple(protocols)
        if not {"file", "local", "sftp", "ssh", "smb"} & set(names):
            filesystem.pipe_file(path, data)
            return
        temporary = f"{path}.{secrets.token_hex(8)}.tmp"
        filesystem.pipe_file(temporary, data)
        filesystem.mv(temporary, path)
