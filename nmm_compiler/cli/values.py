"""What commands take and what they answer: types of arguments, and an `Answer`.

A wrong value is refused before any work, with the option's name, the value and what would be right.
Commands annotate their arguments with these types and do not check again. An answer is printed as
wrapped text, or as JSON for scripts.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from nmm_compiler import outputs, targets
from nmm_compiler.cli import models
from nmm_compiler.cli.endings import WORDS
from nmm_compiler.errors import NmmError, OutputError, UnknownNameError
from nmm_compiler.report.page import page
from nmm_compiler.report.parts import Line, Part
from nmm_compiler.report.text import as_text
from nmm_compiler.targets.this_machine import FILE

LARGEST_SIZE = 1 << 20
"""Tokens or features of one dimension: eight times the largest context and vocabulary in use."""
Check = Callable[[str], Any]


def option(
    check: Check, metavar: str, help_: str, *names: str, declare: Any = typer.Option, **more: Any
) -> Any:
    """Return an option whose value `check` returns, or refuses with an error of the catalogue.

    declare: typer.Argument for an argument.
    """

    def parse(value: Any) -> Any:
        try:
            return check(value)
        except NmmError as error:
            raise typer.BadParameter(str(error)) from None

    return declare(*names, help=help_, parser=parse, metavar=metavar, **more)


def listed(check: Check, metavar: str, help_: str) -> Any:
    """Return an option that takes values with commas between."""

    def parts(value: Any) -> Sequence[Any]:  # a default is a tuple
        given = value.split(",") if isinstance(value, str) else value
        return [check(part) for part in given]

    return option(parts, metavar, f"{help_}; commas between")


def target(value: str) -> str:
    """Return the name of a target, or the path of a file that describes one."""
    known = targets.get(value.strip())
    return value if value.endswith(FILE) else known.name


def share(value: str | float) -> float:
    """Return a share from 0 to below 1."""
    with contextlib.suppress(ValueError):
        if 0 <= float(value) < 1:
            return float(value)
    raise typer.BadParameter(f"{value!r} is not a share; pass a number from 0 to below 1")


def size(value: str | int) -> int:
    """Return a number of tokens, features or ranks."""
    text = str(value).strip()
    if re.fullmatch(r"[0-9]{1,19}", text) and 1 <= int(text) <= LARGEST_SIZE:
        return int(text)
    raise typer.BadParameter(f"{text[:80]!r} is not a whole number from 1 to {LARGEST_SIZE}")


def literal(text: str) -> Any:
    """Return what a word stands for: True, False or None in any case, a number, else the word."""
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return convert(text)
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def output_file(value: str | Path) -> Path:
    """Return the path of a file to write; refuse one that another word of the line names too."""
    path = Path(value)
    outputs.check_writable(path)
    # a word names it as FILE, -oFILE, --out=FILE, NAME=@FILE or FILE:function
    parts = [(word, *re.split(r"[=:@]+|^-\w", word)) for word in WORDS]
    named = [each for each in parts if os.path.realpath(path) in map(os.path.realpath, each)]
    if path.is_file() and len(named) > 1:
        raise OutputError(
            f"cannot write {path}: the command line names it twice, and the other file would be "
            "lost; pass another name"
        )
    return path


def input_option(help_: str) -> Any:
    """Return an option that names a file to read, which is there."""
    return typer.Option(help=help_, exists=True, dir_okay=False, callback=_with_an_end)


def _with_an_end(path: Path | None) -> Path | None:
    if path is not None and path.is_char_device():
        raise typer.BadParameter(f"{path} is a device, which may have no end; pass a file")
    return path


def choice_option(
    kind: str, place: str, help_: str, *names: str, metavar: str = "NAME", **more: Any
) -> Any:
    """Return an option that takes one of the names in place, "module:NAME", which is loaded when it
    is needed and must not import torch."""

    def known() -> list[str]:
        return list(pkgutil.resolve_name(place))

    def check(value: str) -> str:
        if value not in known():
            raise UnknownNameError(kind, value, known())
        return value

    return option(check, metavar, help_, *names, autocompletion=known, **more)


def model_argument(more: str = "", *, weights: bool = False, also: tuple[str, ...] = ()) -> Any:
    """Return the argument of a command that takes a model.

    weights: it needs them. also: suffixes of other files that the command takes. more: words for
    the help.
    """

    def check(value: str) -> str:
        return value if value.endswith(also) else models.check(value, weights=weights)

    help_ = "DIRECTORY" if weights else "DIRECTORY, CONFIG.json, FILE.py:function"
    names = " or ".join(models.PACKAGED) if weights else "a public name such as llama-3.2-1b"
    return option(check, "MODEL", f"{help_}, {names}{more}", declare=typer.Argument,
                  autocompletion=models.public_names)  # fmt: skip


def entries() -> list[str]:
    """Return the short names of the kernel cache's entries, for completion."""
    from nmm_compiler.cache.store import Store

    return [info.digest[:12] for info in Store.open().entries()]


Model = Annotated[str, model_argument()]
Target = Annotated[
    str, option(target, "TARGET", ", ".join(targets.names()), autocompletion=targets.names)
]
Targets = Annotated[Sequence[str], listed(target, "TARGETS", "targets, as trn1,trn2,trn3")]
Cores = Annotated[Sequence[int], listed(size, "SIZES", "cores that share the model")]
Tokens = Annotated[int, option(size, "SIZE", "tokens of the example input")]
Include = Annotated[list[str] | None, typer.Option(help="only layers like mlp, q_proj")]
Exclude = Annotated[list[str] | None, typer.Option(help="never these layers")]
Html = Annotated[
    Path | None, option(output_file, "FILE", "write the report here, one HTML file", "--html")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]
TimeLimit = Annotated[float, typer.Option(help="seconds that the run may take", min=0.01, max=1e6)]
MemoryLimit = Annotated[float, typer.Option(help="GiB that the run may add", min=0.01, max=1e6)]
Grid = Annotated[int, typer.Option(min=1, max=2, help="programs: 1, or 2 for LNC=2")]


@dataclass(frozen=True)
class Answer:
    """What a command has to say: data with --json, else parts, in this order.

    passed: whether what it checked is right; otherwise the exit code is 1. page: title and parts
    of the file that --html names.
    """

    data: Any
    shown: Sequence[Part] = ()
    passed: bool = True
    page: tuple[str, Sequence[Part]] = ("", ())

    def say(self, as_json: bool, html: Path | None = None) -> None:
        """Print the answer; write its page where one is asked for."""
        pages = [] if html is None else [outputs.write_text(html, page(*self.page))]
        if as_json:
            print(json.dumps(self.data, indent=2))
        elif self.shown:
            print(as_text([*self.shown, *(Line(f"report: {path}") for path in pages)]))
