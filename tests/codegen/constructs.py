"""What an emitted kernel is made of: every construct of its text, every instruction of its run.

`of_source` walks the syntax tree: Python's forms, names of the language, view methods, each call of
nki.isa with its arguments and the values that are fixed in it. `of_trace` reads the simulator's
trace: each instruction with the memory, the dtype and the number of free dimensions of what it
reads and writes. Both return short texts, the same for all kernels.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

MODULES = {"nl": "nki.language", "nisa": "nki.isa", "ncc": "nki.collectives", "nki": "nki"}


def of_source(source: str) -> set[str]:
    """Return the constructs of a kernel's text."""
    tree = ast.parse(source)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    known = {f.name for f in functions}
    found = {text for node in ast.walk(tree) for text in _of_node(node, known)}
    inner = (n for f in functions for n in ast.walk(f) if isinstance(n, ast.FunctionDef) and n != f)
    return found | {"Python: a function within a kernel, which reads its variables" for _ in inner}


def _of_node(node: ast.AST, functions: set[str]) -> Iterator[str]:
    match node:
        case ast.Call():
            yield _call(node, functions)
        case ast.FunctionDef():
            yield from (f"@{ast.unparse(decorator)}" for decorator in node.decorator_list)
            yield "Python: def, with a docstring"
        case ast.Attribute(ast.Name("nl"), name, ast.Load()) if name[0].islower():
            yield f"nl.{name}"
        case ast.Attribute(attr="shape" | "dtype", ctx=ast.Load()):
            yield f"tensor.{node.attr}"
        case ast.Subscript():
            yield from _subscript(node)
        case ast.For():
            yield f"Python: for over {ast.unparse(node.iter).partition('(')[0]}"
        case ast.Return():
            yield f"Python: return{'' if isinstance(node.value, ast.Name) else ' of an expression'}"
        case ast.Compare():
            yield f"Python: comparison {type(node.ops[0]).__name__}"
        case ast.If() | ast.IfExp() | ast.Assign():
            yield f"Python: {_FORMS[type(node)]}"
        case ast.BinOp():
            yield f"Python: {type(node.op).__name__} of whole numbers"
        case ast.BoolOp() | ast.UnaryOp():
            yield f"Python: {type(node.op).__name__}"
        case ast.List() | ast.Tuple():
            yield f"Python: {type(node).__name__.lower()}"
        case ast.Constant():
            yield f"Python: {type(node.value).__name__}"
        case _ if isinstance(node, _RARE):
            yield f"Python: {type(node).__name__}"


_FORMS = {ast.If: "if", ast.IfExp: "conditional expression", ast.Assign: "assignment"}
_RARE = (
    ast.While, ast.Try, ast.With, ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.ClassDef,
    ast.Global, ast.Starred, ast.JoinedStr, ast.Dict, ast.NamedExpr, ast.Yield, ast.Match,
    ast.AugAssign, ast.AnnAssign, ast.Delete, ast.Assert, ast.Raise,
)  # fmt: skip


def _subscript(node: ast.Subscript) -> Iterator[str]:
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    slices = [p for p in parts if isinstance(p, ast.Slice)]
    if not slices:
        yield "Python: element of a list or tuple"
        return
    yield f"view[{', '.join('slice' if isinstance(p, ast.Slice) else 'index' for p in parts)}]"
    if any(p.step is not None for p in slices):
        yield "view[start:stop:step] in a free dimension"


def _call(node: ast.Call, functions: set[str]) -> str:
    function = node.func
    if isinstance(function, ast.Name):
        if function.id in functions:
            return "Python: call of a function of the file"
        return f"Python: {function.id}()"
    assert isinstance(function, ast.Attribute)
    owner = ast.unparse(function.value)
    if owner in MODULES:
        given = [f"arg{i}={_value(a)}" for i, a in enumerate(node.args)]
        given += sorted(f"{k.arg}={_value(k.value)}" for k in node.keywords)
        if function.attr == "ndarray":
            shape = node.args[0]
            rank = f"rank {len(shape.elts)}" if isinstance(shape, ast.Tuple) else "shape of one"
            given[0] = rank
        given = [text.removesuffix("=...") for text in given]
        return f"{owner}.{function.attr}({', '.join(given)})"
    if function.attr in ("append", "extend"):
        return f"Python: list.{function.attr}()"
    return f"view.{function.attr}({', '.join(_view_argument(a) for a in node.args)})"


def _value(node: ast.expr) -> str:
    """Return what is fixed in an argument: a name of nki, a constant; "..." for the rest."""
    text = ast.unparse(node)
    match node:
        case ast.Attribute() if text.partition(".")[0] in MODULES:
            return text
        case ast.Attribute(attr="dtype"):
            return "tensor.dtype"
        case ast.Constant():
            return text if isinstance(node.value, (bool, type(None))) else "number"
        case ast.UnaryOp(operand=ast.Constant()):
            return "number"
        case ast.Compare() | ast.BoolOp():
            return "bool"
        case ast.Tuple() if all(isinstance(e, ast.Constant) for e in node.elts):
            return text
        case ast.Call() if text.startswith("nisa."):
            return "register"
    return "..."


def _view_argument(node: ast.expr) -> str:
    if isinstance(node, ast.Tuple):
        fixed = [e.value for e in node.elts if isinstance(e, ast.Constant)]
        if len(fixed) == len(node.elts) and sorted(fixed) == list(range(len(fixed))):
            return str(tuple(fixed))  # an order of dimensions
        return f"{len(node.elts)} sizes"
    return "..."


# Instructions whose documents relate the dtypes of their operands; of the others each operand has
# a dtype of its own.
TOGETHER = ("nc_matmul", "nc_transpose", "dma_copy", "dma_transpose")


def of_trace(instructions) -> set[str]:
    """Return the memory and the dtype of what each instruction of a run reads and writes."""
    made = set()
    for one in instructions:
        writes = [f"{access.memory} {access.dtype}" for access in one.writes]
        reads = [f"{access.memory} {access.dtype}" for access in one.reads]
        if one.op in TOGETHER:
            made.add(f"{one.op}: {' '.join(writes)} from {', '.join(reads)}")
        else:
            made |= {f"{one.op} reads {text}" for text in reads}
            made |= {f"{one.op} writes {text}" for text in writes}
    return made
