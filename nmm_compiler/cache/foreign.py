"""What a kernel source that this process did not write may contain.

A file from the remote level, an archive or an older process is run later. Lint decides whether the
NKI compiler takes a kernel. This check decides whether the file is a kernel and nothing else:
- imports of nki, constants and functions at the top; nothing runs when the file is imported;
- the builtins listed here, and no name that the file does not bind;
- names of the nki modules, and for everything else the attributes listed here: those of tensors
  that give tensors, shapes and dtypes, never a raw array;
- nothing that a few characters make huge: no `while`, no powers or shifts, no repeated or formatted
  strings, no range over a constant past MAX_RANGE.

This check is no sandbox: loops over shapes can still be long, and only the simulator's limits end
them. Take entries only from people you trust, or have them signed.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from nmm_compiler.errors import CacheTrustError

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
_POWERS = (ast.Pow, ast.LShift, ast.MatMult)
_REPEATABLE = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
_FRAMES = ("gi_", "f_", "tb_", "cr_", "ag_", "co_")  # how frames and code objects are reached
_TOP = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign, ast.AnnAssign, ast.Expr)
_NODES = (
    *_TOP, ast.Module, ast.arguments, ast.arg, ast.Return, ast.AugAssign, ast.For,
    ast.If, ast.Pass, ast.Break, ast.Continue, ast.Assert, ast.Raise, ast.BoolOp, ast.BinOp,
    ast.UnaryOp, ast.IfExp, ast.Dict, ast.ListComp, ast.DictComp, ast.comprehension, ast.Compare,
    ast.Call, ast.keyword, ast.JoinedStr, ast.FormattedValue, ast.Constant, ast.Attribute,
    ast.Subscript, ast.Starred, ast.Name, ast.List, ast.Tuple, ast.Slice, ast.alias,
    ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip


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
    for line, reason in _faults(tree):
        raise CacheTrustError(
            f"{name}, line {line}: {reason}, which no kernel file of a cache entry has"
        )


def _faults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for statement in tree.body:
        if not isinstance(statement, _TOP):
            yield statement.lineno, f"{type(statement).__name__} at the top level"
        elif isinstance(statement, ast.FunctionDef):
            yield from _run_by_definition(statement)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr)) and not (
            # The value runs at import, so it must be a literal; a docstring is one.
            statement.value is None or _is_literal(statement.value)
        ):
            yield statement.lineno, "code at the top level that runs at import"
    # Scopes are not followed, so a builtin stays one although a function has a local of its name.
    nodes = _nodes(tree)
    bound = BUILTINS | (set(_bound_names(nodes)) - set(dir(builtins)))
    modules = _modules(nodes)
    for node in nodes:
        line = getattr(node, "lineno", 0)
        if not isinstance(node, _NODES):
            yield line, f"{type(node).__name__}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                unnamed = alias.name.startswith(BETA_1) and not alias.asname
                if alias.name not in MODULES or unnamed:
                    yield line, f"import of {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module not in MODULES:
                yield line, f"import from {node.module or '.'}"
            for alias in node.names:
                top = (node.module or "").removeprefix(BETA_1) == "nki"
                known = alias.name in _TOP_NAMES if top else alias.name != "*"
                if alias.name.startswith("_") or not known:
                    yield line, f"import of {alias.name}"
        elif isinstance(node, ast.Attribute):
            if not _is_known(node, modules):
                yield line, f"attribute {node.attr}"
            elif not isinstance(node.ctx, ast.Load):
                yield line, f"assignment to the attribute {node.attr}"
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load) and node.id not in bound:
                yield line, f"name {node.id}"
            elif not isinstance(node.ctx, ast.Load) and node.id in modules:
                yield line, f"assignment to {node.id}, which is a module"
        elif isinstance(node, (ast.arg, ast.FunctionDef)):
            own = node.arg if isinstance(node, ast.arg) else node.name
            if own in modules:
                yield line, f"the name {own} for something else than the module"
        else:
            yield from ((line, reason) for reason in _too_much(node))


def _nodes(tree: ast.Module) -> list[ast.AST]:
    """Return every node except contexts (Load, Store), which no check reads.

    All checks share this list, because walking the tree is most of their time.
    """
    found: list[ast.AST] = [tree]
    for node in found:  # grows while it is read
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                found += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                found.append(value)
    return found


def _modules(nodes: list[ast.AST]) -> dict[str, str]:
    """Return local name -> full name of what the file imports."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or "nki"] = alias.name if alias.asname else "nki"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _full_name(node: ast.expr, modules: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _full_name(node.value, modules)
        return f"{owner}.{node.attr}" if owner else None
    return None


def _is_known(node: ast.Attribute, modules: dict[str, str]) -> bool:
    """Return whether an attribute is one of nki's (lint knows which there are) or listed here."""
    if node.attr.startswith(("_", *_FRAMES)):
        return False
    owner = _full_name(node.value, modules)
    if owner in ("nki", BETA_1 + "nki"):
        return node.attr in _TOP_NAMES
    return owner in MODULES or owner in _RECORDS or node.attr in ATTRIBUTES


def _too_much(node: ast.AST) -> Iterator[str]:
    """Yield the short expressions that make much work or data."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        operands = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
        if isinstance(node.op, _POWERS):
            yield f"the operator {type(node.op).__name__}"
        for operand in operands:
            text = isinstance(operand, ast.Constant) and isinstance(operand.value, (str, bytes))
            if text or (isinstance(node.op, ast.Mult) and isinstance(operand, _REPEATABLE)):
                yield "arithmetic with a string or a list"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        if abs(node.value) > _MAX_INTEGER:
            yield "an integer of over 62 bits"
    elif isinstance(node, ast.FormattedValue) and node.format_spec is not None:
        yield "a format in a string"
    elif isinstance(node, ast.Call) and _called(node.func) in _RANGES:
        for argument in node.args:
            value = argument.value if isinstance(argument, ast.Constant) else 0
            if isinstance(value, int) and value > MAX_RANGE:
                yield f"a range of {value}"


def _called(function: ast.expr) -> str | None:
    """Return the last name of what is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def _run_by_definition(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Decorators, defaults and annotations run when the file is imported."""
    for decorator in function.decorator_list:
        if ast.unparse(decorator) not in ("nki.jit", "jit"):
            yield decorator.lineno, f"decorator {ast.unparse(decorator)}"
    arguments = function.args
    for default in (*arguments.defaults, *arguments.kw_defaults):
        if default is not None and not _is_literal(default):
            yield default.lineno, "a default value that runs code"
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    notes = [a.annotation for a in (*every, arguments.vararg, arguments.kwarg) if a is not None]
    for note in (*notes, function.returns):
        if note is not None and any(isinstance(node, ast.Call) for node in ast.walk(note)):
            yield note.lineno, "an annotation that runs code"


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _bound_names(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
