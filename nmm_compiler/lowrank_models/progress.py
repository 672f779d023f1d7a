"""Progress on standard error: the current step, with its count where one is known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text

Step = Callable[..., None]
_COUNT = len("⠋  1,000/1,000 ")


@contextlib.contextmanager
def steps(first: str, console: Console | None = None) -> Iterator[Step]:
    """Yield a function step(words, done, total), which shows the current step and its progress.

    first: the words until it is called. It writes to standard error or the console, and nothing
    if that is no terminal.
    """
    console = console or Console(stderr=True, markup=False)
    room = max(10, console.width - _COUNT)
    with console.status(Text(first)) as status:

        def step(words: str, done: int = 0, total: int | None = None) -> None:
            cut = words if len(words) <= room else f"{words[: room - 1]}…"
            status.update(Text(cut if total is None else f"{cut} {done:,}/{total:,}"))

        yield step
