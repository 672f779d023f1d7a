"""The kernel cache: `Store.get_or_build(key, build)` returns a verified entry or builds one.

A lookup asks memory, then disk, then the shared store if one is declared. Modes: "rw"; "ro" reads
and keeps what it builds in memory; "require" reads and raises on a miss; "off" builds every time.

An entry that is damaged or cannot be read counts as absent, with a warning, and is built again. One
that cannot be written is kept in memory, with a warning. A directory that others could write raises
CacheTrustError.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nmm_compiler import options as options_module
from nmm_compiler.cache import archive
from nmm_compiler.cache.disk import OLDER, Disk
from nmm_compiler.cache.entry import Entry, make
from nmm_compiler.cache.explain import Info, compare
from nmm_compiler.cache.foreign import check_sources
from nmm_compiler.cache.key import Key
from nmm_compiler.cache.remote import Remote
from nmm_compiler.errors import (
    CacheError,
    CacheMissError,
    CacheTrustError,
    CacheWarning,
    DamagedEntryError,
)
from nmm_compiler.outputs import write

REMOTE_FAILURES = 3  # in a row, after which this process stops asking; one timeout will do
Files = Mapping[str, str]
Meta = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None


class Store:
    """One cache: a directory (None: in memory), a mode, a bound in bytes, maybe a shared store."""

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        mode: str = "rw",
        max_bytes: int = 1 << 30,
        remote: str | None = None,
    ) -> None:
        self.directory = Path(os.path.abspath(directory or os.devnull))
        self.mode = "ro" if directory is None and mode == "rw" else mode
        self.writing, self.max_bytes = self.mode == "rw", max_bytes
        self.remote = Remote(remote) if remote else None
        self._disk = Disk(self.directory if directory and mode != "off" else None, self.writing)
        self._held: dict[str, Entry] = {}
        self._building: dict[tuple[int, str], threading.RLock] = {}
        self._warned: set[str] = set()
        self._remote_failures = 0
        try:
            self._disk.check()
        except (OSError, ValueError) as error:  # no right to look, too long, a NUL in it
            raise CacheTrustError(
                f"cache directory {str(self.directory)!r:.200} cannot be looked at: {error!s:.200}"
                "; set NMM_CACHE_DIR to a directory of your own"
            ) from None

    @classmethod
    def open(cls, options: options_module.Options | None = None, *, on_disk: bool = True) -> Store:
        """Return the process-wide store for these options; the environment fills what is unset.

        Raises CacheTrustError when the directory is one that others could write.
        """
        settings = (
            options_module.cache_dir(options) if on_disk else None,
            options_module.cache_mode(options),
            options_module.cache_max_bytes(),
            options_module.setting("NMM_REMOTE_CACHE"),
        )
        return _OPEN.get(settings) or _OPEN.setdefault(settings, cls(*settings))

    @classmethod
    def for_kernels(cls, options: options_module.Options | None = None) -> Store:
        """Return `open`'s store, or one in memory, with one warning, if its directory is refused.

        Mode "require" raises what `open` raises: such a process must not build.
        """
        try:
            return cls.open(options)
        except CacheTrustError as error:
            if options_module.cache_mode(options) == "require":
                raise
            store = cls.open(options, on_disk=False)
            if store.mode != "off":
                store._warn(
                    f"{error}. Until then kernels are kept in memory, prices too, and the next "
                    "process makes them again"
                )
            return store

    def __str__(self) -> str:
        remote = f", remote={self.remote}" if self.remote else ""
        return f"Store({self.directory}, mode={self.mode}, max_bytes={self.max_bytes}{remote})"

    # Reading and building

    def get(self, key: Key, *, remote: bool = True) -> Entry | None:
        """Return the verified entry of `key`, or None; remote: ask the shared store too.

        Damaged entries count as absent, with a warning, and are deleted in mode "rw".
        """
        if self.mode == "off":
            return None
        return self._local(key.digest) or (self._shared(key.digest) if remote else None)

    def get_or_build(
        self,
        key: Key,
        build: Callable[[], Files],
        meta: Meta = None,
        *,
        command: Callable[[], str] | None = None,
    ) -> Entry:
        """Return the entry of `key`; on a miss run `build()` -> {file name: text} and keep it.

        meta: plain data to keep with it, or a function called after `build` that returns it.
        command: returns what a user runs to build this entry, for the error of mode "require".
        Raises CacheMissError in mode "require"; what `build` raises goes through.
        """
        entry = self.get(key)
        if entry is not None:
            return entry
        if self.mode == "require":
            raise self.miss((key,), command() if command else None)
        # One thread of one process builds a key. A forked child has thread locks of its own.
        lock = self._building.setdefault((os.getpid(), key.digest), threading.RLock())
        with lock, contextlib.ExitStack() as held:
            if self.writing:
                with contextlib.suppress(OSError):  # without it, work is done twice and no more
                    self._disk.prepare()
                    file = held.enter_context(open(self.directory / ".lock", "ab"))
                    fcntl.lockf(file, fcntl.LOCK_EX, 1, int(key.digest[:15], 16))
            entry = self._local(key.digest)
            if entry is None:
                entry = make(key, build(), meta() if callable(meta) else meta)
                entry = self._keep(entry) if self.mode != "off" else entry
            return entry

    def _local(self, digest: str) -> Entry | None:
        """Return the entry of memory or disk."""
        entry = self._held.get(digest)
        try:
            if entry is None:
                entry = self._held[digest] = self._disk.read(digest)
        except FileNotFoundError:
            return None
        except (DamagedEntryError, OSError) as error:
            damaged = isinstance(error, DamagedEntryError)
            self._warn(
                f"cache entry {digest[:12]} in {self.directory} is not used: {error}",
                "" if damaged else "read",
            )
            if self.writing and damaged:
                with contextlib.suppress(OSError):
                    self._disk.remove(digest)
            return None
        if self.writing and entry.directory is not None:
            with contextlib.suppress(OSError):  # gone: only its place in the order is lost
                os.utime(entry.directory)
        return entry

    def _shared(self, digest: str) -> Entry | None:
        """Return the entry of the shared store, which is asked until it fails too often."""
        if self.remote is None or self._remote_failures >= REMOTE_FAILURES:
            return None
        try:
            entry = self.remote.get(digest)
            if entry is not None:
                check_sources(entry, str(self.remote))
        except Exception as error:  # filesystems raise what they like; the build goes on without
            # A timeout cost seconds already.
            self._remote_failures += REMOTE_FAILURES if isinstance(error, TimeoutError) else 1
            self._warn(
                f"nothing was taken from the remote cache {self.remote} ({type(error).__name__}: "
                f"{error!s:.400}); kernels are built here, and after {REMOTE_FAILURES} failures in "
                "a row or a timeout it is not asked again in this process",
                "remote",
            )
            return None
        self._remote_failures = 0  # it answers: "no such entry" is an answer too
        return self._keep(entry) if entry is not None else None

    def _keep(self, entry: Entry) -> Entry:
        """Publish an entry where the mode and the disk permit it, else hold it in memory."""
        digest, size = entry.key.digest, entry.size_bytes
        if self.writing and size > self.max_bytes:
            self._warn(
                f"cache entry {digest[:12]} has {size} B, over the bound of {self.max_bytes}; it "
                "stays in memory (NMM_CACHE_MAX_BYTES sets the bound)",
                "size",
            )
        elif self.writing:
            try:
                self._disk.publish(entry)
                entry = self._disk.read(digest)
                # Looking at every entry takes a while, so few publications of a large cache do:
                # 128 while as many bytes are published as it may hold. Digests are spread evenly,
                # so they tell which. A look frees a sixteenth, so that the next ones come in time.
                if int(digest[:15], 16) % max(1, self.max_bytes // (128 * size)) == 0:
                    self._disk.evict(self.max_bytes * 15 / 16, digest)
            except (FileNotFoundError, DamagedEntryError):
                pass  # deleted at once by somebody else; the next miss tries again
            except OSError as error:
                self._warn(
                    f"the kernel cache {self.directory} cannot be written ({error}); kernels built "
                    "from here on are kept in memory only. Set NMM_CACHE_DIR to a directory of "
                    "your own",
                    "write",
                )
        self._held[digest] = entry
        return entry

    def _warn(self, message: str, kind: str = "") -> None:
        """Warn once per kind (else per message) and store."""
        if (kind or message) not in self._warned:
            self._warned.add(kind or message)
            warnings.warn(message, CacheWarning, stacklevel=3)

    # Questions

    def entries(self) -> Iterator[Info]:
        """Yield every entry on disk, verified, most recently used first; damaged ones too."""
        for info in reversed(self._disk.entries()):
            try:
                yield replace(info, state="ok", entry=self._disk.read(info.digest))
            except FileNotFoundError:
                continue
            except (DamagedEntryError, OSError) as error:
                yield replace(info, state=f"damaged: {error}")

    def show(self, prefix: str) -> Entry:
        """Return the one entry whose digest starts with `prefix`; raise CacheError if not one."""
        digests = [info.digest for info in self._disk.entries() if info.digest.startswith(prefix)]
        if len(digests) != 1:
            shown = ", ".join(digest[:12] for digest in digests[:5]) or "see `nmm cache list`"
            raise CacheError(
                f"{len(digests)} entries of {self.directory} start with {prefix!r}: {shown}"
            )
        return self._disk.read(digests[0])

    def missing(self, keys: Sequence[Key]) -> tuple[Key, ...]:
        """Return the keys that have no entry."""
        return tuple(key for key in keys if self.get(key) is None)

    def miss(self, keys: Sequence[Key], command: str | None = None) -> CacheMissError:
        """Return the error of mode "require" for keys without an entry."""
        many = "1 kernel is" if len(keys) == 1 else f"{len(keys):,} kernels are"
        how = command or "run the same program once with NMM_CACHE=rw"
        return CacheMissError(
            "\n  ".join([f"NMM_CACHE=require and {many} not in {self.directory}:", *map(str, keys)])
            + "\nwhat differs from the entries: nmm cache list KEY.json"
            f"\nbuild: {'NMM_CACHE=rw ' if command else ''}{how}",
            keys,
        )

    def verify(self, rebuild: Callable[[Entry], Files | None] | None = None) -> Iterator[Info]:
        """Check every entry's bytes, and against `rebuild(entry)` -> files when it is given.

        Yields the entries, their state "same", or "skipped", "differs", "damaged" or "failed" and
        why. `rebuild` returns None for an entry that this version cannot be asked to build.
        """
        for info in self.entries():
            state = info.state
            if info.entry is not None:
                try:
                    state = compare(info.entry, rebuild(info.entry)) if rebuild else "same"
                except Exception as error:  # one that cannot be built must not hide the others
                    state = f"failed: {type(error).__name__}: {error}"
            yield replace(info, state=state, entry=None)

    # Housekeeping

    def prune(self, max_bytes: int | None = None) -> tuple[Info, ...]:
        """Delete damaged entries, leftovers, older layouts, and the least recently used entries
        until the rest fits into `max_bytes` (default: the store's bound); return what went.
        """
        self._need_writing("prune")
        gone = [
            info for info in self.entries() if info.state != "ok" and self._disk.remove(info.digest)
        ]
        gone += self._disk.evict(self.max_bytes if max_bytes is None else max_bytes)
        self._held = {}
        for name in OLDER:
            shutil.rmtree(self.directory / name, ignore_errors=True)
        return tuple(gone)

    def export(self, path: str | Path) -> int:
        """Write the whole entries to a tar file; return how many.

        The file gets its name when it is complete. Raises OutputError.
        """
        counts: list[int] = []
        write(path, lambda file: counts.append(archive.pack(file, self._whole())))
        return counts[0]

    def import_(self, path: str | os.PathLike[str]) -> int:
        """Take the entries of an archive that are not here; return how many.

        All of it is read, verified and checked before any of it is kept. Raises CacheTrustError
        or DamagedEntryError when something in it is not what an export writes.
        """
        self._need_writing("import")
        for entry in archive.read(Path(path)):
            check_sources(entry, str(path))
        taken = 0
        for entry in archive.read(Path(path)):
            check_sources(entry, str(path))
            if self._local(entry.key.digest) is None:
                if self._keep(entry).directory is None:
                    raise CacheError(f"{entry.key} of {path} cannot be kept in {self.directory}")
                taken += 1
        return taken

    def push(self) -> int:
        """Send the whole entries to the shared store, where it lacks them; return how many.

        Raises what its filesystem raises.
        """
        if self.remote is None:
            raise CacheError(
                "no shared store is declared; set NMM_REMOTE_CACHE to a URL, s3://bucket/kernels"
            )
        return self.remote.push(self._whole())

    def _whole(self) -> Iterator[Entry]:
        return (info.entry for info in self.entries() if info.entry is not None)

    def _need_writing(self, what: str) -> None:
        if not self.writing:
            raise CacheError(f"cache mode {self.mode!r} does not permit {what}; set NMM_CACHE=rw")


_OPEN: dict[tuple[Path | None, str, int, str | None], Store] = {}
