"""Names that the translation adds: `nl.arange` along the axes of views, tensors in a new shape.

They are assigned before the statement that needs them, once while they hold the same value.
"""

from __future__ import annotations

import libcst as cst

from nmm_compiler.codegen.beta1.expressions import Expression, text
from nmm_compiler.codegen.beta1.views import View
from nmm_compiler.codegen.trees import Names
from nmm_compiler.codegen.unused import names_used


class NewNames:
    """The names of one function, while its statements are written in order.

    held: what each name was assigned last. taken: what those of the present statement stand for.
    """

    def __init__(self) -> None:
        self.held: dict[str, Expression] = {}
        self.taken: dict[str, str] = {}

    def forget(self) -> None:
        """Begin or leave a nested block: its names are assigned again behind it."""
        self.held = {}

    def change(self, names: set[str]) -> None:
        """Note that these names hold something else: what was made of them is made again."""
        self.held = {n: value for n, value in self.held.items() if not names_used([value]) & names}

    def begin(self) -> None:
        """Begin a statement."""
        self.taken = {}

    def take(self, values: dict[str, Expression]) -> None:
        """Keep names for these values until the statement ends."""
        self.taken |= {name: text(value) for name, value in values.items()}

    def spelled(self, view: View) -> tuple[Expression, dict[str, Expression]]:
        """Return a view as an expression, and the names in it with their values.

        A name that stands for something else in the statement gets a number.
        """
        node, values = view.spelled()
        renamed: dict[str, Expression] = {}
        made: dict[str, Expression] = {}
        for name, value in values.items():
            own, place = name, 1
            while self.taken.get(own, text(value)) != text(value):
                place += 1
                own = f"{name}{place}"
            if own != name:
                renamed[name] = cst.Name(own)
            made[own] = value
        self.take(made)
        return Names(renamed).edit(node) if renamed else node, made

    def assigned(self, values: dict[str, Expression]) -> list[cst.BaseStatement]:
        """Return assignments of the names that do not hold these values yet."""
        made: list[cst.BaseStatement] = []
        for name, value in values.items():
            if name not in self.held or text(self.held[name]) != text(value):
                self.held[name] = value
                assign = cst.Assign([cst.AssignTarget(cst.Name(name))], value)
                made.append(cst.SimpleStatementLine([assign]))
        return made
