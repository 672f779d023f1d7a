"""The kernel cache: `Store.get_or_build(key, build)` returns a verified entry or builds one.

A lookup asks memory, then disk, then the remote level if one is declared. Modes: "rw"; "ro" reads
and keeps what it builds in memory; "require" reads and raises on a miss; "off" builds every time.
An entry that cannot be written is kept in memory, with one warning. A damaged entry is built again,
with a warning. An entry that others could have written is refused.
"""

from __future__ import annotations

import os
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nmm_compiler import options as options_module
from nmm_compiler.cache import archive, evict, locks
from nmm_compiler.cache import entry as entries
from nmm_compiler.cache.disk import OLDER, SHARDS, NoDisk, delete_tree
from nmm_compiler.cache.entry import Entry
from nmm_compiler.cache.explain import (
    Explanation,
    Info,
    Verified,
    VerifyReport,
    compare,
    nearest,
)
from nmm_compiler.cache.key import Key
from nmm_compiler.cache.levels import Levels
from nmm_compiler.cache.remote import Check, Pushed, Remote, check_sources
from nmm_compiler.cache.signing import Signer, Trusted
from nmm_compiler.errors import (
    CacheDirectoryError,
    CacheError,
    CacheKeyError,
    CacheMissError,
    CacheTrustError,
    CacheWarning,
    DamagedEntryError,
    UnknownNameError,
)

Files = Mapping[str, str]
Meta = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None


