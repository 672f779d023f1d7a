"""Checks NKI kernel source against the documented API and the compiler's Python subset.

`lint_source(text)` returns findings in source order; `check_source(text)` raises LintError when
one of them is an error. Nothing is executed: the text is parsed, imports and aliases are resolved
(`lint_names.py`), and each node goes through the rules for its kind: those of `lint_api.py` for
names and calls of NKI, in the whole file, and those of `lint_kernels.py` for kernel code.

A new NKI version is an edit of `table.py`. A rule is a case of a kind of node, in one of the
generators of findings at a node, and a pair of snippets in tests/nki_api/test_lint.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

from nmm_compiler.errors import LintError
from nmm_compiler.nki_api import lint_api, lint_kernels
from nmm_compiler.nki_api.api import API_VERSION as API_VERSION, VERSIONS as VERSIONS, api
from nmm_compiler.nki_api.lint_api import Finding as Finding
from nmm_compiler.nki_api.lint_names import Names
from nmm_compiler.simulator.beta1.table import beta_1
from nmm_compiler.simulator.loading.source_text import read_source

_TOO_DEEP = Finding(1, 1, "NKI-E001", "an expression is nested too deeply; split it")
_TOO_YOUNG = ("NKI-E102", "NKI-E117")  # a name or a parameter of a later version


def lint_source(
    source: str, *, nki: str = API_VERSION, filename: str = "<kernel>"
) -> tuple[Finding, ...]:
    """Return the findings in a kernel file, in source order.

    nki: the version to check for, "0.3" to "0.7" ("0.6.0" works too); UnknownNameError otherwise.
    A file that imports `neuronxcc.nki` and not `nki` is checked for NKI Beta 1 whatever it says.
    A file that does not parse gives the single finding NKI-E001.
    """
    described = api(nki)
    try:
        tree = ast.parse(source, filename)
    except (SyntaxError, ValueError) as error:
        line, column = getattr(error, "lineno", 1) or 1, getattr(error, "offset", 1) or 1
        reason = getattr(error, "msg", None) or str(error)
        return (Finding(line, column, "NKI-E001", f"not Python: {reason}"),)
    except (RecursionError, MemoryError):  # the exception of Python's parser for a full stack
        return (_TOO_DEEP,)
    found: set[Finding] = set()
    try:
        names = Names(tree)
        for node in names.nodes:
            found.update(lint_api.of_the_api(node, names, beta_1() if names.beta_1 else described))
        if not names.beta_1:
            found.update(lint_kernels.of_the_kernels(names, described))
    except RecursionError:
        return (_TOO_DEEP,)
    return tuple(sorted(found))


def lint_file(path: str | Path, *, nki: str = API_VERSION) -> tuple[Finding, ...]:
    """Return the findings of a file on disk; FileError, an OSError, if it is no source."""
    return lint_source(read_source(Path(path)), nki=nki, filename=str(path))


def oldest_version(source: str) -> str:
    """Return the oldest NKI version that has every name a kernel file uses, one of VERSIONS.

    The newest for a text that needs more than any.
    """
    for version in VERSIONS:
        if not any(finding.code in _TOO_YOUNG for finding in lint_source(source, nki=version)):
            return version
    return VERSIONS[-1]


def check_source(source: str, *, nki: str = API_VERSION, filename: str = "<kernel>") -> None:
    """Raise LintError, naming every error, when the NKI compiler would refuse this source.

    Warnings (deprecated and undocumented constructs) pass.
    """
    errors = [f for f in lint_source(source, nki=nki, filename=filename) if f.is_error]
    if errors:
        raise LintError(filename, nki, errors)
