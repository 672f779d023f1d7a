"""Where an entry is found and kept: memory, then disk, then the declared remote level.

This module decides what happens when a level fails. An entry that is damaged or cannot be read
counts as absent, with a warning. An entry that cannot be written is kept in memory, with a warning.
A directory that others could write raises CacheTrustError.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path

from nmm_compiler.cache import evict
from nmm_compiler.cache.disk import Disk
from nmm_compiler.cache.entry import Entry
from nmm_compiler.cache.key import Key
from nmm_compiler.cache.memory import Memory
from nmm_compiler.cache.remote import Check, Remote, check_sources
from nmm_compiler.errors import CacheError, CacheWarning, DamagedEntryError

REMOTE_FAILURES = 3  # in a row, after which this process stops asking; one timeout will do
REMOTE_SECONDS = 60.0  # that all entries together may take, the first second of each not counted


class Levels:
    """The three levels of one cache directory."""

    def __init__(
        self,
        directory: Path,
        writing: bool,
        max_bytes: int,
        remote: Remote | None,
        check: Check | None,
    ) -> None:
        self.directory, self.writing, self.max_bytes = directory, writing, max_bytes
        self.remote, self.check = remote, check
        self._disk = Disk(directory, writing)
        self._memory = Memory()
        self._warned: set[str] = set()
        self._remote_failures = 0
        self._remote_seconds = 0.0
        self._was_there = False
        self._bound = evict.Bound(self._disk, max_bytes)

    def _get_local(self, key: Key) -> Entry | None:
        entry = self._memory.get(key.digest)
        if entry is not None:
            if self._memory.is_touch_due(key.digest) and self.writing and entry.directory:
                self._disk.touch(key.digest)
            return entry
        try:
            entry, stamp = self._disk.read(key.digest)
        except FileNotFoundError:
            if self._was_there and not self._disk.folder.is_dir():
                self._warn(
                    "deleted",
                    f"the kernel cache {self.directory} was deleted while in use; kernels are "
                    "built again",
                )
            return None
        except DamagedEntryError as error:
            self._discard(key.digest, error)
            return None
        except OSError as error:
            self._warn("read", f"the kernel cache {self.directory} cannot be read: {error}")
            return None
        self._was_there = True
        if self.writing:
            self._disk.touch(key.digest)
        self._memory.put(entry, stamp)
        return entry

    def _discard(self, digest: str, error: DamagedEntryError) -> None:
        what = f"cache entry {digest[:12]} in {self.directory} is damaged: {error}"
        if not self.writing:
            self._warn(f"{digest}{error}", f"{what}; it is not used")
            return
        warnings.warn(f"{what}; it is deleted and built again", CacheWarning, stacklevel=2)
        try:
            self._disk.remove(digest)
        except OSError as failure:
            self._warn("remove", f"damaged cache entry {digest[:12]} stays: {failure}")

    def _get_remote(self, key: Key) -> Entry | None:
        """Ask the remote level, until it failed REMOTE_FAILURES times in a row or took too long."""
        if self.remote is None or self._remote_failures >= REMOTE_FAILURES:
            return None
        origin, start = str(self.remote), time.monotonic()
        try:
            entry = self.remote.get(key.digest)
            if entry is not None:
                check_sources(entry, self.check, origin)
        except CacheError as error:
            self._remote_failures += 1
            self._warn(key.digest, f"not taken from the remote cache: {error}")
            return None
        except Exception as error:  # filesystems raise what they like; the build goes on without
            # A timeout costs seconds, so an outage may cost this process only one.
            late = isinstance(error, TimeoutError)
            self._remote_failures += REMOTE_FAILURES if late else 1
            again = "not asked again" if late else f"asked {REMOTE_FAILURES} times in all"
            self._warn(
                "remote",
                f"the remote cache {origin} cannot be read ({type(error).__name__}: {error!s:.300})"
                f"; kernels are built here, and it is {again} in this process",
            )
            return None
        finally:
            self._spend_on_remote(time.monotonic() - start, origin)
        if self._remote_failures < REMOTE_FAILURES:
            self._remote_failures = 0  # it answers: "no such entry" is an answer too
        return self._keep(entry) if entry is not None else None

    def _spend_on_remote(self, seconds: float, origin: str) -> None:
        self._remote_seconds += max(0.0, seconds - 1.0)
        if self._remote_seconds > REMOTE_SECONDS:
            self._remote_failures = REMOTE_FAILURES
            self._warn(
                "remote",
                f"the remote cache {origin} is slow: {self._remote_seconds:.0f} s were lost to it "
                "in this process; kernels are built here from now on",
            )

    def _can_lock(self) -> bool:
        if not self.writing:
            return False
        try:
            self._disk.prepare()
        except OSError as error:
            self._warn_unwritable(error)
            return False
        return True

    def _keep(self, entry: Entry) -> Entry:
        """Publish an entry where the mode and the disk permit it, else hold it in memory."""
        if self.writing and entry.size_bytes > self.max_bytes:
            self._warn(
                "too big",
                f"cache entry {entry.key.digest[:12]} has {entry.size_bytes} B, over the bound of "
                f"{self.max_bytes}; it stays in memory (NMM_CACHE_MAX_BYTES sets the bound)",
            )
        elif self.writing:
            try:
                kept, stamp = self._disk.read(self._disk.publish(entry).key.digest)
                self._was_there = True
                self._memory.put(kept, stamp)
                self._bound.published(kept.key.digest, kept.size_bytes)
                return kept
            except (FileNotFoundError, DamagedEntryError):
                pass  # evicted or deleted at once by somebody else; the next miss tries again
            except OSError as error:
                self._warn_unwritable(error)
        self._memory.put(entry)
        return entry

    def _warn_unwritable(self, error: OSError) -> None:
        self._warn(
            "write",
            f"the kernel cache {self.directory} cannot be written ({error}); kernels built from "
            "here on are kept in memory only. Set NMM_CACHE_DIR to a directory of your own",
        )

    def _warn(self, kind: str, message: str) -> None:
        """Warn once per kind and store."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, CacheWarning, stacklevel=3)
