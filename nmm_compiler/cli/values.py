"""Types of command arguments, which check each value when it is read.

A wrong value is refused before any work, with the option's name, the value and what would be right.
Commands annotate their arguments with these types and do not check again.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer

from nmm_compiler import outputs, targets
from nmm_compiler.cli import models
from nmm_compiler.errors import NmmError, OutputError, UnknownNameError
from nmm_compiler.targets.this_machine import FILE

LARGEST_SIZE = 1 << 20
"""Tokens or features of one dimension: eight times the largest context and vocabulary in use."""
MOST = 1 << 62
"""Instructions that a kernel may execute: --time-limit ends it."""
WORDS: ContextVar[tuple[str, ...]] = ContextVar("words", default=())
"""The words of the command line."""


def refusing(check: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Return a parser for typer that turns an error of the catalogue into one about the option."""

    def parse(value: Any) -> Any:
        try:
            return check(value)
        except NmmError as error:
            raise typer.BadParameter(str(error)) from None

    parse.__name__ = check.__name__
    return parse


def _target(value: str) -> str:
    found = targets.get(value)
    return value if value.endswith(FILE) else found.name


def _output_file(value: str | Path) -> Path:
    path = Path(value)
    outputs.check_writable(path)
    _refuse_what_is_named_twice(path)
    return path


def _refuse_what_is_named_twice(path: Path) -> None:
    """Raise OutputError for a file that another word of the command line names too."""
    words = WORDS.get() if path.is_file() else ()
    if sum(any(_is_file(part, path) for part in _parts(word)) for word in words) > 1:
        raise OutputError(
            f"cannot write {path}: the command line names it twice, and the other file would be "
            "lost; pass another name"
        )


def _parts(word: str) -> tuple[str, ...]:
    """Return what may name a file: FILE, --json=FILE, -oFILE, NAME=FILE, FILE:function."""
    short = word[2:] if word[:1] == "-" else ""
    return word, word.partition("=")[2], word.rpartition(":")[0], short


def _is_file(word: str, path: Path) -> bool:
    try:
        return bool(word) and os.path.samefile(word, path)
    except (OSError, ValueError):
        return False


def _share(value: str | float) -> float:
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise typer.BadParameter(f"{value!r} is not a share; pass a number from 0 to below 1")
    return share


def _size(value: str | int) -> int:
    text = str(value)
    if re.fullmatch(r"[0-9]{1,19}", text) and 1 <= int(text) <= LARGEST_SIZE:
        return int(text)
    raise typer.BadParameter(f"{text[:80]!r} is not a whole number from 1 to {LARGEST_SIZE}")


def target_option(more: str = "") -> Any:
    """Return the option --target: the name of a target; `more` follows the names in the help."""
    return typer.Option(
        help=", ".join(targets.names()) + more, parser=refusing(_target), metavar="TARGET",
        autocompletion=targets.names,
    )  # fmt: skip


def output_option(*names: str, help_: str) -> Any:
    """Return an option that names a file to write, in a place that is writable."""
    return typer.Option(*names, help=help_, parser=refusing(_output_file), metavar="FILE")


def choice_option(kind: str, known: Callable[[], Sequence[str]], help_: str, *names: str) -> Any:
    """Return an option that takes one of the known names. known: may import what holds them, which
    must not be torch."""

    def check(value: str) -> str:
        if value not in known():
            raise UnknownNameError(kind, value, known())
        return value

    return typer.Option(*names, help=help_, parser=refusing(check), metavar="NAME",
                        autocompletion=lambda: list(known()))  # fmt: skip


def input_file(value: str | Path) -> Path:
    """Return the path of a file to read; refuse one that is not there."""
    path = Path(value)
    if path.is_dir() or not path.exists():
        said = "it is a directory" if path.is_dir() else "there is no such file"
        raise typer.BadParameter(f"cannot read {path}: {said}")
    return path


def input_option(*names: str, help_: str) -> Any:
    """Return an option that names a file to read, which is there."""
    return typer.Option(*names, help=help_, parser=input_file, metavar="FILE")


def model_argument(more: str = "", *, weights: bool = False, also: tuple[str, ...] = ()) -> Any:
    """Return the argument of a command that takes a model.

    weights: it needs them. also: suffixes of other files that the command takes. more: words for
    the help.
    """

    def check(value: str) -> str:
        return value if value.endswith(also) else models.check(value, weights=weights)

    help_ = "DIRECTORY" if weights else "DIRECTORY, CONFIG.json, FILE.py:function"
    names = " or ".join(models.PACKAGED) if weights else "a public name such as llama-3.2-1b"
    return typer.Argument(help=f"{help_}, {names}{more}", parser=refusing(check), metavar="MODEL",
                          autocompletion=models.public_names)  # fmt: skip


def share_option(help_: str) -> Any:
    """Return an option that takes a share from 0 to below 1."""
    return typer.Option(help=help_, parser=_share, metavar="SHARE")


def size_option(*names: str, help_: str) -> Any:
    """Return an option that takes a number of tokens, features or ranks."""
    return typer.Option(*names, help=help_, parser=_size, metavar="SIZE")


def families() -> list[str]:
    """Return the names of the kernel families, for completion."""
    from nmm_compiler.kernels import FAMILIES

    return list(FAMILIES)


Family = Annotated[
    str,
    typer.Argument(help="see `nmm kernel --help`", metavar="FAMILY", autocompletion=families),
]


def list_option(kind: str, help_: str) -> Any:
    """Return an option that takes values with commas between: of kind target, share or size."""
    checks: dict[str, Callable[[str], Any]] = {"target": _target, "share": _share, "size": _size}
    check = checks[kind]

    def parse(value: str) -> str:
        try:
            return ",".join(str(check(part.strip())) for part in str(value).split(","))
        except NmmError as error:
            raise typer.BadParameter(str(error)) from None

    return typer.Option(help=f"{help_}; commas between", parser=parse, metavar=f"{kind.upper()}S")


Model = Annotated[str, model_argument()]
Target = Annotated[str, target_option()]
Targets = Annotated[str, list_option("target", "targets, as trn1,trn2,trn3")]
Cores = Annotated[str, list_option("size", "cores that share the model")]


def entries() -> list[str]:
    """Return the short names of the kernel cache's entries, for completion."""
    from nmm_compiler.cache.store import Store

    return [info.digest[:12] for info in Store.open().entries()]


AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]
Html = Annotated[Path | None, output_option("--html", help_="write the report here, one HTML file")]
TimeLimit = Annotated[float, typer.Option(help="seconds that the run may take", min=0)]
MemoryLimit = Annotated[float, typer.Option(help="GiB that the run may add", min=0)]
Grid = Annotated[int, typer.Option(min=1, max=2, help="programs: 1, or 2 for LNC=2")]
Trace = Annotated[Path | None, output_option(help_="write a Chrome/Perfetto trace here")]
