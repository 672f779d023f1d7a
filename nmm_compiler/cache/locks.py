"""One builder per key: threads by a lock in memory, processes by a lock file.

These save work and nothing else. When a lock cannot be had (no flock on the filesystem, a full
disk, a holder that hangs) the build goes on without it, and the rename decides who published.
The holder deletes the file before it lets go, so lock files do not pile up beside the entries.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = ".locks"
WAIT_SECONDS = 600.0
POLL_SECONDS = 0.02
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class BuildLocks:
    """The locks of one store."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._threads: dict[str, tuple[threading.RLock, int]] = {}

    @contextlib.contextmanager
    def thread(self, digest: str) -> Iterator[None]:
        """Hold the key against the other threads of this process."""
        with self._guard:
            lock, users = self._threads.get(digest, (threading.RLock(), 0))
            self._threads[digest] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, users = self._threads.pop(digest, (lock, 1))
                if users > 1:
                    self._threads[digest] = (lock, users - 1)

    @contextlib.contextmanager
    def process(self, folder: Path, digest: str) -> Iterator[None]:
        """Hold the key against other processes, if that can be had; a kill lets go of it."""
        handle = _locked(folder, digest)
        try:
            yield
        finally:
            if handle is not None:
                with contextlib.suppress(OSError):  # while it is held, so that nobody else has it
                    os.unlink(folder / FOLDER / f"{digest}.lock")
                _close(handle)

    def renew(self) -> None:
        """Forget the locks of threads that a fork left behind."""
        self._guard = threading.Lock()
        self._threads = {}


def _locked(folder: Path, digest: str) -> int | None:
    """Return the descriptor of a file that is locked until it is closed, or None.

    Not the filelock package: it makes missing directories itself, readable by others, and the
    cache would then refuse its own directory.
    """
    path = folder / FOLDER / f"{digest}.lock"
    end = time.monotonic() + WAIT_SECONDS
    with contextlib.suppress(OSError):
        os.mkdir(path.parent, 0o700)
    while True:
        try:
            handle = os.open(path, _FLAGS | os.O_CREAT, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, handle):
                return handle
        except OSError as error:
            held_by_another = error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
            if not held_by_another or time.monotonic() > end:
                _close(handle)
                return None
            time.sleep(POLL_SECONDS)
        _close(handle)  # held, or deleted by its last holder while we waited: open it again


def _is_still(path: Path, handle: int) -> bool:
    """Return whether the locked file is the one that others would open."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False


def _close(handle: int) -> None:
    """Let go of a lock; nothing was written through it, so an error here loses nothing."""
    with contextlib.suppress(OSError):
        os.close(handle)


def clear(folder: Path) -> int:
    """Delete the lock files that nobody holds, as killed builders leave them; return how many."""
    count = 0
    for path in (folder / FOLDER).glob("*.lock"):
        try:
            handle = os.open(path, _FLAGS)
        except OSError:
            continue  # gone since
        with contextlib.suppress(OSError):  # held by a builder
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, handle):
                os.unlink(path)
                count += 1
        _close(handle)
    return count
