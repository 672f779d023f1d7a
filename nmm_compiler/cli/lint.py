"""`nmm lint FILE.py ...`: check NKI kernel files without running them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from nmm_compiler.cli import values
from nmm_compiler.cli.limited import run_limited
from nmm_compiler.cli.show import Answer
from nmm_compiler.errors import FileError, NmmError
from nmm_compiler.nki_api.lint import API_VERSION, VERSIONS, Finding, lint_file
from nmm_compiler.report.parts import Code
from nmm_compiler.report.text import counted

_SECONDS, _GIGABYTES = 10, 2
"""Limits of one file."""


def lint(
    files: Annotated[list[Path], typer.Argument(help="kernel files", metavar="FILE.py...")],
    nki: Annotated[
        str,
        values.choice_option(
            "NKI version",
            "nmm_compiler.nki_api.lint:VERSIONS",
            f"NKI version, one of {', '.join(VERSIONS)}",
        ),
    ] = API_VERSION,
    strict: Annotated[bool, typer.Option(help="count warnings as errors")] = False,
) -> Answer:
    """Check kernel files against the documented NKI API and the Python its compiler accepts.

    Nothing of a file is executed. Exit code: 0 clean (warnings are shown), 1 errors found, 2 a file
    or version that cannot be read, or a file that is past a limit.

    Example: nmm lint my_kernel.py --nki 0.6
    """
    findings: list[tuple[Path, Finding]] = []
    for path in files:

        def work(path: Path = path) -> list[list[Any]]:
            return [list(dataclasses.astuple(finding)) for finding in lint_file(path, nki=nki)]

        try:
            rows = run_limited(work, what=str(path), seconds=_SECONDS, gigabytes=_GIGABYTES)
        except NmmError as error:
            raise FileError(f"cannot lint {path}: {error}") from None
        findings += [(path, Finding(*fields)) for fields in rows]
    errors = sum(finding.is_error for _, finding in findings)
    warnings = len(findings) - errors
    said = f"{counted(len(files), 'file')}, NKI {nki}: {counted(errors, 'error')}"
    return Answer(
        [
            {"file": str(path), "severity": "error" if one.is_error else "warning",
             **{name: getattr(one, name) for name in ("line", "column", "code", "message")}}
            for path, one in findings
        ],
        [
            # a finding is one line, for editors
            *([Code(f"{path}:{one.line}:{one.column} {one.code} {one.message}")]
              for path, one in findings),
            f"{said}, {counted(warnings, 'warning')}",
        ],
        passed=not (errors or (strict and warnings)),
    )  # fmt: skip
