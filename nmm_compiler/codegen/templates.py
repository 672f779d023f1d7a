"""The functions and records of a kernel's template: its file, and the files that it imports from.

Helpers of templates take records; those of emitted files take the fields, each as a parameter:

    def load(dst, part: Part, how): ... part.rows ...
      ->
    def load(dst, src, row, rows, how): ... rows ...

A parameter is a record if its annotation names a class of these files. A field may be a record
again. A field's parameter has the field's name where that is free in the function, else with the
parameter's name before it.

A helper that returns a record, or takes the operands as `others`, is no function of an emitted
file: its statements stand where it is called. Its locals keep their names, so the caller needs
other names, as a test of all templates holds. A call of it is a statement of its own, or the whole
value that a name gets; `return` is its last statement.
"""

from __future__ import annotations

import ast
import functools
import graphlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nmm_compiler.codegen.trees import (
    called,
    nodes,
    parameter_names,
    read,
)

Fields = dict[str, str]
"""Field -> the name that is its annotation: the class of a record, or any other."""
Parameter = tuple[str, ...]
"""A parameter, and of a record the field, and the field of that."""


@dataclass(frozen=True, eq=False)
class Template:
    """Functions by name, and the fields of each record."""

    functions: Mapping[str, ast.FunctionDef]
    records: Mapping[str, Fields]

    @functools.cached_property
    def written_out(self) -> Mapping[str, ast.FunctionDef]:
        """The helpers whose statements stand where they are called."""
        return {
            name: node
            for name, node in self.functions.items()
            if getattr(node.returns, "id", "") in self.records or "others" in parameter_names(node)
        }

    @functools.cached_property
    def kinds(self) -> Mapping[str, Fields]:
        """The parameters of each function, each with the name that is its annotation."""
        return {
            name: {one.arg: getattr(one.annotation, "id", "") for one in node.args.args}
            for name, node in self.functions.items()
        }

    @functools.cached_property
    def parameters(self) -> Mapping[str, dict[Parameter, str]]:
        """The names that parameters of each function have in an emitted file."""
        return {name: self._named(name) for name in self.functions}

    def _named(self, function: str) -> dict[Parameter, str]:
        kinds, read = self.kinds[function], nodes(self.functions[function])
        every = [(name, *path) for name, kind in kinds.items() for path in self._paths(kind)]
        fields = [one for one in every if len(one) > 1]
        taken = Counter({one.id for one in read if isinstance(one, ast.Name)} | set(kinds))
        taken.subtract({one[0] for one in fields})
        taken.update(one[-1] for one in fields)
        return {
            one: f"{one[0]}_{one[-1]}" if one in fields and taken[one[-1]] > 1 else one[-1]
            for one in every
        }

    def _paths(self, kind: str) -> Iterator[Parameter]:
        """Yield the fields of a record, and for a record among them the fields of that."""
        if kind not in self.records:
            yield ()
            return
        for field, inner in self.records[kind].items():
            yield from ((field, *path) for path in self._paths(inner))

    @functools.cached_property
    def call_order(self) -> list[str]:
        """The functions, every caller before what it calls."""
        calls = {
            name: sorted(set(map(called, nodes(node))) & set(self.functions))
            for name, node in self.functions.items()
        }
        return list(graphlib.TopologicalSorter(calls).static_order())[::-1]


@functools.lru_cache(maxsize=32)
def template(path: Path) -> Template:
    """Return the template of a file.

    The files that it imports from belong to it, `from ..pieces.project import ...`.
    """
    module = read(path.read_text(encoding="utf-8"))
    functions: dict[str, ast.FunctionDef] = {}
    records: dict[str, Fields] = {}
    for statement in module.body:
        if isinstance(statement, ast.ImportFrom) and statement.level and statement.module:
            folder = path.parents[statement.level - 1]
            neighbour = folder.joinpath(*statement.module.split(".")).with_suffix(".py")
            functions |= template(neighbour).functions
            records |= template(neighbour).records
        elif isinstance(statement, ast.ClassDef):
            records[statement.name] = _fields(statement)
        elif isinstance(statement, ast.FunctionDef):
            functions[statement.name] = statement
    return Template(functions, records)


def _fields(record: ast.ClassDef) -> Fields:
    """Return the annotated fields of a class, each with the name that is its annotation."""
    return {
        field.target.id: getattr(field.annotation, "id", "")
        for field in record.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


NOTHING = Template({}, {})
"""The template of an expression alone."""
