"""Entries as directories, whole or absent, on any POSIX filesystem.

    <cache directory>/v3/<digest>/meta.json, kernel.py, ...
    <cache directory>/v3/.stage-*   being written    .trash-*  being deleted; evicted like entries

An entry is staged beside its final place and then renamed; only the rename publishes. A process
that finds the place taken discards its own copy. Deletion renames first too, so no reader sees half
an entry. What a power cut leaves of an entry does not agree with its sha256s.

An entry's last use is the modification time of its directory. A change of this layout takes a new
folder, "v4".
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from pathlib import Path

from nmm_compiler.cache import trust
from nmm_compiler.cache.entry import MAX_FILES, Entry, verified
from nmm_compiler.cache.explain import Info
from nmm_compiler.errors import DamagedEntryError

FOLDER, OLDER = "v3", ("v1", "v2")
STAGE, TRASH = ".stage-", ".trash-"
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Disk:
    """Reads, publishes and deletes entries below one cache directory (None: there are none)."""

    def __init__(self, root: Path | None, writing: bool) -> None:
        self.root, self.writing = root, writing
        self.folder = (root or Path(os.devnull)) / FOLDER

    def check(self) -> bool:
        """Return whether the directory is there; raise CacheTrustError when it is not trusted."""
        if self.root is None:
            return False
        trust.check_parents(self.root)
        places = (self.root, self.folder)
        return all(trust.check_directory(place, self.writing) for place in places)

    def read(self, digest: str) -> Entry:
        """Return the verified entry.

        Raises FileNotFoundError when there is none, DamagedEntryError when it is not whole,
        CacheTrustError when the directory is not trusted, OSError when it cannot be read.
        """
        path = self.folder / digest
        if not self.check():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        folder = trust.open_checked(path, self.writing)
        try:
            names = os.listdir(folder)
            if "__pycache__" in names:
                # Left by whoever imported the source; bytecode is not verified and must not stay.
                shutil.rmtree(path / "__pycache__", ignore_errors=True)
                names = os.listdir(folder)
            if len(names) > MAX_FILES + 1:
                raise DamagedEntryError(f"{path} holds {len(names)} files, over {MAX_FILES}")
            contents = {name: trust.read_file(name, folder, self.writing) for name in names}
            return verified(digest, contents, path)
        except DamagedEntryError:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(path), os.fstat(folder)):
                    raise
            raise FileNotFoundError(f"{path} was evicted while it was read") from None
        finally:
            os.close(folder)

    def prepare(self) -> None:
        """Create what is missing, with mode 0700; raise OSError where that cannot be."""
        if not self.check():
            missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            for path in reversed(missing):
                with contextlib.suppress(FileExistsError):  # another process was quicker
                    os.mkdir(path, 0o700)
                    os.chmod(path, 0o700)  # a umask such as 0777 takes rights from the owner too
            self.check()

    def publish(self, entry: Entry) -> None:
        """Put an entry on disk, unless another process did so meanwhile.

        Raises OSError when the directory cannot be written; nothing is left behind then.
        """
        self.prepare()
        stage = self.folder / f"{STAGE}{secrets.token_hex(8)}"
        try:
            os.mkdir(stage, 0o700)
            for name, data in entry.contents.items():
                with os.fdopen(os.open(stage / name, _CREATE, 0o600), "wb") as file:
                    file.write(data)
            os.rename(stage, self.folder / entry.key.digest)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        finally:
            _delete(stage)

    def remove(self, digest: str) -> bool:
        """Delete an entry; return whether there was one. Raises OSError when it cannot be."""
        trash = self.folder / f"{TRASH}{secrets.token_hex(8)}"
        try:
            os.rename(self.folder / digest, trash)
        except FileNotFoundError:
            return False
        _delete(trash)
        return True

    def entries(self) -> list[Info]:
        """Return what is in the folder, least recently used first: entries, and what killed
        processes left.

        Times count by their distance from now, so a clock that went back shields no entry.
        """
        infos = []
        for name in os.listdir(self.folder) if self.check() else ():
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                used = os.lstat(self.folder / name).st_mtime
                try:
                    with os.scandir(self.folder / name) as files:
                        size = sum(file.stat(follow_symlinks=False).st_size for file in files)
                except (NotADirectoryError, PermissionError):  # goes first
                    size, used = 0, 0.0
                infos.append(Info(name, "", size, used))
        now = time.time()
        return sorted(infos, key=lambda info: (-abs(now - info.used), info.digest))

    def evict(self, max_bytes: float, keep: str = "") -> list[Info]:
        """Delete the least recently used entries until the rest fits; return those deleted.

        keep: the digest of an entry that stays whatever its age. Raises OSError.
        """
        entries, deleted = self.entries(), []
        total = sum(info.size_bytes for info in entries)
        for info in entries:
            if total > max_bytes and info.digest != keep and self.remove(info.digest):
                total -= info.size_bytes
                deleted.append(info)
        return deleted


def _delete(path: Path) -> None:
    """Delete a tree or file that is out of sight; it is evicted where that fails."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.chmod(path, 0o700)
            shutil.rmtree(path)
        else:
            os.unlink(path)
