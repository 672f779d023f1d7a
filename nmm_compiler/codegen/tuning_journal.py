"""The times of an unfinished search, so that a run that was killed goes on where it was."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from nmm_compiler.cache.store import Store
from nmm_compiler.codegen.choose import Choice
from nmm_compiler.codegen.tuned import choice_of, plain_choice, schedule_text, tuning_key
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.targets import Target


class Journal:
    """A file beside the cache's entries with one line for each schedule that was timed.

    A line that a kill cut short is left out, and its schedule is timed again.
    """

    def __init__(self, store: Store, spec: KernelSpec, chip: Target, budget: int) -> None:
        digest = tuning_key(spec, chip, budget).digest
        self.path = Path(store.directory) / "tuning" / f"{digest}.jsonl"
        self.spec, self.added = spec, 0
        self.rows: dict[str, Choice] = {}

    def __enter__(self) -> Journal:
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                choice = choice_of(json.loads(line), self.spec)
                self.rows[schedule_text(choice)] = choice
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._handle = os.open(self.path, flags, 0o600)
        os.ftruncate(self._handle, len(whole.encode()))
        os.lseek(self._handle, 0, os.SEEK_END)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._handle)

    def add(self, choice: Choice) -> None:
        """Write the times of one schedule."""
        os.write(self._handle, (json.dumps(plain_choice(choice)) + "\n").encode())
        self.rows[schedule_text(choice)] = choice
        self.added += 1
