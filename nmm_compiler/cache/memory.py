"""The entries that this process has verified. A hit calls `stat` once per file, to see changes."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict

from nmm_compiler.cache.disk import Stamp
from nmm_compiler.cache.entry import Entry, fingerprint

MAX_ENTRIES = 1024
TOUCH_SECONDS = 60.0


class Memory:
    """A bounded map of digest -> verified entry; safe between threads."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[Entry, Stamp, list[float]]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: str) -> Entry | None:
        """Return the entry, or None when there is none or its files changed on disk."""
        with self._lock:
            held = self._held.get(digest)
            if held is None:
                return None
            self._held.move_to_end(digest)
        entry, stamp, _ = held
        try:
            for path, then in stamp:
                if fingerprint(os.stat(path)) != then:
                    raise FileNotFoundError
        except OSError:
            with self._lock:
                self._held.pop(digest, None)
            return None
        return entry

    def is_touch_due(self, digest: str) -> bool:
        """Return whether the entry's last use on disk should be written again."""
        held = self._held.get(digest)
        now = time.monotonic()
        if held is None or now - held[2][0] < TOUCH_SECONDS:
            return False
        held[2][0] = now
        return True

    def put(self, entry: Entry, stamp: Stamp = ()) -> None:
        """Keep an entry; an empty stamp means that it has no files to watch."""
        with self._lock:
            self._held[entry.key.digest] = (entry, stamp, [time.monotonic()])
            self._held.move_to_end(entry.key.digest)
            while len(self._held) > MAX_ENTRIES:
                self._held.popitem(last=False)

    def drop(self, digest: str | None = None) -> None:
        """Forget one entry, or all."""
        with self._lock:
            if digest is None:
                self._held.clear()
            else:
                self._held.pop(digest, None)

    def entries(self) -> list[Entry]:
        """Return what is held, least recently used first."""
        with self._lock:
            return [entry for entry, _, _ in self._held.values()]

    def renew_lock(self) -> None:
        """Make a new lock: in a forked child, where the thread that held the old one is gone."""
        self._lock = threading.Lock()
