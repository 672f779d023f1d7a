"""Tidies a folded function: removes what nothing reads and aliases, and joins short lines.

Folding leaves `pitch = tokens` where a choice was folded, and calls on several lines although their
long argument was folded.
"""

# libcst names its visitor methods after node classes.
# ruff: noqa: N802, D102

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst

from nmm_compiler.codegen.trees import (
    Editor,
    Names,
    appended,
    assigned,
    called,
    new_list,
    nodes,
    parameter_names,
    root,
    text,
    with_comments,
)

WIDTH = 100


def without_aliases(statements: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
    """Return the statements with `b` written for `a` where the only assignment of `a` is `a = b`.

    b is a name or `name.attribute`, and is itself assigned at most once.
    """
    counts: Counter[str] = Counter()
    plain: dict[str, cst.BaseExpression] = {}
    for node in nodes(*statements):
        if isinstance(node, (cst.Assign, cst.For)):
            target = node.target if isinstance(node, cst.For) else node.targets[0].target
            name = target.value if isinstance(target, cst.Name) else ""
            counts[name] += 1
            if name and isinstance(node, cst.Assign) and _is_plain(node.value):
                plain[name] = node.value
    aliases = {
        name: value
        for name, value in plain.items()
        if counts[name] == 1 and counts[root(value) or ""] <= 1
    }
    if not aliases:
        return list(statements)
    left = _Without(lambda name, _: name in aliases).edit_all(statements)
    written = Names({name: _resolved(value, aliases) for name, value in aliases.items()})
    return list(written.edit_all(left))


def _resolved(
    value: cst.BaseExpression, aliases: dict[str, cst.BaseExpression]
) -> cst.BaseExpression:
    """Return the name behind an alias of an alias."""
    if isinstance(value, cst.Attribute):
        return value.with_changes(value=_resolved(value.value, aliases))
    if isinstance(value, cst.Name) and value.value in aliases:
        return _resolved(aliases[value.value], aliases)
    return value


def _is_plain(value: cst.BaseExpression) -> bool:
    constants = ("None", "True", "False")
    if isinstance(value, cst.Attribute):
        return isinstance(value.value, cst.Name)
    return isinstance(value, cst.Name) and value.value not in constants


def without_lists(statements: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
    """Return the statements with a name for each element of lists of known length.

    Such a list is filled where it begins, not in a branch or a loop, and is read by known places.
    """
    made = list(statements)
    for place, statement in enumerate(made):
        block: Any = getattr(statement, "body", None)
        if isinstance(block, cst.IndentedBlock):
            body: Any = without_lists(block.body)
            changed: Any = statement
            made[place] = changed.with_changes(body=block.with_changes(body=body))
    for name in filter(None, map(new_list, statements)):
        made = _named_elements(name, made)
    return made


def _named_elements(name: str, statements: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
    """Return the statements with names for the elements of one list, unchanged if it needs one."""
    count = sum(appended(statement)[0] == name for statement in statements)
    names = [name] if count == 1 else [f"{name}{i}" for i in range(count)]
    elements, unused = _Elements(name, names), iter(names)
    made: list[Any] = []
    for statement in statements:
        owner, added = appended(statement)
        if owner == name:
            target = cst.AssignTarget(cst.Name(next(unused)))
            assign = cst.Assign([target], elements.edit(added))
            made.append(statement.with_changes(body=[assign]))
        elif new_list(statement) == name:
            made.append(None)
        else:
            made.append(elements.edit(statement))
    return statements if elements.left else with_comments(made, statements)


class _Elements(Editor):
    """Writes names for elements of a list; `left` if it is read in another way."""

    def __init__(self, name: str, names: list[str]) -> None:
        self.name, self.names, self.left = name, names, False

    def _is_list(self, node: cst.CSTNode) -> bool:
        return type(node) is cst.Name and node.value == self.name

    def edit(self, node: Any) -> Any:
        """Return the edited node: `t[0]` is a name, and `tuple(t)` a tuple of all of them."""
        kind = type(node)
        if kind is cst.Subscript and self._is_list(node.value) and len(node.slice) == 1:
            place = getattr(node.slice[0].slice, "value", None)
            if isinstance(place, cst.Integer):
                return cst.Name(self.names[int(place.value)])
        if kind is cst.Call and called(node) == "tuple" and self._is_list(node.args[0].value):
            return cst.Tuple([cst.Element(cst.Name(name)) for name in self.names])
        self.left = self.left or self._is_list(node)
        return super().edit(node)


class _Without(Editor):
    """Removes the assignments `name = value` of which `gone(name, value)` is true."""

    def __init__(self, gone: Callable[[str, Any], bool]) -> None:
        self.gone = gone

    def leave_SimpleStatementLine(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> Any:
        name, value = assigned(original)
        return cst.RemoveFromParent() if name and self.gone(name, value) else updated


class ShortCalls(Editor):
    """Puts statements on one line where they fit, and breaks signatures that do not."""

    def __init__(self) -> None:
        self.depth = 0

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        self.depth += 1

    def leave_IndentedBlock(
        self, original: cst.IndentedBlock, updated: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        self.depth -= 1
        return updated

    def leave_FunctionDef(
        self, original: cst.FunctionDef, updated: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Break a signature that is longer than a line."""
        names = parameter_names(updated)
        first = f"def {updated.name.value}({', '.join(names)}):"
        if 4 * self.depth + len(first) <= WIDTH:
            return updated
        line = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace("    "))
        end = cst.ParenthesizedWhitespace(indent=True)
        made, column = [], 4 * self.depth + 4
        for place, parameter in enumerate(updated.params.params):
            column += len(names[place]) + 2
            follows = place + 1 < len(names)
            gap: cst.BaseParenthesizableWhitespace = cst.SimpleWhitespace(" ")
            if not follows or column + len(names[place + 1]) + 1 > WIDTH:
                gap, column = (line if follows else end), 4 * self.depth + 4
            made.append(parameter.with_changes(comma=cst.Comma(whitespace_after=gap)))
        params = updated.params.with_changes(params=made)
        return updated.with_changes(params=params, whitespace_before_params=line)

    def leave_SimpleStatementLine(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        small = updated.body[0]
        if not isinstance(small, (cst.Assign, cst.Expr)):
            return updated
        if "\n" not in text(small):
            return updated
        joined = on_one_line(small)
        if "\n" in text(joined) or 4 * self.depth + len(text(joined)) > WIDTH:
            return updated
        return updated.with_changes(body=[joined])

    def leave_Subscript(self, original: cst.Subscript, updated: cst.Subscript) -> cst.Subscript:
        """Put a subscript that the template spreads over lines on one."""
        if not isinstance(original.lbracket.whitespace_after, cst.ParenthesizedWhitespace):
            return updated
        plain = cst.SimpleWhitespace("")
        joined = on_one_line(updated)
        last = joined.slice[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return joined.with_changes(
            slice=[*joined.slice[:-1], last],
            lbracket=joined.lbracket.with_changes(whitespace_after=plain),
            rbracket=joined.rbracket.with_changes(whitespace_before=plain),
        )


def on_one_line(node: cst.CSTNode) -> Any:
    """Return an expression without line breaks in it."""
    return _Join().edit(node)


class _Join(Editor):
    """Removes line breaks in brackets, and the commas before closing ones."""

    spelling = True

    def leave_ParenthesizedWhitespace(
        self, original: cst.ParenthesizedWhitespace, updated: cst.ParenthesizedWhitespace
    ) -> Any:
        return updated if original.first_line.comment is not None else cst.SimpleWhitespace(" ")

    def leave_Call(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        if not updated.args:
            return updated
        last = updated.args[-1].with_changes(
            comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=cst.SimpleWhitespace("")
        )
        return updated.with_changes(
            args=[*updated.args[:-1], last], whitespace_before_args=cst.SimpleWhitespace("")
        )


_PURE_CALLS = ("min", "max", "len", "nl.ndarray")


def names_used(trees: Sequence[cst.CSTNode]) -> set[str]:
    """Return the names that the trees read."""
    return {node.value for node in nodes(*trees, into=_read) if type(node) is cst.Name}


def _read(node: cst.CSTNode) -> Sequence[cst.CSTNode] | None:
    """Return nothing to follow in bound names: parameters, and assigned names."""
    kind = type(node)
    bound = kind is cst.AssignTarget and type(getattr(node, "target")) is cst.Name  # noqa: B009
    return () if bound or kind is cst.Param else None


def remove_unused(statements: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
    """Return the statements without assignments of values that nothing reads."""
    while True:
        used = names_used(statements)

        def unread(name: str, value: Any, used: set[str] = used) -> bool:
            return name not in used and _is_pure(value)

        left: list[cst.BaseStatement] = _Without(unread).edit_all(statements)
        if left is statements:
            return statements
        statements = left


def _is_pure(node: cst.BaseExpression) -> bool:
    """Return whether every call is one of a function, or an allocation, without effects."""
    return all(called(call) in _PURE_CALLS for call in nodes(node) if isinstance(call, cst.Call))


class Spread(ShortCalls):
    """Puts the arguments of a call that is too long for a line on lines of their own, too."""

    def leave_SimpleStatementLine(self, original: Any, updated: Any) -> Any:
        updated = super().leave_SimpleStatementLine(original, updated)
        small = updated.body[0]
        if not isinstance(small, (cst.Assign, cst.AugAssign, cst.Expr)):
            return updated
        if not isinstance(small.value, (cst.Call, cst.ListComp)):
            return updated
        joined = on_one_line(small)
        if 4 * self.depth + len(text(joined)) <= WIDTH:
            return updated.with_changes(body=[joined])
        spread = _spread(joined.value, self.depth)
        return updated.with_changes(body=[joined.with_changes(value=spread)])


def _spread(call: Any, depth: int, nested: int = 0) -> Any:
    """Return a call with a line for each argument, a list comprehension with one for its `for`.

    depth: of the statement. nested: how many such calls it is in.
    """
    spaces = ["    " * (nested + more) for more in (1, 0)]
    inner, outer = (
        cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(s)) for s in spaces
    )
    if isinstance(call, cst.ListComp):
        return call.with_changes(
            lbracket=cst.LeftSquareBracket(whitespace_after=inner),
            for_in=call.for_in.with_changes(whitespace_before=inner),
            rbracket=cst.RightSquareBracket(whitespace_before=outer),
        )
    last = len(call.args) - 1
    room = WIDTH - 4 * (depth + nested + 1) - 1
    args = [
        arg.with_changes(
            value=_spread(arg.value, depth, nested + 1)
            if isinstance(arg.value, cst.Call) and len(text(arg)) > room
            else arg.value,
            comma=cst.Comma(whitespace_after=outer if place == last else inner),
        )
        for place, arg in enumerate(call.args)
    ]
    return call.with_changes(args=args, whitespace_before_args=inner)
