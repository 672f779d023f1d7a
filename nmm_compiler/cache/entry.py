"""One cache entry and its manifest, `meta.json`.

The manifest holds the key's named entries, the caller's metadata, the size and sha256 of every
file, and who made it. Its last line is the sha256 of all the text before, so a change of any byte
of an entry, the manifest's own included, is seen. `render` and `parse` are pure functions of bytes.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nmm_compiler.cache import scratch
from nmm_compiler.cache.key import Key, plain
from nmm_compiler.cache.trust import MAX_FILE_BYTES
from nmm_compiler.errors import CacheKeyError, DamagedEntryError
from nmm_compiler.version import VERSION

MANIFEST = "meta.json"
SIGNATURE = f"{MANIFEST}.minisig"
MAX_ENTRY_BYTES = MAX_FILE_BYTES  # all files together
MAX_FILES_PER_ENTRY = 64
MAX_MANIFEST_BYTES = 1 << 20
ENTRY_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_HEX = re.compile(r"[0-9a-f]{64}")
_TAIL = ',\n "sha256": "{}"\n}}\n'
_TAIL_BYTES = len(_TAIL.format("0" * 64))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A verified entry: what the builder returned, byte for byte.

    key: what it was built from. files: name -> text. meta: the caller's metadata. created: by
    which version, when. directory: where it is on disk, None in memory. manifest: its bytes.
    """

    key: Key
    files: dict[str, str]
    meta: dict[str, Any]
    created: dict[str, Any]
    directory: Path | None
    manifest: bytes = dataclasses.field(repr=False)

    @property
    def path(self) -> Path:
        """A directory that holds the files now.

        That is the cache's own while it lasts; for an entry in memory, or one that was evicted
        since, a private directory of this process with the same verified text.
        """
        if self.directory is not None and (self.directory / MANIFEST).is_file():
            return self.directory
        return scratch.write(self.key.digest, self.files)

    @property
    def size_bytes(self) -> int:
        """Bytes of the files and the manifest."""
        return len(self.manifest) + sum(len(text.encode()) for text in self.files.values())

    def __str__(self) -> str:
        names = ", ".join(self.files)
        return f"Entry({self.key.digest[:12]}: {names}; {self.size_bytes} B; {self.key.label()})"


def check_name(name: object) -> str:
    """Return `name` if it can name a file of an entry; raise CacheKeyError if not."""
    taken = (MANIFEST, SIGNATURE)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in taken:
        raise CacheKeyError(
            f"{name!r} cannot name a file of a cache entry; use letters, digits, '_', '-' and '.', "
            f"not starting with '.' or '-', and not {' or '.join(taken)}"
        )
    return name


def check_digest(digest: str) -> bool:
    """Return whether the text is a digest, and so may name an entry."""
    return _HEX.fullmatch(digest) is not None


@functools.cache
def made_by() -> dict[str, str]:
    """Return the versions that go into each manifest: package, Python, machine."""
    return {
        "by": f"nmm_compiler {VERSION}",
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
    }


def make(key: Key, files: Mapping[str, str], meta: Mapping[str, Any] | None) -> Entry:
    """Return the entry of what a builder returned, in memory, with its manifest rendered.

    Raises CacheKeyError for a bad file name, no files, text that is not UTF-8, or meta not JSON.
    """
    if not isinstance(files, Mapping) or not files:
        raise CacheKeyError(f"the builder of {key} returned {files!r:.80}; return {{name: text}}")
    for name, text in files.items():
        check_name(name)
        if not isinstance(text, str):
            raise CacheKeyError(f"file {name!r} of {key} is a {type(text).__name__}; return text")
    try:
        encoded = {name: text.encode() for name, text in files.items()}
    except UnicodeEncodeError as error:
        raise CacheKeyError(f"a file of {key} is not UTF-8 text: {error}") from None
    total = sum(len(data) for data in encoded.values())
    if total > MAX_ENTRY_BYTES or len(files) > MAX_FILES_PER_ENTRY:
        raise CacheKeyError(
            f"the {len(files)} files of {key} have {total} B, over {MAX_ENTRY_BYTES} B or "
            f"{MAX_FILES_PER_ENTRY} files"
        )
    made = plain(meta or {}, "meta")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    created = {**made_by(), "time": now}
    body = {
        "format": ENTRY_FORMAT,
        "digest": key.digest,
        "created": created,
        "key": key.to_dict(),
        "meta": made,
        "files": {name: _describe(data) for name, data in encoded.items()},
    }
    manifest = render(body)
    if len(manifest) > MAX_MANIFEST_BYTES:
        raise CacheKeyError(
            f"key and metadata of {key} have {len(manifest)} B, over {MAX_MANIFEST_BYTES}"
        )
    return Entry(key, dict(files), made, created, None, manifest)


