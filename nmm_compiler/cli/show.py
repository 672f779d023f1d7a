"""What commands answer, and how it is printed: wrapped text, JSON for scripts, HTML pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from nmm_compiler.report.page import write_page
from nmm_compiler.report.parts import Part
from nmm_compiler.report.text import as_text, fitted


@dataclass(frozen=True)
class Answer:
    """What a command has to say: data with --json, else texts and parts, in this order.

    passed: whether what it checked is right; otherwise the exit code is 1.
    """

    data: Any
    shown: Sequence[str | Sequence[Part]] = ()
    passed: bool = True

    def say(self, as_json: bool) -> None:
        """Print the answer."""
        if as_json:
            show_json(self.data)
            return
        for what in self.shown:
            show(what)


def show(what: str | Sequence[Part], *, stderr: bool = False) -> None:
    """Print text or parts, no wider than the terminal: no markup is read, no word is broken."""
    console = Console(markup=False, highlight=False, stderr=stderr)
    console.print(fitted(what) if isinstance(what, str) else as_text(what), soft_wrap=True)


def show_json(data: Any) -> None:
    """Print plain JSON data."""
    print(json.dumps(data, indent=2))


def write_html(title: str, parts: Sequence[Part], path: Path, *, said: bool = True) -> None:
    """Write a page and say where it is. Raises OutputError."""
    write_page(title, parts, path)
    if said:
        show(f"report: {path}")
