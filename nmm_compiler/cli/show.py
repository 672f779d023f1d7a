"""What commands answer, and how it is printed: wrapped text, or JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

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
            print(json.dumps(self.data, indent=2))
            return
        for what in self.shown:
            show(what)


def show(what: str | Sequence[Part], *, stderr: bool = False) -> None:
    """Print text or parts, no wider than the terminal: no markup is read, no word is broken."""
    console = Console(markup=False, highlight=False, stderr=stderr)
    console.print(fitted(what) if isinstance(what, str) else as_text(what), soft_wrap=True)
