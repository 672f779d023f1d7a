"""What a kernel source that this process did not write may contain.

A file from the shared store, an archive or an older process is run later. Lint decides whether the
NKI compiler takes a kernel. This check decides whether the file is a kernel and nothing else:
- imports of nki, constants and functions at the top; nothing runs when the file is imported;
- the builtins listed here, and no name that the file does not bind;
- names of the nki modules, and for everything else the attributes listed here: those of tensors
  that give tensors, shapes and dtypes, never a raw array;
- nothing that a few characters make huge: no `while`, no powers or shifts, no repeated or formatted
  strings, no range over a constant past MAX_RANGE.

This check is no sandbox: loops over shapes can still be long, and only the simulator's limits end
them. Take entries only from people you trust.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterator

from nmm_compiler.cache.entry import Entry
from nmm_compiler.errors import CacheTrustError
from nmm_compiler.nki_api.lint import check_source

BUILTINS = frozenset(
    {
        "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "isinstance",
        "len", "list", "max", "min", "range", "reversed", "round", "slice", "sorted", "str",
        "sum", "tuple", "zip", "AssertionError", "NotImplementedError", "TypeError", "ValueError",
    }
)  # fmt: skip
BETA_1 = "neuronxcc."  # before the modules of NKI Beta 1, which have the same names
MODULES = frozenset(
    {"nki", "nki.isa", "nki.language", "nki.collectives"}
    | {BETA_1 + name for name in ("nki", "nki.isa", "nki.language")}
)
_TOP_NAMES = frozenset({"jit", "isa", "language", "collectives"})
_RECORDS = frozenset(
    {
        "nki.isa.engine", "nki.isa.reduce_cmd", "nki.isa.dge_mode", "nki.isa.oob_mode",
        "nki.isa.matmul_perf_mode", "nki.isa.nc_version", "nki.isa.dma_engine",
        "nki.language.tile_size", "nki.language.MemoryRegion",
    }
)  # fmt: skip
ATTRIBUTES = frozenset(
    {
        # of tensors
        "shape", "dtype", "ndim", "size", "itemsize", "buffer", "reshape", "permute", "broadcast",
        "expand_dim", "squeeze_dim", "reshape_dim", "flatten_dims", "rearrange", "slice", "select",
        "vector_select", "ap", "view", "indirect", "broadcast_to",
        # of lists and dicts
        "append", "pop", "index", "count", "items", "keys", "values", "get",
    }
)  # fmt: skip
_RANGES = ("range", "static_range", "affine_range", "sequential_range", "arange")
MAX_SOURCE_BYTES = 1 << 20
MAX_RANGE = 1 << 20
_MAX_INTEGER = 1 << 62
_REPEATABLE = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
_FRAMES = ("gi_", "f_", "tb_", "cr_", "ag_", "co_")  # how frames and code objects are reached
_NODES = (
    ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign, ast.AnnAssign, ast.Expr, ast.Module,
    ast.arguments, ast.arg, ast.Return, ast.AugAssign, ast.For,
    ast.If, ast.Pass, ast.Break, ast.Continue, ast.Assert, ast.Raise, ast.BoolOp, ast.BinOp,
    ast.UnaryOp, ast.IfExp, ast.Dict, ast.ListComp, ast.DictComp, ast.comprehension, ast.Compare,
    ast.Call, ast.keyword, ast.JoinedStr, ast.FormattedValue, ast.Constant, ast.Attribute,
    ast.Subscript, ast.Starred, ast.Name, ast.List, ast.Tuple, ast.Slice, ast.alias,
    ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip
_AT_IMPORT = (
    ast.Module, ast.Import, ast.ImportFrom, ast.alias, ast.FunctionDef, ast.arguments, ast.arg,
    ast.Assign, ast.AnnAssign, ast.Expr, ast.Constant, ast.UnaryOp, ast.unaryop, ast.Name,
    ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Dict, ast.expr_context,
)  # fmt: skip
"""What may stand outside of functions, whose code runs when the file is imported."""
_DECORATORS = {"jit", "nki.jit"}


def check_shape(name: str, text: str) -> None:
    """Raise CacheTrustError, with line and reason, for a source that is more than NKI kernels."""
    if len(text) > MAX_SOURCE_BYTES:
        raise CacheTrustError(
            f"{name} has {len(text)} characters, over {MAX_SOURCE_BYTES}, which no kernel has"
        )
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CacheTrustError(f"{name} is not Python: {error}") from None
    nodes = list(ast.walk(tree))
    modules = _modules(nodes)
    # Scopes are not followed, so a builtin stays one although a function has a local of its name.
    bound = BUILTINS | (set(_bound_names(nodes)) - set(dir(builtins)))
    functions = (one for one in tree.body if isinstance(one, ast.FunctionDef))
    later = {node for one in functions for line in one.body for node in ast.walk(line)}
    for node in nodes:
        reason = _fault(node, modules, bound)
        if node not in later and not isinstance(node, _AT_IMPORT):
            reason = f"{type(node).__name__} that runs at import"
        if reason:
            raise CacheTrustError(
                f"{name}, line {getattr(node, 'lineno', 0)}: {reason}, which no kernel file of a "
                "cache entry has"
            )


def check_sources(entry: Entry, origin: str) -> None:
    """Raise CacheTrustError unless each Python source of an entry from elsewhere is a kernel
    that the lint passes."""
    for name, text in entry.files.items():
        try:
            if name.endswith(".py"):
                check_shape(name, text)
                check_source(text, filename=name)
        except Exception as error:  # the lint may fail in any way; the reason goes on, raised
            what = f"{name} of entry {entry.key.digest[:12]} from {origin}"
            raise CacheTrustError(f"{what} was refused: {error}") from error


# Checks a source once in a process, before it runs; raises as `check_shape`.
check_before_run = functools.lru_cache(maxsize=4096)(check_shape)


def _fault(node: ast.AST, modules: dict[str, str], bound: frozenset[str]) -> str:
    """Return what no kernel has, or ""."""
    match node:
        case ast.Import():
            unnamed = [a.name for a in node.names if a.name.startswith(BETA_1) and not a.asname]
            wrong = unnamed + [a.name for a in node.names if a.name not in MODULES]
            return f"import of {wrong[0]}" if wrong else ""
        case ast.ImportFrom(level=0, module=str(module)) if module in MODULES:
            top = module.removeprefix(BETA_1) == "nki"
            wrong = [a.name for a in node.names if a.name.startswith(("_", "*"))]
            wrong += [a.name for a in node.names if top and a.name not in _TOP_NAMES]
            return f"import of {wrong[0]}" if wrong else ""
        case ast.ImportFrom():
            return f"import from {node.module or '.'}"
        case ast.Attribute() if not _is_known(node, modules):
            return f"attribute {node.attr}"
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            return f"assignment to the attribute {node.attr}"
        case ast.Name(ctx=ast.Load()):
            return "" if node.id in bound else f"name {node.id}"
        case ast.FunctionDef() if (
            others := set(map(ast.unparse, node.decorator_list)) - _DECORATORS
        ):
            return f"decorator {min(others)}"
        case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name):
            return f"the name {name} for something else than the module" if name in modules else ""
        case (
            ast.BinOp(op=ast.Pow() | ast.LShift() | ast.MatMult())
            | ast.AugAssign(op=ast.Pow() | ast.LShift() | ast.MatMult())
        ):
            return f"the operator {type(node.op).__name__}"
        case (
            ast.BinOp(left=ast.Constant(value=str() | bytes()))
            | ast.BinOp(right=ast.Constant(value=str() | bytes()))
            | ast.AugAssign(value=ast.Constant(value=str() | bytes()))
        ):
            return "arithmetic with a string or a list"
        case ast.BinOp(op=ast.Mult()) | ast.AugAssign(op=ast.Mult()) if any(
            isinstance(operand, _REPEATABLE) for operand in ast.iter_child_nodes(node)
        ):
            return "arithmetic with a string or a list"
        case ast.Constant(value=int(value)) if abs(value) > _MAX_INTEGER:
            return "an integer of over 62 bits"
        case ast.FormattedValue(format_spec=ast.expr()):
            return "a format in a string"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _RANGES:
            numbers = (getattr(given, "value", None) for given in node.args)
            far = [n for n in numbers if isinstance(n, int) and n > MAX_RANGE]
            return f"a range of {far[0]}" if far else ""
    return "" if isinstance(node, _NODES) else type(node).__name__


def _modules(nodes: list[ast.AST]) -> dict[str, str]:
    """Return local name -> full name of what the file imports."""
    modules: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {a.asname or "nki": a.name if a.asname else "nki" for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return modules


def _bound_names(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name)
            ):
                yield name
            case ast.alias():
                yield (node.asname or node.name).split(".")[0]


def _full_name(node: ast.expr, modules: dict[str, str]) -> str | None:
    if isinstance(node, ast.Attribute):
        owner = _full_name(node.value, modules)
        return f"{owner}.{node.attr}" if owner else None
    return modules.get(node.id) if isinstance(node, ast.Name) else None


def _is_known(node: ast.Attribute, modules: dict[str, str]) -> bool:
    """Return whether an attribute is one of nki's (lint knows which there are) or listed here."""
    if node.attr.startswith(("_", *_FRAMES)):
        return False
    owner = _full_name(node.value, modules)
    if owner in ("nki", BETA_1 + "nki"):
        return node.attr in _TOP_NAMES
    return owner in MODULES or owner in _RECORDS or node.attr in ATTRIBUTES
