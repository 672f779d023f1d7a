"""Compares conformance.toml with AWS's documents: does each cited file say what the row quotes?

Two checks of tests/codegen/conformance.toml against clones at the commits that it names:

    quotes       each is in its file, in the function or at the line that is cited
    constructs   each call, view method and name of nki is in the stubs of the API: the function,
                 every keyword, every member of an enumeration

Nothing of the clones is kept. Exit code 1 and one line for each fault where something differs.

Usage: python benchmarks/conformance.py --sdk DIR --library DIR
       clones of github.com/aws-neuron/aws-neuron-sdk and nki-library
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROWS = Path(__file__).parents[1] / "tests" / "codegen" / "conformance.toml"
SDK_COMMIT = "81ce03ae261e12925e53437a0f690478e6366155"  # SDK 2.32
LIBRARY_COMMIT = "d2ad3a579498d1888aa8740af97fd325dd5f2740"
LIBRARY = "src/nkilib_src/"
STUBS = {"nl": "nki/api/nki/language/__init__.py", "nisa": "nki/api/nki/isa/__init__.py"}
NEAR_LINES = 6
"""Lines before and after a cited one that a quote may be in."""


@dataclass(frozen=True)
class Clones:
    """Where the clones of both repositories are."""

    sdk: Path
    library: Path


@functools.cache
def text_of(clones: Clones, path: str) -> str:
    """Return a file's text; raises CalledProcessError for one that its commit does not hold."""
    of_library = path.startswith(LIBRARY)
    clone = clones.library if of_library else clones.sdk
    place = f"{LIBRARY_COMMIT if of_library else SDK_COMMIT}:{path}"
    command = ["git", "-C", str(clone), "show", place]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def part_of(clones: Clones, cited: str) -> str:
    """Return the text of "FILE", of "FILE#name" (a function, a class), or near "FILE:line"."""
    if "#" in cited:
        path, _, name = cited.partition("#")
        return ast.get_source_segment(text_of(clones, path), stub_of(clones, path, name)) or ""
    path, _, line = cited.partition(":")
    if not line:
        return text_of(clones, path)
    lines, at = text_of(clones, path).splitlines(), int(line) - 1
    return "\n".join(lines[max(0, at - NEAR_LINES) : at + NEAR_LINES])


@functools.cache
def stub_of(clones: Clones, path: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """Return the definition of a name of a file: "function", "Class" or "Class.method"."""
    found: ast.AST = ast.parse(text_of(clones, path))
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        body = getattr(found, "body", [])
        found = next((n for n in body if isinstance(n, kinds) and n.name == part), ast.Pass())
    if not isinstance(found, (ast.FunctionDef, ast.ClassDef)):
        raise LookupError(f"{path} defines no {name}")
    return found


def plain(text: str) -> str:
    """Return a text with single spaces, as a quote over several lines is written."""
    return re.sub(r"\s+", " ", text)


def unsaid(clones: Clones, quotes: list[list[str]]) -> Iterator[str]:
    """Yield what is wrong with the quotes of a row; pages of the web are not read."""
    for cited, quote in quotes:
        if cited.startswith("https://"):
            continue
        try:
            if plain(quote) not in plain(part_of(clones, cited)):
                yield f"{cited} does not say {quote!r}"
        except (LookupError, subprocess.CalledProcessError) as error:
            yield f"{cited}: {error}"


def undocumented(clones: Clones, construct: str) -> Iterator[str]:
    """Yield the names of a construct that the stubs of the API do not have."""
    view = re.fullmatch(r"view\.(\w+)\(.*\)", construct)
    if view:
        yield from _missing(clones, "nl", f"NkiTensor.{view[1]}")
    for owner, path in re.findall(r"\b(nl|nisa)((?:\.\w+)+)", construct):
        yield from _missing(clones, owner, path[1:])
    call = re.fullmatch(r"(nl|nisa)\.(\w+)\((.*)\)", construct)
    if call and call[2] != "ndarray":  # a row about an array has a rank where its shape is
        stub = stub_of(clones, STUBS[call[1]], call[2])
        assert isinstance(stub, ast.FunctionDef)
        known = [a.arg for a in stub.args.args]
        for given in re.sub(r"\([^)]*\)", "", call[3]).split(", "):  # axes=(1, 0) is one
            name = given.partition("=")[0]
            place = re.fullmatch(r"arg(\d+)", name)
            if not (int(place[1]) < len(known) if place else name in known):
                yield f"{construct}: nki.isa.{call[2]} has no {name}"


def _missing(clones: Clones, owner: str, path: str) -> Iterator[str]:
    """Yield `path` if the stub of a module has no such function, class, member or variable."""
    *outer, name = path.split(".")
    file = STUBS[owner]
    try:
        body = stub_of(clones, file, ".".join(outer)).body if outer else _module(clones, file)
    except LookupError as error:
        yield str(error)
        return
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
    if name not in names:
        yield f"{file} has no {path}"


def _module(clones: Clones, file: str) -> list[ast.stmt]:
    return ast.parse(text_of(clones, file)).body


def main() -> int:
    """Compare all rows; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sdk", type=Path, required=True, help="clone of aws-neuron-sdk")
    parser.add_argument("--library", type=Path, required=True, help="clone of nki-library")
    given = parser.parse_args()
    clones = Clones(given.sdk, given.library)
    rows = tomllib.loads(ROWS.read_text(encoding="utf-8"))["row"]
    faults = [
        f"{row['says']}\n    {fault}"
        for row in rows
        for fault in (
            *unsaid(clones, row["quotes"]),
            *(text for c in row["constructs"] for text in undocumented(clones, c)),
        )
    ]
    print("\n".join(faults))
    quotes = [cited for row in rows for cited, _ in row["quotes"]]
    pages = sum(cited.startswith("https://") for cited in quotes)
    constructs = sum(len(row["constructs"]) for row in rows)
    print(
        f"{len(rows)} rows, {len(quotes) - pages} quotes compared ({pages} of pages of the web "
        f"not), {constructs} constructs: {len(faults)} faults"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
