"""One cache entry and its manifest, `meta.json`.

The manifest holds the key's named entries, the caller's metadata, the sha256 of every file and of
the manifest itself, and who made it. It has one rendering, so that a change of any byte of an
entry, the manifest's own included, is seen.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nmm_compiler.cache.key import Key, plain
from nmm_compiler.errors import CacheError, DamagedEntryError, OutputError
from nmm_compiler.outputs import write_text
from nmm_compiler.version import VERSION

MANIFEST = "meta.json"
MAX_ENTRY_BYTES = 8 << 20  # all files together; kernels have 10 to 20 kB
MAX_FILES = 16
ENTRY_FORMAT = 2
FILE_NAME = re.compile(r"(?!meta\.json$)[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A verified entry: what the builder returned, byte for byte.

    key: what it was built from. files: name -> text. meta: the caller's metadata. created: by
    which version, when. manifest: its bytes. directory: where it is on disk, None in memory.
    """

    key: Key
    files: dict[str, str]
    meta: dict[str, Any]
    created: dict[str, Any]
    manifest: bytes = dataclasses.field(repr=False)
    directory: Path | None = None

    @property
    def contents(self) -> dict[str, bytes]:
        """The bytes of each file, the manifest last."""
        return {name: text.encode() for name, text in self.files.items()} | {
            MANIFEST: self.manifest
        }

    @property
    def size_bytes(self) -> int:
        """Bytes of the files and the manifest."""
        return sum(map(len, self.contents.values()))

    @property
    def path(self) -> Path:
        """A directory that holds these files now.

        That is the cache's own while it does; for an entry in memory, or one that was evicted or
        changed since, a private directory of this process. Raises CacheError when there is none.
        """
        with contextlib.suppress(OSError):
            if self.directory is not None and all(
                (self.directory / name).read_bytes() == data for name, data in self.contents.items()
            ):
                return self.directory
        try:
            directory = _directory_of_process(os.getpid()) / self.key.digest
            directory.mkdir(mode=0o700, exist_ok=True)
            for name, text in self.files.items():
                write_text(directory / name, text)
        except (OSError, OutputError) as error:
            raise CacheError(
                f"the source of kernel {self.key.digest[:12]} has to be written to a file and "
                f"neither the cache directory nor the temporary directory takes it: {error}; set "
                "TMPDIR or NMM_CACHE_DIR to a directory that can be written"
            ) from error
        return directory


def make(key: Key, files: Mapping[str, str], meta: Mapping[str, Any] | None) -> Entry:
    """Return the entry of what a builder returned, in memory, with its manifest rendered.

    Raises CacheError for a bad file name, no files, text that is not UTF-8, or meta not JSON.
    """
    if not isinstance(files, Mapping) or not files:
        raise CacheError(f"the builder of {key} returned {files!r:.80}; return {{name: text}}")
    for name, text in files.items():
        if not (isinstance(name, str) and FILE_NAME.fullmatch(name) and isinstance(text, str)):
            raise CacheError(
                f"{name!r:.120} of {key} is a {type(text).__name__}; return text in files named "
                f"with letters, digits, '_', '-' and '.', which do not start with '.' or '-', and "
                f"are not {MANIFEST}"
            )
    made_by = {
        "by": f"nmm_compiler {VERSION}",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    try:
        body = {
            "format": ENTRY_FORMAT,
            "digest": key.digest,
            "created": made_by,
            "key": key.to_dict(),
            "meta": plain(meta or {}, "meta"),
            "files": {name: _sha256(text.encode()) for name, text in files.items()},
        }
    except UnicodeEncodeError as error:
        raise CacheError(f"a file of {key} is not UTF-8 text: {error}") from None
    entry = Entry(key, dict(files), body["meta"], made_by, render(body))
    if entry.size_bytes > MAX_ENTRY_BYTES or len(files) > MAX_FILES:
        raise CacheError(
            f"{key} has {len(files)} files of {entry.size_bytes} B, over {MAX_FILES} files or "
            f"{MAX_ENTRY_BYTES} B"
        )
    return entry


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def render(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest: indented JSON that ends with the sha256 of the rest."""
    own = _sha256(json.dumps(body, allow_nan=False).encode())
    return json.dumps({**body, "sha256": own}, indent=1).encode() + b"\n"


def verified(digest: str, contents: Mapping[str, bytes], directory: Path | None = None) -> Entry:
    """Return the entry `digest` of these files, or raise DamagedEntryError.

    contents: file name -> bytes, of every file that there is.
    """
    if MANIFEST not in contents:
        raise DamagedEntryError(f"{MANIFEST} is missing")
    raw = contents[MANIFEST]
    try:
        body = json.loads(raw)
        del body["sha256"]
        if render(body) != raw:
            raise DamagedEntryError(f"{MANIFEST} does not agree with its own sha256")
        if body["format"] != ENTRY_FORMAT:
            raise DamagedEntryError(f"{MANIFEST} has format {body['format']!r}")
        key, sha256s = Key.make(body["key"]), {**body["files"]}
        meta, created, named = {**body["meta"]}, {**body["created"]}, body["digest"]
    except DamagedEntryError:
        raise
    except (CacheError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedEntryError(f"{MANIFEST} is not a manifest: {error!r:.200}") from None
    if key.digest != digest or named != digest:
        raise DamagedEntryError(f"{MANIFEST} is that of another entry, {key.digest[:12]}")
    odd = set(sha256s) ^ (set(contents) - {MANIFEST})
    if odd or not sha256s or not all(map(FILE_NAME.fullmatch, sha256s)):
        raise DamagedEntryError(
            f"files present and files in {MANIFEST} differ: {', '.join(sorted(odd)) or 'no files'}"
        )
    for name, sha256 in sha256s.items():
        if _sha256(contents[name]) != sha256:
            raise DamagedEntryError(f"{name} is not the file whose sha256 {MANIFEST} holds")
    try:
        files = {name: contents[name].decode() for name in sha256s}
    except UnicodeDecodeError as error:
        raise DamagedEntryError(f"a file is not UTF-8 text: {error}") from None
    return Entry(key, files, meta, created, raw, directory)


@functools.cache
def _directory_of_process(process: int) -> Path:
    """Make the directory of one process, deleted at its end; a forked child makes its own."""
    directory = Path(tempfile.mkdtemp(prefix="nmm-kernels-"))
    atexit.register(_delete, directory, process)
    return directory


def _delete(directory: Path, process: int) -> None:
    if process == os.getpid():
        shutil.rmtree(directory, ignore_errors=True)
