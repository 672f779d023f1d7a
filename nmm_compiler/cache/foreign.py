"""What a source from elsewhere may contain at all, before its kernel check (lint) looks at it.

A file from the remote level or an archive is imported later, and importing runs it. Lint asks
whether the NKI compiler takes a kernel; this asks whether the file is a kernel and nothing else:
imports of nki, constants and functions at the top, no builtin that reaches files or other code, no
underscore attribute. It is a second wall and no sandbox: take entries only from people you trust.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from nmm_compiler.errors import CacheTrustError

BUILTINS = frozenset(
    {
        "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "isinstance",
        "len", "list", "max", "min", "pow", "range", "reversed", "round", "slice", "sorted", "str",
        "sum", "tuple", "zip", "AssertionError", "NotImplementedError", "TypeError", "ValueError",
    }
)  # fmt: skip
_FRAMES = ("gi_", "f_", "tb_", "cr_", "ag_", "co_")  # how frames and code objects are reached
_TOP = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign, ast.AnnAssign, ast.Expr)
_NODES = (
    *_TOP, ast.Module, ast.arguments, ast.arg, ast.Return, ast.AugAssign, ast.For, ast.While,
    ast.If, ast.Pass, ast.Break, ast.Continue, ast.Assert, ast.Raise, ast.BoolOp, ast.BinOp,
    ast.UnaryOp, ast.IfExp, ast.Dict, ast.ListComp, ast.DictComp, ast.comprehension, ast.Compare,
    ast.Call, ast.keyword, ast.JoinedStr, ast.FormattedValue, ast.Constant, ast.Attribute,
    ast.Subscript, ast.Starred, ast.Name, ast.List, ast.Tuple, ast.Slice, ast.alias,
    ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip


def check_shape(name: str, text: str) -> None:
    """Raise CacheTrustError, with line and reason, for a source that is more than NKI kernels."""
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
    bound = BUILTINS | (set(_bound_names(tree)) - set(dir(builtins)))
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if not isinstance(node, _NODES):
            yield line, f"{type(node).__name__}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] != "nki":
                    yield line, f"import of {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            if node.level or (node.module or "").split(".")[0] != "nki":
                yield line, f"import from {node.module or '.'}"
            for alias in node.names:
                if alias.name.startswith("_") or alias.name == "*":
                    yield line, f"import of {alias.name}"
        elif isinstance(node, ast.Attribute) and node.attr.startswith(("_", *_FRAMES)):
            yield line, f"attribute {node.attr}"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in bound:
            yield line, f"name {node.id}"


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


def _bound_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
