"""How commands print: wrapped text, JSON for scripts, pages for browsers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from nmm_compiler.report.page import write_page
from nmm_compiler.report.parts import Part
from nmm_compiler.report.text import as_text, fitted


def show(what: str | Sequence[Part], *, style: str = "", stderr: bool = False) -> None:
    """Print text or parts, no wider than the terminal: no markup is read, no word is broken."""
    console = Console(markup=False, highlight=False, stderr=stderr)
    text = fitted(what) if isinstance(what, str) else as_text(what)
    console.print(text, style=style or None, soft_wrap=True)


def show_json(data: Any) -> None:
    """Print plain JSON data."""
    print(json.dumps(data, indent=2))


def write_html(title: str, parts: Sequence[Part], path: Path, *, said: bool = True) -> None:
    """Write a page and say where it is. Raises OutputError."""
    write_page(title, parts, path)
    if said:
        show(f"report: {path}")
