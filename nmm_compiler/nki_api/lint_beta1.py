"""The lint of NKI Beta 1 files (`import neuronxcc.nki`): names exist, calls fit their signatures.

The stubs of Beta 1 end in `**kwargs`, so that an unknown keyword is a warning (W117); the other
codes are those of the current dialect.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nmm_compiler.errors import closest
from nmm_compiler.nki_api.lint_calls import fits_positions
from nmm_compiler.nki_api.lint_names import Finding, Names, at
from nmm_compiler.simulator.beta1.table import beta_1

_OWNERS = ("nki", "nki.isa", "nki.language")


def is_beta_1(tree: ast.Module) -> bool:
    """Return whether a file imports `neuronxcc.nki`, and not `nki`.

    `neuronxcc.nki.typing` does not count: files of the current dialect import it for their
    annotations.
    """
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    old = {m for m in modules if m.startswith("neuronxcc.nki")}
    old = {m for m in old if not m.startswith("neuronxcc.nki.typing")}
    return bool(old) and not any(m.partition(".")[0] == "nki" for m in modules)


def beta_1_findings(tree: ast.Module) -> Iterator[Finding]:
    """Yield the findings in a Beta 1 file."""
    names = Names(tree, "neuronxcc.")
    api = beta_1()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = names.resolve(node.value)
            full = f"{owner}.{node.attr}"
            known = full in api.functions or full in api.values
            if owner in _OWNERS and not known:
                text = f"{owner} has no {node.attr!r} in NKI Beta 1"
                yield at(node, "NKI-E101", text + closest(node.attr, api.names(owner)))
        elif isinstance(node, ast.Call):
            function = api.functions.get(names.resolve(node.func) or "")
            if function is not None:
                yield from fits_positions(node, function)
                known_names = [p.name for p in function.parameters]
                for keyword in node.keywords:
                    if keyword.arg is not None and keyword.arg not in known_names:
                        text = f"{function} documents no {keyword.arg!r}"
                        yield at(keyword, "NKI-W117", text + closest(keyword.arg, known_names))
