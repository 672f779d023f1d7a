"""Counts the code by room and says where a limit of docs/layout.md is broken.

    python tests/size.py

Statements are what is limited: joining lines saves none. Nodes a statement are limited too, so that
long expressions save none either. The exit code is 1 if a limit is broken. The table in
docs/layout.md is the only place that names rooms: `tests/` is a whole tree, `nmm_compiler/passes/`
a room, `nmm_compiler/*.py` the files beside rooms, and what is in a room and has a row of its own
is counted apart.
"""

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADING = "| counted together |"


@dataclass(frozen=True)
class Size:
    """How much code a file or a room holds."""

    statements: int = 0
    lines: int = 0
    nodes: int = 0
    functions: int = 0

    def __add__(self, other):
        return Size(
            self.statements + other.statements,
            self.lines + other.lines,
            self.nodes + other.nodes,
            self.functions + other.functions,
        )

    @property
    def nodes_per_statement(self):
        return self.nodes / self.statements if self.statements else 0.0


@dataclass(frozen=True)
class Limit:
    """A row of the table: what is counted together, and the most that it may have."""

    name: str
    rooms: tuple[str, ...]
    statements: int
    nodes_per_statement: float | None

    def faults(self, size):
        if size.statements > self.statements:
            yield f"{self.name}: {size.statements:,} statements, over {self.statements:,}"
        most = self.nodes_per_statement
        if most is not None and round(size.nodes_per_statement, 2) > most:
            yield f"{self.name}: {size.nodes_per_statement:.2f} nodes a statement, over {most:.2f}"


def size_of(text):
    nodes = list(ast.walk(ast.parse(text)))
    return Size(
        statements=sum(isinstance(node, ast.stmt) for node in nodes),
        lines=len(text.splitlines()),
        nodes=len(nodes),
        functions=sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes),
    )


def limits_of(layout):
    """Return the rows of the table in the text of docs/layout.md."""
    table = layout.partition(HEADING)[2].partition("\n\n")[0]
    limits = []
    for line in table.splitlines()[2:]:
        name, rooms, statements, nodes = (cell.strip() for cell in line.strip("|").split("|"))
        limits.append(
            Limit(
                name,
                tuple(re.findall(r"`([^`]+)`", rooms)),
                int(statements.replace(",", "")),
                float(nodes) if nodes else None,
            )
        )
    if not limits:
        raise ValueError(f"docs/layout.md has no table that begins with {HEADING!r}")
    return limits


def sizes_of(root, limits):
    """Return the size of each room of the trees that the limits name, of parts with a row apart."""
    names = [name for limit in limits for name in limit.rooms]
    parts = [name for name in names if name.rstrip("/").count("/") > 1]
    sizes: dict[str, Size] = {}
    for tree in dict.fromkeys(name.split("/")[0] for name in names):
        for path in sorted((root / tree).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            room = f"{tree}/*.py" if name.count("/") == 1 else "/".join(name.split("/")[:2]) + "/"
            room = next((part for part in parts if name.startswith(part)), room)
            sizes[room] = sizes.get(room, Size()) + size_of(path.read_text("utf-8"))
    return sizes


def rooms_of(limit, limits, rooms):
    """Return the rooms that a row counts: a tree all of its own, a room no part with a row."""
    tree = any(name.endswith("/") and name.count("/") == 1 for name in limit.rooms)
    named = {name for one in limits if one is not limit for name in one.rooms}
    return [room for room in rooms if room.startswith(limit.rooms) and (tree or room not in named)]


def rooms_without_a_limit(sizes, limits):
    """Return the rooms that have no row of their own, in trees where other rooms have one."""
    named = [name for limit in limits for name in limit.rooms if name.split("/")[1]]
    trees = {name.split("/")[0] for name in named}
    return [
        room for room in sizes if room.split("/")[0] in trees and not room.startswith(tuple(named))
    ]


def row(name, size, limit=""):
    text = f"{name:<28}{size.statements:>11,}{limit:>9}{size.lines:>9,}"
    return text + f"{size.nodes_per_statement:>8.2f}{size.functions:>11,}"


def main(root=ROOT):
    limits = limits_of((root / "docs" / "layout.md").read_text("utf-8"))
    sizes = sizes_of(root, limits)
    faults = [
        f"{room} is in no row of docs/layout.md" for room in rooms_without_a_limit(sizes, limits)
    ]
    print(f"{'':<28}{'statements':>11}{'at most':>9}{'lines':>9}{'nodes':>8}{'functions':>11}")
    left = set(sizes)
    for limit in limits:
        rooms = rooms_of(limit, limits, sizes)
        size = sum(map(sizes.get, rooms), Size())
        faults += limit.faults(size)
        print(row(limit.name, size, f"{limit.statements:,}"))
        for room in sorted(left.intersection(rooms)):
            print(row(f"  {room}", sizes[room]))
        left.difference_update(rooms)
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
