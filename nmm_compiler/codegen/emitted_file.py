"""The emitted file of one spec, schedule and target: its name, its header, its text."""

from __future__ import annotations

import ast
import dataclasses
import textwrap
from typing import Any

from nmm_compiler.codegen.dialects import TITLES, in_dialect
from nmm_compiler.codegen.printed import printed
from nmm_compiler.codegen.specialize import specialize
from nmm_compiler.codegen.trees import changed, read
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import GROUPS, HEADS, QUERY_HEADS, TOKENS, WEIGHTS, KernelSpec
from nmm_compiler.targets import Target

_WIDTH = 98

# How two cores share a kernel, for its header.
_CORES = {
    "": (),
    TOKENS: ("launched on two cores: each computes half of the tokens, as follows.",),
    WEIGHTS: (
        "launched on two cores: each computes half of the outputs of every weight; what both need "
        "of intermediates crosses between them.",
    ),
    GROUPS: ("launched on two cores: each goes through half of the groups, as follows.",),
    HEADS: ("launched on two cores: each computes half of the groups of heads, as follows.",),
    QUERY_HEADS: (
        "launched on two cores: each computes half of the query heads of each group, as follows.",
    ),
}


def kernel_name(spec: KernelSpec, schedule: Any, target: Target, dialect: str = "nki") -> str:
    """Return a Python name that differs whenever spec, schedule, target or dialect do."""
    words = [*spec.short().replace(".", "_").split(), target.name]
    if spec.lnc > 1:
        words.append(f"lnc{spec.lnc}")
    if spec.tp > 1:
        words.append(f"tp{spec.tp}")
    if dialect != "nki":
        words.append(dialect)
    return "_".join([*words, (spec.digest(6) + schedule.digest(6))])


def kernel_source(
    spec: KernelSpec, schedule: Any, target: Target, dialect: str = "nki"
) -> tuple[str, str]:
    """Return (function name, source text); the same input always gives the same bytes."""
    family = FAMILIES[spec.family]
    name = kernel_name(spec, schedule, target, dialect)
    if dialect == "neuronxcc" and getattr(schedule, "own_queue", False):
        # queues are its compiler's choice, and what some views of DMAs need with them
        schedule = dataclasses.replace(schedule, own_queue=False)
    flow = (*_CORES[schedule.split], *family.data_flow(spec.share(schedule.split), schedule))
    header = _header(spec, schedule, target, TITLES[dialect], flow)
    source = specialize(
        family.path,
        family.folder,
        family.arguments(spec, schedule),
        operands=[tensor.name for tensor in spec.inputs()],
        name=name,
        header=header,
    )
    return name, in_dialect(source, dialect, spec.lnc, spec.tp)


def _header(
    spec: KernelSpec, schedule: Any, target: Target, dialect: str, flow: tuple[str, ...]
) -> list[str]:
    lines = [f"{spec.short()} for {target.name}.", ""]
    for title, text in (
        ("spec", str(spec)),
        ("schedule", str(schedule)),
        ("target", str(target)),
        ("dialect", dialect),
        ("arguments", ", ".join(map(str, spec.inputs()))),
        ("result", ", ".join(map(str, spec.outputs()))),
    ):
        if not text:
            continue
        lines += textwrap.wrap(
            f"{title}: {text}", _WIDTH, subsequent_indent="    ", break_on_hyphens=False
        )
    lines += ["", "Data flow:"]
    for line in flow:
        lines += textwrap.wrap(line, _WIDTH, initial_indent="- ", subsequent_indent="  ")
    return lines


def with_static_argument(source: str, name: str) -> str:
    """Return an emitted file whose kernel takes one more argument, which it does not read.

    Callers that keep compiled kernels by name and arguments tell kernels apart by what they pass.
    """
    tree = read(source)
    *others, kernel = tree.body
    assert isinstance(kernel, ast.FunctionDef)
    arguments = changed(kernel.args, args=[*kernel.args.args, ast.arg(name)])
    return printed(changed(tree, body=[*others, changed(kernel, args=arguments)]))
