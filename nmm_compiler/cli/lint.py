"""`nmm lint FILE.py ...`: check NKI kernel files without running them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from nmm_compiler.cli import values
from nmm_compiler.cli.limited import run_limited
from nmm_compiler.cli.show import show_json
from nmm_compiler.errors import NmmError
from nmm_compiler.nki_api.lint import API_VERSION, VERSIONS, Finding, lint_file
from nmm_compiler.report.text import counted

_SECONDS, _GIGABYTES = 10, 2
"""Limits of one file."""


def lint(
    files: Annotated[list[Path], typer.Argument(help="kernel files", metavar="FILE.py...")],
    nki: Annotated[
        str,
        values.choice_option(
            "NKI version", lambda: VERSIONS, f"NKI version, one of {', '.join(VERSIONS)}"
        ),
    ] = API_VERSION,
    strict: Annotated[bool, typer.Option(help="count warnings as errors")] = False,
    as_json: values.AsJson = False,
) -> None:
    """Check kernel files against the documented NKI API and the Python its compiler accepts.

    Nothing of a file is executed. Exit code: 0 clean (warnings are shown), 1 errors found, 2 a file
    or version that cannot be read, or a file that is past a limit.

    Example: nmm lint my_kernel.py --nki 0.6
    """
    console = Console(soft_wrap=True, highlight=False)
    findings: list[tuple[Path, Finding]] = []
    for path in files:

        def work(path: Path = path) -> list[list[Any]]:
            return [list(dataclasses.astuple(finding)) for finding in lint_file(path, nki=nki)]

        try:
            found = run_limited(work, what=str(path), seconds=_SECONDS, gigabytes=_GIGABYTES)
            findings += [(path, Finding(*fields)) for fields in found]
        except NmmError as error:
            Console(stderr=True, soft_wrap=True).print(Text(f"cannot lint {path}: {error}"))
            raise typer.Exit(2) from None
    if as_json:
        show_json([_plain(path, finding) for path, finding in findings])
    else:
        for path, finding in findings:
            console.print(_shown(path, finding))
        console.print(_summary(files, [finding for _, finding in findings], nki))
    if any(finding.is_error or strict for _, finding in findings):
        raise typer.Exit(1)


def _plain(path: Path, finding: Finding) -> dict[str, str | int]:
    return {
        "file": str(path),
        "line": finding.line,
        "column": finding.column,
        "code": finding.code,
        "severity": "error" if finding.is_error else "warning",
        "message": finding.message,
    }


def _shown(path: Path, finding: Finding) -> Text:
    place = f"{path}:{finding.line}:{finding.column}"
    style = "red" if finding.is_error else "yellow"
    return Text.assemble((place, "bold"), " ", (finding.code, style), " ", finding.message)


def _summary(files: list[Path], findings: list[Finding], nki: str) -> Text:
    errors = sum(finding.is_error for finding in findings)
    warnings = len(findings) - errors
    style = "red" if errors else "yellow" if warnings else "green"
    text = (
        f"{counted(len(files), 'file')}, NKI {nki}: {counted(errors, 'error')}, "
        f"{counted(warnings, 'warning')}"
    )
    return Text(text, style=style)
