"""A progress bar of named steps, which prints nothing where there is no terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Steps:
    """`with Steps("factorizing", 24) as steps: steps.show(name); ...; steps.advance()`."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(what, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, detail: str) -> None:
        """Name the step that is being worked on."""
        self._progress.update(self._task, description=f"{self._what} {detail}")

    def advance(self) -> None:
        """Count one step as done."""
        self._progress.advance(self._task)
