"""The first level: entries as directories, whole or absent, on any POSIX filesystem.

    <cache directory>/v2/<first digit>/<digest>/meta.json, kernel.py, ... and .checked, see checked
    <cache directory>/v2/.stage-*   being written    .trash-*  being deleted    .locks/ see locks

Sixteen shards keep a listing short, so that a full cache can be judged by one or two of them.

An entry is staged beside its final place, each file fsynced, the manifest last, and then renamed.
Only the rename publishes. A process that finds the place taken discards its own copy and reads the
published one. Deletion renames first too, so no reader sees half an entry. Locks only save work:
nothing here relies on them.

A change of this layout takes a new folder, "v3"; `prune` deletes the older ones.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from nmm_compiler.cache import checked, trust
from nmm_compiler.cache.entry import MANIFEST, Entry, check_digest, fingerprint, parse
from nmm_compiler.cache.foreign import check_shape
from nmm_compiler.errors import DamagedEntryError

FOLDER = "v2"
OLDER = ("v1",)
SHARDS = "0123456789abcdef"
STAGE, TRASH = ".stage-", ".trash-"
_PUBLISH_ATTEMPTS = 4
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
Stamp = tuple[tuple[str, tuple[int, int, int, int]], ...]


class Disk:
    """Reads and publishes entries below one cache directory; keeps no state of its own."""

    def __init__(self, root: Path, writing: bool) -> None:
        self.root, self.writing = root, writing
        self.folder = root / FOLDER
        self._believed = trust.owners(writing)

    def place(self, digest: str) -> Path:
        """Return the directory of an entry."""
        return self.folder / digest[0] / digest

    def check(self, shards: Iterable[str] = ()) -> bool:
        """Return whether the directory is there; raise CacheTrustError when it, or one of these
        shards, is not trusted.
        """
        there = trust.check_directory(self.root, self.writing) and trust.check_itself(
            self.folder, self.writing
        )
        for shard in shards if there else ():
            trust.check_itself(self.folder / shard, self.writing)
        return there

    def prepare(self) -> None:
        """Create what is missing, with mode 0700; raise OSError when it cannot be written."""
        if not self.check():
            trust.create_directory(self.folder)
            self.check()
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.folder))

    def read(self, digest: str) -> tuple[Entry, Stamp]:
        """Return the verified entry and the stamp of its files.

        Raises FileNotFoundError when there is none, DamagedEntryError when it is not whole,
        CacheTrustError when the directory is not trusted, OSError when it cannot be read.
        """
        if not self.check(digest[0]):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder))
        path = self.place(digest)
        folder = trust.open_entry(path, self._believed)
        try:
            return self._read_open(path, folder, digest)
        except (DamagedEntryError, FileNotFoundError) as error:
            if not _is_still(path, folder):  # evicted while we read it
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
            if isinstance(error, FileNotFoundError):
                raise DamagedEntryError(f"{os.fspath(error.filename)} is missing") from None
            raise
        finally:
            os.close(folder)

    def _read_open(self, path: Path, folder: int, digest: str) -> tuple[Entry, Stamp]:
        raw, seen = trust.read_file(MANIFEST, folder, self._believed)
        manifest = parse(raw, digest)
        stamp = [(str(path / MANIFEST), fingerprint(seen))]
        names = set(os.listdir(folder)) - {MANIFEST, checked.MARK}
        if "__pycache__" in names and "__pycache__" not in manifest.files:
            # Left by whoever imported the source; bytecode is not verified, so it must not stay.
            self._drop_bytecode(path)
            names.discard("__pycache__")
        if names != set(manifest.files):
            odd = ", ".join(sorted(names ^ set(manifest.files)))
            raise DamagedEntryError(f"files present and files in {MANIFEST} differ: {odd}")
        contents = {}
        for name in manifest.files:
            contents[name], seen = trust.read_file(name, folder, self._believed)
            stamp.append((str(path / name), fingerprint(seen)))
        return manifest.entry(contents, path), tuple(stamp)

    def _drop_bytecode(self, path: Path) -> None:
        try:
            shutil.rmtree(path / "__pycache__")
        except OSError as error:
            raise DamagedEntryError(
                f"{path / '__pycache__'} holds bytecode that nothing vouches for and that cannot "
                f"be deleted ({error})"
            ) from None

    def touch(self, digest: str) -> None:
        """Mark an entry as used now: the modification time of its directory."""
        try:
            os.utime(self.place(digest))
        except OSError:
            return  # gone, or not ours: only its place in the order of eviction is lost

    def publish(self, entry: Entry) -> Entry:
        """Put an entry on disk; return it with its directory, or the one that another process put.

        Raises OSError when the directory cannot be written; nothing is left behind then.
        """
        for attempt in range(_PUBLISH_ATTEMPTS):
            try:
                return self._publish_once(entry)
            except FileNotFoundError:
                if attempt == _PUBLISH_ATTEMPTS - 1:
                    raise  # the directory keeps being deleted under us
        raise AssertionError("unreachable")

    def _publish_once(self, entry: Entry) -> Entry:
        self.prepare()
        digest = entry.key.digest
        final = self.place(digest)
        if not self.check(digest[0]) or not final.parent.is_dir():
            trust.create_directory(final.parent)
        stage = self.folder / leftover_name(STAGE)
        try:
            os.mkdir(stage, 0o700)
            for name, text in entry.files.items():
                _write_file(stage / name, text.encode())
            _write_file(stage / MANIFEST, entry.manifest)
            _sync_directory(stage)
            for _ in range(_PUBLISH_ATTEMPTS):
                try:
                    os.rename(stage, final)
                except OSError as error:
                    if error.errno not in _TAKEN:
                        raise
                else:
                    _sync_directory(final.parent)
                    return Entry(
                        entry.key, entry.files, entry.meta, entry.created, final, entry.manifest
                    )
                try:
                    return self.read(digest)[0]
                except FileNotFoundError:
                    continue  # evicted since; the place is free again
                except DamagedEntryError:
                    self.remove(digest)
            raise OSError(errno.EBUSY, "another process keeps writing this entry", str(final))
        finally:
            delete_tree(stage)

    def remove(self, digest: str) -> bool:
        """Delete an entry; return whether there was one. Raises OSError when it cannot be."""
        trash = self.folder / leftover_name(TRASH)
        try:
            os.rename(self.place(digest), trash)
        except FileNotFoundError:
            return False
        delete_tree(trash)
        return True

    def check_once(self, entry: Entry) -> None:
        """Raise CacheTrustError when a source of the entry is more than a kernel.

        An entry on disk that passed the same rules before, in any process, is not parsed again.
        """
        if checked.is_marked(entry, self._believed):
            return
        for name, text in entry.files.items():
            if name.endswith(".py"):
                check_shape(f"{name} of cache entry {entry.key.digest[:12]}", text)
        if self.writing:
            checked.mark(entry)

    def digests(self) -> list[str]:
        """Return the names of all entries, damaged ones too, in order."""
        if not self.check(SHARDS):
            return []
        return sorted(digest for shard in SHARDS for digest in self.listing(shard))

    def listing(self, shard: str) -> list[str]:
        """Return the names of a shard's entries; whoever asks has checked the directory."""
        try:
            return [name for name in os.listdir(self.folder / shard) if check_digest(name)]
        except FileNotFoundError:
            return []  # a shard is made when it is needed


class NoDisk(Disk):
    """A disk level without a directory: it finds nothing and reads nothing."""

    def check(self, shards: Iterable[str] = ()) -> bool:
        """Return False: there is no directory."""
        return False


def leftover_name(kind: str) -> str:
    """Return the name of an unfinished directory: its kind, host, process id, random digits."""
    return f"{kind}{host_name()}-{os.getpid()}-{secrets.token_hex(8)}"


def host_name() -> str:
    """Return this machine's name in characters that a file name takes."""
    return re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:40] or "host"


def _is_still(path: Path, folder: int) -> bool:
    try:
        now = os.lstat(path)
    except OSError:
        return False
    then = os.fstat(folder)
    return (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino)


def _write_file(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems have none
            raise
    finally:
        os.close(handle)


def delete_tree(path: Path) -> None:
    """Delete a tree or file that was renamed away; `prune` deletes what remains of it."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.chmod(path, 0o700)
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except OSError:
        return


def leftovers(folder: Path) -> Iterator[Path]:
    """Yield what killed processes may have left."""
    for name in os.listdir(folder):
        if name.startswith((STAGE, TRASH)):
            yield folder / name
