"""Progress on standard error: the current step, with a bar only where a count is known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

Step = Callable[..., None]
_BAR = 20
_COUNT_AND_TIME = len(" 1,000/1,000 0:00:00 ")


class _Bar(BarColumn):
    """A bar for tasks of known length, and nothing for the others: a full bar would look done."""

    def render(self, task: Task) -> Any:
        """Return the bar."""
        return super().render(task) if task.total else Text()


class _Counted(MofNCompleteColumn):
    """Shows "3/12" for tasks of known length, and nothing for the others."""

    def render(self, task: Task) -> Text:
        """Return the text beside the bar."""
        return super().render(task) if task.total else Text()


@contextlib.contextmanager
def steps(first: str, console: Console | None = None) -> Iterator[Step]:
    """Yield a function step(words, done, total), which shows the current step and its progress.

    first: the words until it is called. It writes to standard error or the console, and nothing
    if that is no terminal.
    """
    console = console or Console(stderr=True, markup=False)
    room = max(10, console.width - _BAR - _COUNT_AND_TIME)
    columns = (TextColumn("{task.description}", markup=False), _Bar(bar_width=_BAR), _Counted(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True,
                  disable=not console.is_terminal) as progress:  # fmt: skip
        task = progress.add_task(first, total=None)

        def step(words: str, done: int = 0, total: int | None = None) -> None:
            cut = words if len(words) <= room else f"{words[: room - 1]}…"
            progress.update(task, description=cut, completed=done, total=total)

        yield step
