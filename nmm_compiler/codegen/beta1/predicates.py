"""Writes the pattern of an affine select as the comparison of index expressions that Beta 1 takes.

`pattern=[[-1, n]], channel_multiplier=1, offset=c, cmp_op=nl.greater_equal` becomes
`pred=(c + i_p - i_f >= 0)`, i_p and i_f being `nl.arange` along the axes of the tile.
"""

from __future__ import annotations

from typing import Any

import libcst as cst

from nmm_compiler.codegen.beta1.expressions import (
    Expression,
    integer,
    plus,
    text,
    times,
)
from nmm_compiler.codegen.beta1.facts import keyword
from nmm_compiler.codegen.beta1.views import along, index_names
from nmm_compiler.errors import no_beta1_form

_COMPARISONS: dict[str, Any] = {
    "nl.greater_equal": cst.GreaterThanEqual, "nl.greater": cst.GreaterThan,
    "nl.less_equal": cst.LessThanEqual, "nl.less": cst.LessThan,
}  # fmt: skip


def predicate(call: cst.Call, partitions: Expression) -> tuple[Expression, dict[str, Expression]]:
    """Return the comparison of an affine select, and the index names in it with their values."""
    pattern, multiplier = keyword(call, "pattern"), keyword(call, "channel_multiplier")
    compared = keyword(call, "cmp_op")
    comparison = _COMPARISONS.get(text(compared)) if compared is not None else None
    if not isinstance(pattern, cst.List) or multiplier is None or comparison is None:
        raise no_beta1_form("nisa.affine_select without a spelled pattern and comparison")
    rows = [[one.value for one in _list(row.value)] for row in pattern.elements]
    factors = [multiplier, *(factor for factor, _ in rows)]
    sizes = [partitions, *(size for _, size in rows)]
    total = keyword(call, "offset") or integer(0)
    used: dict[str, Expression] = {}
    names = index_names(len(sizes))
    # an axis without a factor is there all the same: the comparison has the shape of the tile
    for place, (name, factor) in enumerate(zip(names, factors, strict=True)):
        used[name] = along(sizes[place], place, len(sizes))
        total = _added(total, factor, cst.Name(name))
    right = cst.ComparisonTarget(comparison(), integer(0))
    return cst.Comparison(total, [right], lpar=[cst.LeftParen()], rpar=[cst.RightParen()]), used


def _list(node: Expression) -> list[cst.Element]:
    if not isinstance(node, cst.List) or len(node.elements) != 2:
        raise no_beta1_form(f"nisa.affine_select with {text(node)} in its pattern")
    return list(node.elements)  # type: ignore[arg-type]


def _added(total: Expression, factor: Expression, index: Expression) -> Expression:
    if isinstance(factor, cst.UnaryOperation) and isinstance(factor.operator, cst.Minus):
        return cst.BinaryOperation(total, cst.Subtract(), times(factor.expression, index))
    return plus(total, times(factor, index))
