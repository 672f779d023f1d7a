"""Writes the graph after each step of the pipeline, as code with the step's findings above it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import fx


class Dump:
    """The folder of one graph, `graph000` and so on, in the folder of the option."""

    def __init__(self, directory: str | None, path: str = "") -> None:
        self._folder: Path | None = None
        self._count = 0
        if directory is None:
            return
        base = Path(directory).expanduser()
        base.mkdir(parents=True, exist_ok=True)
        number = len(list(base.glob("graph*")))
        while True:
            name = f"graph{number:03d}" + (f"_{path}" if path else "")
            try:
                (base / name).mkdir()
            except FileExistsError:
                number += 1
                continue
            self._folder = base / name
            return

    def write(self, step: str, module: fx.GraphModule, findings: Iterable[str]) -> None:
        """Write `<number>_<step>.py`: the findings as comments, then the code of the graph."""
        if self._folder is None:
            return
        lines = [f"# {line}" for finding in findings for line in str(finding).splitlines()]
        code = module.graph.python_code("self").src.strip()
        text = "\n".join([f"# after {step}", *lines, "", code, ""])
        file = self._folder / f"{self._count:02d}_{step}.py"
        file.write_text(text, encoding="utf-8")
        self._count += 1