class Store(Levels):
    """One cache: a directory, a mode, a size bound in bytes, and maybe a second level.

    check(file name, text) is run on each Python source that comes from the second level or from
    an archive, and raises to refuse it; without one, nothing is taken from there.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        mode: str = "rw",
        max_bytes: int = 1 << 30,
        remote: str | None = None,
        *,
        check: Check | None = None,
    ) -> None:
        if mode not in options_module.CACHE_MODES:
            raise UnknownNameError("cache mode", mode, options_module.CACHE_MODES)
        if max_bytes < 0:
            raise CacheKeyError(f"max_bytes is {max_bytes}; pass a number of bytes, 0 or more")
        try:
            root = Path(os.path.abspath(Path(directory).expanduser()))
        except RuntimeError as error:  # "~somebody" who is nobody
            raise CacheDirectoryError(f"cache directory {directory}: {error}") from None
        super().__init__(root, mode == "rw", max_bytes, Remote(remote) if remote else None, check)
        self.mode = mode
        self._path = str(root)
        self._seen: tuple[int, ...] | None = None
        self._locks = locks.BuildLocks()
        if mode != "off":
            self._look()
        _LIVE.add(self)

    def _look(self) -> None:
        """Raise CacheTrustError or CacheDirectoryError when the directory may not be used."""
        try:
            self._disk.check(SHARDS)
        except (OSError, ValueError) as error:  # no right to look, too long, a NUL in it
            raise CacheDirectoryError(
                f"cache directory {str(self.directory)!r:.200} cannot be looked at: {error!s:.200}"
                "; set NMM_CACHE_DIR to a directory of your own"
            ) from None

    def _look_again(self) -> None:
        """Check the directory again if it was replaced or its rights changed.

        Reading and writing the disk check it in full; this is for kernels found in memory.
        """
        try:
            status = os.lstat(self._path)
            seen: tuple[int, ...] = (status.st_dev, status.st_ino, status.st_mode, status.st_uid)
        except OSError:  # deleted, or no right to look
            seen = ()
        if seen != self._seen:
            self._look()
            self._seen = seen

    @classmethod
    def in_memory(cls, remote: str | None = None) -> Store:
        """Return a store without a directory: what it finds or builds stays in this process."""
        store = cls(os.devnull, "off", remote=remote)
        store.mode, store._disk = "ro", NoDisk(store.directory, writing=False)
        return store

    @classmethod
    def for_kernels(
        cls, options: options_module.Options | None = None, *, check: Check | None = None
    ) -> Store:
        """Return `open`'s store, or one in memory, with one warning, if its directory is refused.

        Mode "require" raises what `open` raises: such a process must not build.
        """
        try:
            store = cls.open(options, check=check)
            if store.mode != "off":
                store._look_again()
            return store
        except (CacheTrustError, CacheDirectoryError) as error:
            mode = options_module.cache_mode(options)
            if mode == "require":
                raise
            if mode != "off" and str(error) not in _said:
                _said.add(str(error))
                warnings.warn(
                    f"{error}. Until then kernels are kept in memory, prices too, and the next "
                    "process makes them again",
                    CacheWarning,
                    stacklevel=3,
                )
            remote = options_module.remote_cache(options) if mode != "off" else None
        with _OPEN_LOCK:
            kept = _IN_MEMORY.get((mode, remote))
            if kept is None:
                kept = _IN_MEMORY[mode, remote] = cls.in_memory(remote)
                kept.mode = "off" if mode == "off" else "ro"
            if check is not None:
                kept.check = check
        return kept

    @classmethod
    def open(
        cls, options: options_module.Options | None = None, *, check: Check | None = None
    ) -> Store:
        """Return the process-wide store for these options; the environment fills what is unset.

        Raises CacheTrustError when the directory is one that others could write.
        """
        settings = (
            options_module.cache_dir(options),
            options_module.cache_mode(options),
            options_module.cache_max_bytes(options),
            options_module.remote_cache(options),
        )
        with _OPEN_LOCK:
            store = _OPEN.get(settings)
            if store is None:
                store = _OPEN[settings] = cls(*settings)
            if check is not None:
                store.check = check
        return store

    def __str__(self) -> str:
        remote = f", remote={self.remote}" if self.remote else ""
        return f"Store({self.directory}, mode={self.mode}, max_bytes={self.max_bytes}{remote})"

    # Reading

    def get(self, key: Key, *, remote: bool = True) -> Entry | None:
        """Return the verified entry of `key`, or None; remote: ask the remote level too.

        Damaged entries count as absent, with a warning, and are deleted in mode "rw".
        """
        if self.mode == "off":
            return None
        return self._get_local(key) or (self._get_remote(key) if remote else None)

    def check_once(self, entry: Entry) -> None:
        """Raise CacheTrustError when a Python source of the entry is more than NKI kernels.

        Each entry on disk is parsed once for all processes; see `checked`.
        """
        self._disk.check_once(entry)

    # Building

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
        if self.mode == "off":
            return entries.make(key, build(), meta() if callable(meta) else meta)
        found = self.get(key)
        if found is not None:
            return found
        if self.mode == "require":
            raise self._missing((key,), command() if command else None)
        with ExitStack() as held:
            held.enter_context(self._locks.thread(key.digest))
            found = self._memory.get(key.digest)
            if found is None and self._can_lock():
                held.enter_context(self._locks.process(self._disk.folder, key.digest))
                found = self._get_local(key)
            if found is not None:
                return found
            files = build()
            made = entries.make(key, files, meta() if callable(meta) else meta)
            return self._keep(made)

    # Questions

    def list(self) -> tuple[Info, ...]:
        """Return every entry on disk, verified, most recently used first; damaged ones too."""
        found = []
        for seen in reversed(evict.usage(self._disk)):
            base = (seen.digest, "ok", seen.size_bytes, seen.used_ns / 1e9)
            try:
                entry, _ = self._disk.read(seen.digest)
            except FileNotFoundError:
                continue
            except DamagedEntryError as error:
                found.append(Info(seen.digest, f"damaged: {error}", *base[2:]))
                continue
            except OSError as error:
                found.append(Info(seen.digest, f"cannot be read: {error}", *base[2:]))
                continue
            names = tuple(entry.files)
            found.append(Info(*base, entry.key, entry.meta, entry.created, names))
        return tuple(found)

    def show(self, prefix: str) -> Entry:
        """Return the one entry whose digest starts with `prefix`; raise CacheError if not one."""
        digests = [d for d in self._disk.digests() if d.startswith(prefix)]
        if len(digests) != 1:
            shown = ", ".join(d[:12] for d in digests[:5]) or "see `nmm cache list`"
            raise CacheError(
                f"{len(digests)} entries of {self.directory} start with {prefix!r}: {shown}"
            )
        return self._disk.read(digests[0])[0]

    def explain(self, key: Key) -> Explanation:
        """Return where `key` is found, or which named entries differ from the nearest entry's.

        Reads every entry on disk.
        """
        infos = self.list()
        where = ""
        if self._memory.get(key.digest) is not None:
            where = "memory"
        elif any(info.digest == key.digest and info.state == "ok" for info in infos):
            where = "disk"
        elif self._get_remote(key) is not None:
            where = "remote"
        best, changes = nearest(key, infos)
        own = [info.state for info in infos if info.digest == key.digest and info.state != "ok"]
        return Explanation(key, where, best, changes, len(infos), *own)

    def missing(self, keys: Sequence[Key]) -> tuple[Key, ...]:
        """Return the keys that have no entry."""
        return tuple(key for key in keys if self.get(key) is None)

    def require(self, keys: Sequence[Key], *, command: str | None = None) -> None:
        """Raise one CacheMissError that lists every key without an entry, if there is any."""
        missing = self.missing(keys)
        if missing:
            raise self._missing(missing, command)

    def _missing(self, keys: Sequence[Key], command: str | None) -> CacheMissError:
        """Return the error, with the nearest of the entries that this process has in memory.

        It reads no entry of another key, however many there are.
        """
        held = [
            Info(e.key.digest, "ok", e.size_bytes, 0.0, e.key, e.meta)
            for e in self._memory.entries()
        ]
        lines = []
        for key in keys:
            best, changes = nearest(key, held)
            found = Explanation(key, "", best, changes, len(held), self._damage(key))
            shown = str(found) if best or found.damage else f"{key}: miss"
            lines.append(textwrap.indent(shown, "  "))
        shown = "\n".join(lines)
        many = "1 kernel is" if len(keys) == 1 else f"{len(keys):,} kernels are"
        how = command or "run the same program once with NMM_CACHE=rw"
        return CacheMissError(
            f"NMM_CACHE=require and {many} not in {self.directory}:\n{shown}\n"
            "compare with all entries: nmm cache explain --key FILE\n"
            f"build: {'NMM_CACHE=rw ' if command else ''}{how}",
            keys,
        )

    def _damage(self, key: Key) -> str:
        """Return what is wrong with the entry of a key on disk; "" when it is whole or absent."""
        try:
            self._disk.read(key.digest)
        except FileNotFoundError:
            return ""
        except DamagedEntryError as error:
            return f"damaged: {error}"
        except OSError as error:
            return f"not to be read: {error}"
        return ""

    def verify(self, rebuild: Callable[[Entry], Files | None] | None = None) -> VerifyReport:
        """Check every entry's bytes, and against `rebuild(entry)` -> files when it is given.

        `rebuild` returns None for an entry that this version cannot be asked to build.
        """
        rows = []
        for info in self.list():
            if info.state != "ok":
                rows.append(Verified(info.digest, "damaged", info.state))
                continue
            entry = self.show(info.digest)
            if rebuild is None:
                rows.append(Verified(info.digest, "same", "sha256 only"))
                continue
            try:
                rows.append(compare(entry, rebuild(entry)))
            except Exception as error:  # one kernel that cannot be built must not hide the others
                rows.append(Verified(info.digest, "failed", f"{type(error).__name__}: {error}"))
        return VerifyReport(tuple(rows))

    # Housekeeping

    def prune(self, max_bytes: int | None = None) -> tuple[evict.Usage, ...]:
        """Delete damaged entries, leftovers, lock files, and the least recently used entries
        until the rest fits into `max_bytes` (default: the store's bound); return what went.
        """
        self._need_writing("prune")
        gone = []
        damaged = {info.digest for info in self.list() if info.state != "ok"}
        for seen in evict.usage(self._disk):
            if seen.digest in damaged and self._disk.remove(seen.digest):
                gone.append(seen)
        bound = self.max_bytes if max_bytes is None else max_bytes
        evicted, _ = evict.evict(self._disk, bound)
        self._clear_leftovers()
        return (*gone, *evicted)

    def clear(self) -> int:
        """Delete every entry, and forget those in memory; return how many were on disk."""
        self._need_writing("clear")
        self._memory.drop()
        count = sum(self._disk.remove(digest) for digest in self._disk.digests())
        self._clear_leftovers(everything=True)
        return count

    def _clear_leftovers(self, everything: bool = False) -> None:
        evict.clear_leftovers(self._disk, everything)
        for name in OLDER:
            delete_tree(self.directory / name)

    def export(
        self, path: str | os.PathLike[str], prefix: str = "", *, signer: Signer | None = None
    ) -> int:
        """Write the entries whose digest starts with `prefix` to a tar file (.gz: packed).

        signer: signs each of them. Returns how many.
        """
        return archive.write(Path(path), self._whole(prefix), signer)

    def import_(
        self, path: str | os.PathLike[str], *, trusted: Trusted | None = None
    ) -> tuple[int, int]:
        """Take the entries of an archive; return (new, known).

        trusted: the public keys of which one must have signed each entry.
        All of it is read, verified and checked before any of it is kept. Raises CacheTrustError
        or DamagedEntryError when something in it is not what an export writes.
        """
        self._need_writing("import")
        source = Path(path)
        for entry in archive.read(source, trusted):
            check_sources(entry, self.check, str(source))
        new = known = 0
        for entry in archive.read(source, trusted):
            check_sources(entry, self.check, str(source))
            if self._get_local(entry.key) is not None:
                known += 1
                continue
            if self._keep(entry).directory is None:
                raise CacheError(f"{entry} of {source} could not be written to {self.directory}")
            new += 1
        return new, known

    def push(self, prefix: str = "", *, signer: Signer | None = None) -> Pushed:
        """Send the entries on disk to the remote level, signed if a signer is given.

        Raises what its filesystem raises."""
        if self.remote is None:
            raise CacheError(
                "no remote cache is declared; set NMM_REMOTE_CACHE or the option remote_cache"
            )
        return self.remote.push(self._whole(prefix), signer)

    def _whole(self, prefix: str) -> Iterator[Entry]:
        for info in self.list():
            if info.state == "ok" and info.digest.startswith(prefix):
                yield self._disk.read(info.digest)[0]

    def _need_writing(self, what: str) -> None:
        if self.mode != "rw":
            raise CacheError(f"cache mode {self.mode!r} does not permit {what}; set NMM_CACHE=rw")


_OPEN: dict[tuple[Path, str, int, str | None], Store] = {}
_IN_MEMORY: dict[tuple[str, str | None], Store] = {}
_OPEN_LOCK = threading.Lock()
_said: set[str] = set()  # why the directory may not be used, said once in a process
_LIVE: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork() -> None:
    """Make new locks in a forked child, where the threads that held the old ones are gone."""
    global _OPEN_LOCK
    _OPEN_LOCK = threading.Lock()
    for store in list(_LIVE):
        store._locks.renew()
        store._memory.renew_lock()


os.register_at_fork(after_in_child=_after_fork)
