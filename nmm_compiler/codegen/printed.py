"""Prints syntax trees as source, laid out as formatters do: lines of at most 100 columns.

What does not fit on a line has the arguments of its call on a line of their own, or each on one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nmm_compiler.codegen.trees import Comment, Editor, name, parameter_names

WIDTH = 100


def text(node: ast.AST) -> str:
    """Return the source of an expression, on one line."""
    return ast.unparse(_Spelling().visit(node))


class _Spelling(Editor):
    """Spells what formatters spell otherwise than `ast.unparse`: such nodes become names."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:  # noqa: N802  (ast's name)
        return name(f'"{node.value}"') if isinstance(node.value, str) else node

    def visit_Slice(self, node: ast.Slice) -> ast.expr:  # noqa: N802  (ast's name)
        """Return 0:128, and 8 * i : 8 * i + 8 with spaces."""
        sides = [node.lower, node.upper, *([node.step] if node.step else [])]
        simple = all(isinstance(side, (ast.Name, ast.Constant, type(None))) for side in sides)
        spelled = ["" if side is None else text(side) for side in sides]
        return name((":" if simple else " : ").join(spelled).strip())


def printed(tree: ast.Module) -> str:
    """Return the source of a file: its docstring, its imports, its functions."""
    lines: list[str] = []
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            lines += ["", ""]
        lines += _statement(statement, 0)
        if isinstance(statement, ast.Expr):
            lines.append("")
    return "\n".join(lines) + "\n"


def _block(body: Sequence[ast.stmt], depth: int) -> Iterator[str]:
    """Yield the lines of a block. Comments behind its last statement are of none in it."""
    last = max((i for i, one in enumerate(body) if not isinstance(one, Comment)), default=-1)
    apart = False
    for statement in body[: last + 1] or [ast.Pass()]:
        nested = isinstance(statement, ast.FunctionDef)
        if nested or apart:
            yield ""
        apart = nested
        yield from _statement(statement, depth)


def _statement(statement: Any, depth: int) -> Iterable[str]:
    """Return the lines of a statement."""
    indent = "    " * depth
    match statement:
        case Comment(ast.Name(words)):
            return [indent + words]
        case ast.FunctionDef():
            above = [f"{indent}@{text(one)}" for one in statement.decorator_list]
            taken: list[ast.expr] = [name(one) for one in parameter_names(statement)]
            head = _laid_out("def ", ast.Call(name(statement.name), taken, []), ":", depth)
            return [*above, *head, *_block(statement.body, depth + 1)]
        case ast.For():
            loop = f"{indent}for {text(statement.target)} in {text(statement.iter)}:"
            return [*_with_comment(statement, [loop]), *_block(statement.body, depth + 1)]
        case ast.If():
            return _if(statement, depth, "if")
        case ast.Expr(ast.Constant(str(words))):
            return f'{indent}"""{words}"""'.split("\n")
        case ast.Assign():
            start = "".join(f"{text(target)} = " for target in statement.targets)
        case ast.AugAssign():
            start = f"{text(statement.target)} += "
        case ast.Return(ast.expr()):
            start = "return "
        case ast.Expr():
            start = ""
        case _:
            return [indent + text(statement)]
    return _with_comment(statement, _laid_out(start, statement.value, "", depth))


def _with_comment(statement: ast.stmt, lines: list[str]) -> list[str]:
    """Return the lines with the statement's comment at their end, before them if it is too long."""
    comment = getattr(statement, "type_comment", None)
    if not comment:
        return lines
    if len(lines[-1]) + len(comment) + 2 <= WIDTH:
        return [*lines[:-1], f"{lines[-1]}  {comment}"]
    first = lines[0]
    return [first[: len(first) - len(first.lstrip())] + comment, *lines]


def _if(statement: ast.If, depth: int, word: str) -> Iterator[str]:
    indent = "    " * depth
    yield from _with_comment(statement, [f"{indent}{word} {text(statement.test)}:"])
    yield from _block(statement.body, depth + 1)
    match statement.orelse:
        case [ast.If() as other]:
            yield from _if(other, depth, "elif")
        case [_, *_] as others:
            yield f"{indent}else:"
            yield from _block(others, depth + 1)


def _laid_out(start: str, node: ast.expr, end: str, depth: int) -> list[str]:
    """Return the lines of `start`, an expression and `end`."""
    indent = "    " * depth
    whole = f"{indent}{start}{text(node)}{end}"
    if len(whole) <= WIDTH:
        return [whole]
    parts: list[Any]
    match node:
        case ast.ListComp(element, [loop]):
            inner = _laid_out("", element, "", depth + 1)
            last = f"{indent}    for {text(loop.target)} in {text(loop.iter)}"
            return [f"{indent}{start}[", *inner, last, f"{indent}]{end}"]
        case ast.Call(function, args, keywords):
            head, parts = f"{indent}{start}{text(function)}(", [*args, *keywords]
        case _:
            return [whole]
    if len(head) > WIDTH and isinstance(function, ast.Attribute):
        given = ", ".join(map(text, parts))
        return _laid_out(start, function.value, f".{function.attr}({given}){end}", depth)
    inner = [f"{indent}    {', '.join(map(text, parts))}"]
    if len(inner[0]) > WIDTH:
        inner = [line for part in parts for line in _argument(part, depth + 1)]
    return [head, *inner, f"{indent}){end}"]


def _argument(part: ast.expr | ast.keyword, depth: int) -> list[str]:
    if isinstance(part, ast.keyword):
        return _laid_out(f"{part.arg}=", part.value, ",", depth)
    return _laid_out("", part, ",", depth)
