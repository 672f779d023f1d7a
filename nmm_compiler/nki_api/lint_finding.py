"""One thing the lint found in a kernel file."""

from __future__ import annotations

import ast
import dataclasses


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """Where (1-based line and column) and what: a code of docs/lint.md and a sentence.

    Codes with an E are refused by the NKI compiler or fail on a device; codes with a W work
    today and are deprecated or undocumented.
    """

    line: int
    column: int
    code: str
    message: str

    @property
    def is_error(self) -> bool:
        """Whether the kernel will not compile or not run on a device."""
        return "-E" in self.code

    def __str__(self) -> str:
        return f"{self.line}:{self.column} {self.code} {self.message}"


def at(node: ast.AST, code: str, message: str) -> Finding:
    """Return a finding at the place of a syntax node."""
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    return Finding(line, column + 1, code, message)
