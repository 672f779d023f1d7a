"""Progress on standard error: the current step, with a bar only where a count is known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

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


class _Counted(MofNCompleteColumn):
    """Shows "3/12" for tasks of known length, and nothing for the others."""

    def render(self, task: Task) -> Text:
        """Return the text beside the bar."""
        return super().render(task) if task.total else Text()


@contextlib.contextmanager
def steps() -> Iterator[Step]:
    """Yield a function step(words, done, total), which shows the current step and its progress.

    The function writes to standard error, and nothing if that is no terminal.
    """
    console = Console(stderr=True, markup=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), _Counted(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True,
                  disable=not console.is_terminal) as progress:  # fmt: skip
        task = progress.add_task("", total=None)

        def step(words: str, done: int = 0, total: int | None = None) -> None:
            progress.update(task, description=words, completed=done, total=total)

        yield step
