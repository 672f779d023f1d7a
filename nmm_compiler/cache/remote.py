"""The shared store: entries at a declared fsspec URL, one tar object `v3/<digest>.tar` each.

Every miss reads here; only `Store.push` writes. An entry is returned only when its sha256s agree
and it is the entry that was asked for; the caller checks its sources.
"""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from nmm_compiler.cache import archive
from nmm_compiler.cache.disk import FOLDER
from nmm_compiler.cache.entry import MAX_ENTRY_BYTES, Entry
from nmm_compiler.errors import CacheError, CacheTrustError, DamagedEntryError

ENTRY_SECONDS = 5.0
MAX_OBJECT_BYTES = 2 * MAX_ENTRY_BYTES  # tar pads each file
_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"})
_FILES = frozenset({"file", "local", "sftp", "ssh", "smb"})


class Remote:
    """Reads and writes entries below one fsspec URL."""

    def __init__(self, url: str) -> None:
        if "#minisign=" in url:
            raise CacheError("NMM_REMOTE_CACHE: #minisign= is no longer known; see docs/cache.md")
        try:
            urlsplit(url)
        except ValueError as error:
            raise CacheError(
                f"NMM_REMOTE_CACHE is {url!r}: {error}; pass a URL such as s3://bucket/path, or a "
                "directory"
            ) from None
        self.url = url
        self._is_there = False

    def __str__(self) -> str:
        """Return the URL without what may be a password."""
        parts = urlsplit(self.url)
        place = parts.netloc.rpartition("@")[2]
        return parts._replace(netloc=f"***@{place}").geturl() if "@" in parts.netloc else self.url

    def _open(self) -> tuple[Any, str, frozenset[str]]:
        """Return the filesystem, the folder and the names of its protocol."""
        import fsspec.core

        filesystem, path = fsspec.core.url_to_fs(self.url)
        names = filesystem.protocol
        return filesystem, path.rstrip("/"), frozenset([names] if isinstance(names, str) else names)

    def get(self, digest: str) -> Entry | None:
        """Return the entry, its sha256s verified, or None when the URL has none.

        Raises TimeoutError after ENTRY_SECONDS (on filesystems of the network), DamagedEntryError
        or CacheTrustError for what is not to be taken, and whatever the filesystem raises.
        """
        filesystem, root, protocols = self._open()
        limit = {"timeout": ENTRY_SECONDS} if filesystem.async_impl else {}
        path = f"{root}/{FOLDER}/{digest}.tar"
        try:
            if protocols & _FILES and filesystem.info(path)["type"] != "file":
                raise CacheTrustError(f"{path} is not a regular file")
            data = filesystem.cat_file(path, start=0, end=MAX_OBJECT_BYTES + 1, **limit)
        except FileNotFoundError:
            if not self._is_there and protocols & (_FILES | _BUCKETS):
                bucket = root.lstrip("/").partition("/")[0]
                with contextlib.suppress(PermissionError):  # who may read entries may not list
                    filesystem.ls(bucket if protocols & _BUCKETS else root)
            self._is_there = True
            return None
        if len(data) > MAX_OBJECT_BYTES:
            raise CacheTrustError(f"{path} has over {MAX_OBJECT_BYTES} bytes")
        entries = list(archive.unpack(io.BytesIO(data), f"{self}/{FOLDER}/{digest}.tar"))
        if [entry.key.digest for entry in entries] != [digest]:
            raise DamagedEntryError(f"{path} does not hold that one entry")
        return entries[0]

    def push(self, entries: Iterable[Entry]) -> int:
        """Send the entries that the URL does not have whole; return how many.

        An object gets its name when it is complete. Raises what the filesystem raises.
        """
        filesystem, root, protocols = self._open()
        filesystem.makedirs(f"{root}/{FOLDER}", exist_ok=True)
        sent = 0
        for entry in entries:
            with contextlib.suppress(DamagedEntryError, CacheTrustError):  # replaced by ours
                if self.get(entry.key.digest) is not None:
                    continue
            path, data = f"{root}/{FOLDER}/{entry.key.digest}.tar", io.BytesIO()
            archive.pack(data, [entry])
            stage = f"{path}.{secrets.token_hex(8)}.tmp" if protocols & _FILES else path
            filesystem.pipe_file(stage, data.getvalue())
            if stage != path:
                filesystem.mv(stage, path)
            sent += 1
        return sent
