"""Compare NKI Beta 1 as this project knows it with the stubs of AWS Neuron SDK 2.26.

Two comparisons with `nki/api/nki/{isa,language}/__init__.py` of aws-neuron-sdk (the stubs that AWS
documents that version with; the same at tags v2.26.0 and v2.26.1):

- the table `nki_api/beta1_table.py`: names, parameters, their order as far as they may be given by
  place, and their defaults
- emitted kernels of every family, with norms, residuals, few and moving tokens, packed heads, fp8
  and scales: each `nl.` and `nisa.` name, each keyword, the count of positional arguments

A stub that ends in **kwargs takes any keyword, so that one which it does not name is told apart:
`perf_mode` of nc_matmul, which nki-samples uses. Ranges and nl.arange take *args there.

Usage: python benchmarks/beta1_stubs.py --docs CLONE_OF_AWS_NEURON_SDK
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from beta1_interpreter import LOOPED, SPECS
from beta1_kernels import DOCS_COMMIT, unpacked

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.gated_mlp import GatedMLPSpec, GatedMLPUpSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.lowrank_shared import LowRankSharedSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.nki_api.beta1_api import beta_1
from nmm_compiler.options import Options

E4 = "float8_e4m3"
FP8 = (
    LowRankSpec(m=16, k=512, r=256, n=200, dtype=E4, intermediate=E4),
    LowRankSpec(m=1, k=512, r=256, n=512, dtype=E4, scales="tensor"),
    LowRankSpec(m=200, k=512, r=256, n=512, dtype=E4, scales="channel", x_dtype="bfloat16",
                out_layout="col", u_layout="col", v_layout="col", residual=True),
    LowRankSharedSpec(m=16, k=256, pairs=((128, (256,)), (64, (128,))), dtype=E4,
                      scales="channel", x_dtype="bfloat16"),
    MatmulSpec(m=130, k=512, n=200, dtype=E4, scales="channel"),
    MatmulSpec(m=4, k=512, n=2048, dtype=E4, scales="tensor", w_layout="col"),
    GatedMLPUpSpec(m=16, k=256, n=512, r=128, dtype=E4, scales="channel", x_dtype="bfloat16"),
    GatedMLPSpec(m=16, k=256, n=512, r=128, dtype=E4, intermediate=E4, residual=True),
)  # fmt: skip
HALF = tuple(dataclasses.replace(spec, dtype="bfloat16") for spec in SPECS)
NOT_IN_STUBS = {("nki.isa.nc_matmul", "perf_mode")}
# Defaults of the stubs as the table writes them: the same operator, the same number.
SPELLED = {"np.amax": "maximum", "fp32.min": repr(float(np.finfo(np.float32).min))}
SHORT = {"nl": "nki.language", "nisa": "nki.isa"}
Signature = ast.arguments


def stubs(folder: Path) -> tuple[dict[str, Signature], set[str]]:
    """Return the functions of the stubs by full name, and every name that they define."""
    functions: dict[str, Signature] = {}
    names: set[str] = set()
    for module in SHORT.values():
        path = folder / "nki" / "api" / Path(*module.split(".")) / "__init__.py"
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                functions[f"{module}.{node.name}"] = node.args
                names.add(f"{module}.{node.name}")
            elif isinstance(node, ast.ClassDef):
                names.add(f"{module}.{node.name}")
                names |= {f"{module}.{node.name}.{member}" for member in _members(node)}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {f"{module}.{t.id}" for t in targets if isinstance(t, ast.Name)}
    return functions, names


def _members(node: ast.ClassDef) -> Iterator[str]:
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef):
            yield inner.name
        elif isinstance(inner, ast.Assign):
            yield from (t.id for t in inner.targets if isinstance(t, ast.Name))
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            yield inner.target.id


def table_differences(functions: dict[str, Signature]) -> Iterator[str]:
    """Yield what the table says otherwise than the stubs."""
    known = {n: f for n, f in beta_1().functions.items() if n.rpartition(".")[0] in SHORT.values()}
    values = beta_1().values
    for name in sorted(set(functions) ^ set(known)):
        if name not in values:
            yield f"{name}: {'the table lacks it' if name in functions else 'no stub'}"
    for name in sorted(set(functions) & set(known)):
        stub = functions[name]
        if stub.vararg is not None:
            continue
        theirs = [*stub.posonlyargs, *stub.args, *stub.kwonlyargs]
        free = [None] * (len(theirs) - len(stub.kwonlyargs) - len(stub.defaults))
        defaults = [*free, *stub.defaults, *stub.kw_defaults]
        mine = {p.name: p.default for p in known[name].parameters}
        extra = {p for p in mine if (name, p) not in NOT_IN_STUBS} ^ {a.arg for a in theirs}
        if extra:
            yield f"{name}: {', '.join(sorted(extra))} in one of them only"
        by_place = [a.arg for a in (*stub.posonlyargs, *stub.args)]
        if list(mine)[: len(by_place)] != by_place:
            yield f"{name}: the order is {', '.join(by_place)}"
        for argument, default in zip(theirs, defaults, strict=True):
            if argument.arg in mine and not _same_default(default, mine[argument.arg]):
                said = None if default is None else ast.unparse(default)
                yield f"{name}: {argument.arg} is {said}, here {mine[argument.arg]}"


def _same_default(stub: ast.expr | None, mine: str | None) -> bool:
    """Return whether two defaults are one value. Enumerators are compared by their last names:
    the stubs print `engine.unknown` in several ways."""
    if stub is None or mine is None:
        return stub is None and mine is None
    if SPELLED.get(ast.unparse(stub)) == mine:
        return True
    try:
        return bool(ast.literal_eval(stub) == ast.literal_eval(mine))
    except ValueError:
        return _last_name(ast.unparse(stub)) == _last_name(mine)


def _last_name(text: str) -> str:
    return re.sub(r"[^\w.]", "", text).rpartition(".")[2]


def source_differences(
    source: str, functions: dict[str, Signature], names: set[str]
) -> Iterator[str]:
    """Yield what an emitted file uses that the stubs do not define."""
    for node in ast.walk(ast.parse(source)):
        full = _full(node.func if isinstance(node, ast.Call) else node)
        if full is None:
            continue
        if full not in names:
            yield f"{full} is not in the stubs"
        elif isinstance(node, ast.Call) and full in functions:
            stub = functions[full]
            keywords = {a.arg for a in (*stub.args, *stub.kwonlyargs)}
            for keyword in node.keywords:
                if keyword.arg not in keywords and (full, keyword.arg) not in NOT_IN_STUBS:
                    yield f"{full} takes no {keyword.arg}"
            if len(node.args) > len(stub.args) and stub.vararg is None:
                yield f"{full} with {len(node.args)} positional arguments"


def _full(node: ast.AST) -> str | None:
    """Return the full name of `nl.x` or `nisa.x`, also of `nl.x.y`."""
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id in SHORT:
            return f"{SHORT[node.value.id]}.{node.attr}"
        owner = _full(node.value)
        return f"{owner}.{node.attr}" if owner and node.attr.isidentifier() else None
    return None


def main() -> int:
    """Print the differences; 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--docs", type=Path, required=True, help="clone of aws-neuron-sdk")
    given = parser.parse_args()
    functions, names = stubs(unpacked(given.docs, DOCS_COMMIT, "nki/api/nki"))
    found = list(table_differences(functions))
    print(f"table: {len(functions)} functions of the stubs, {len(found)} differences")
    plain, small = Options(cache="off"), Options(cache="off", instruction_budget=100)
    kernels = [
        build_kernel(spec, target, dialect="neuronxcc", options=options)
        for target, specs in (("trn1", (*SPECS, *HALF)), ("trn2", (*SPECS, *HALF, *FP8)))
        for spec, options in [*((s, plain) for s in specs), *((s, small) for s in LOOPED)]
    ]
    uses: set[str] = set()
    for kernel in kernels:
        uses |= {f for node in ast.walk(ast.parse(kernel.source)) if (f := _full(node))}
        wrong = set(source_differences(kernel.source, functions, names))
        found += [f"{kernel.spec} on {kernel.target.name}: {text}" for text in sorted(wrong)]
    print(f"{len(kernels)} emitted kernels use {len(uses)} names: {', '.join(sorted(uses))}")
    print("\n".join(found) or "no differences")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