def _describe(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def render(body: Mapping[str, Any]) -> bytes:
    """Return the manifest's bytes: indented JSON that ends with the sha256 of the rest."""
    head = json.dumps(body, indent=1, allow_nan=False)[: -len("\n}")]
    return (head + _TAIL.format(hashlib.sha256(head.encode()).hexdigest())).encode()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A manifest that agrees with itself; `files` is name -> (bytes, sha256)."""

    key: Key
    files: dict[str, tuple[int, str]]
    meta: dict[str, Any]
    created: dict[str, Any]
    raw: bytes

    def entry(self, contents: Mapping[str, bytes], directory: Path | None) -> Entry:
        """Return the entry with these bytes, or raise DamagedEntryError where they are others."""
        if set(contents) != set(self.files):
            odd = ", ".join(sorted(set(contents) ^ set(self.files)))
            raise DamagedEntryError(f"files present and files in {MANIFEST} differ: {odd}")
        texts = {}
        for name, (size, sha256) in self.files.items():
            data = contents[name]
            if len(data) != size or hashlib.sha256(data).hexdigest() != sha256:
                raise DamagedEntryError(f"{name} is not the file whose sha256 {MANIFEST} holds")
            try:
                texts[name] = data.decode()
            except UnicodeDecodeError as error:
                raise DamagedEntryError(f"{name} is not UTF-8 text: {error}") from None
        return Entry(self.key, texts, self.meta, self.created, directory, self.raw)


def parse(raw: bytes, digest: str) -> Manifest:
    """Return the manifest of the entry `digest` in these bytes, or raise DamagedEntryError."""
    head, tail = raw[:-_TAIL_BYTES], raw[-_TAIL_BYTES:]
    if tail != _TAIL.format(hashlib.sha256(head).hexdigest()).encode():
        raise DamagedEntryError(f"{MANIFEST} does not agree with its own sha256")
    try:
        body = json.loads(raw)
        if body["format"] != ENTRY_FORMAT:
            raise DamagedEntryError(f"{MANIFEST} has format {body['format']!r}")
        key = Key.make(body["key"])
        files = {check_name(name): _size_and_hash(given) for name, given in body["files"].items()}
        meta, created = plain(body["meta"], "meta"), plain(body["created"], "created")
        named = body["digest"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedEntryError(f"{MANIFEST} is not a manifest: {error!r:.200}") from None
    if not files or not isinstance(meta, dict) or not isinstance(created, dict):
        raise DamagedEntryError(f"{MANIFEST} is not a manifest: no files, or meta is no object")
    total = sum(size for size, _ in files.values())
    if total > MAX_ENTRY_BYTES or len(files) > MAX_FILES_PER_ENTRY:
        raise DamagedEntryError(f"{MANIFEST} lists {len(files)} files of {total} B, too much")
    if key.digest != digest or named != digest:
        raise DamagedEntryError(f"{MANIFEST} is that of another entry, {key.digest[:12]}")
    return Manifest(key, files, meta, created, raw)


def _size_and_hash(given: Mapping[str, Any]) -> tuple[int, str]:
    size, sha256 = given["bytes"], given["sha256"]
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_FILE_BYTES:
        raise ValueError(f"a file of {size!r} bytes")
    if not isinstance(sha256, str) or not check_digest(sha256):
        raise ValueError(f"sha256 {sha256!r}")
    return size, sha256


def fingerprint(seen: os.stat_result) -> tuple[int, int, int, int]:
    """Return what changes when a file is rewritten or replaced: inode, size and both times."""
    return (seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
