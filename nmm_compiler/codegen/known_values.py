"""The known value of an expression: integers, constants of another kind, or unknown.

A range holds every integer that an expression may be. That is enough to decide `min(128, k - 128 *
i)` inside `for i in range(16)`, or that a row count is a multiple of 128, without unrolling
anything. A frozenset holds constants that are no integers: text, bool, float, None, tuples of
constants; several where a text differs between calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Value = range | frozenset[Any] | None


def known(value: object) -> Value:
    """Return the Value of a Python constant."""
    if isinstance(value, int) and not isinstance(value, bool):
        return range(value, value + 1)
    return frozenset([value])


def span(lo: int, hi: int, step: int = 1) -> range:
    """Return the integers lo, lo + step, ... up to hi."""
    return range(lo, hi + 1, step if lo < hi else 1)


def _step(value: range) -> int:
    return value.step if len(value) > 1 else 0


def constant(value: Value) -> tuple[bool, Any]:
    """Return (True, the constant) or (False, None)."""
    if value is None or len(value) != 1:
        return False, None
    return True, next(iter(value))


def truth(value: Value) -> bool | None:
    """Return the truth of a value, or None when it is not known."""
    if isinstance(value, range) and (value[0] > 0 or value[-1] < 0):
        return True
    fixed, plain = constant(value)
    return bool(plain) if fixed else None


def join(values: Sequence[Value]) -> Value:
    """Return the known value of an expression that has one of these values."""
    spans = [value for value in values if isinstance(value, range)]
    if not values or (spans and len(spans) < len(values)) or None in values:
        return None
    if not spans:
        return frozenset[Any]().union(*values)  # type: ignore[arg-type]
    lo, hi = min(s[0] for s in spans), max(s[-1] for s in spans)
    return span(lo, hi, math.gcd(*map(_step, spans), *(s[0] - lo for s in spans)))


def without(value: Value, item: Any) -> Value:
    """Return the known value if `value` is not `item`."""
    left = value - {item} if isinstance(value, frozenset) else value
    return left if left is None or len(left) else value


def length(value: Value) -> Value:
    """Return len of a constant tuple."""
    fixed, plain = constant(value)
    return known(len(plain)) if fixed and isinstance(plain, tuple) else None


def item(value: Value, index: Value) -> Value:
    """Return the known value of an element of a constant tuple."""
    fixed, plain = constant(value)
    if not (fixed and isinstance(plain, tuple) and isinstance(index, range)):
        return None
    if index[0] < 0 or index[-1] >= len(plain):
        return None
    return join([known(plain[i]) for i in index])


def loop_values(start: Value, stop: Value, step: Value) -> tuple[Value, int | None]:
    """Return (the values of a `range` variable, the number of iterations if it is known)."""
    if not (isinstance(start, range) and isinstance(stop, range) and isinstance(step, range)):
        return None, None
    if len(step) > 1 or step[0] <= 0:
        return None, None
    by, first, last = step[0], start[0], start[-1]
    if len(start) == len(stop) == 1:
        values = range(first, stop[0], by)
        return (values, len(values)) if values else (None, 0)
    once = 1 if last < stop[0] and stop[-1] <= first + by else None
    if len(start) == 1:
        return range(first, max(stop[-1], first + 1), by), once
    if stop[-1] <= first:
        return None, 0
    return span(first, max(stop[-1] - 1, first), math.gcd(_step(start), by)), once


def _add(a: range, b: range) -> Value:
    return span(a[0] + b[0], a[-1] + b[-1], math.gcd(_step(a), _step(b)))


def _subtract(a: range, b: range) -> Value:
    return span(a[0] - b[-1], a[-1] - b[0], math.gcd(_step(a), _step(b)))


def _multiply(a: range, b: range) -> Value:
    if len(a) == 1:
        a, b = b, a
    corners = [x * y for x in (a[0], a[-1]) for y in (b[0], b[-1])]
    return span(min(corners), max(corners), abs(b[0]) * _step(a) if len(b) == 1 else 1)


def _floor_divide(a: range, b: range) -> Value:
    if len(b) > 1 or b[0] <= 0:
        return None
    whole = a[0] % b[0] == 0 and _step(a) % b[0] == 0
    return span(a[0] // b[0], a[-1] // b[0], _step(a) // b[0] if whole else 1)


def _modulo(a: range, b: range) -> Value:
    if len(b) > 1 or b[0] <= 0:
        return None
    if _step(a) % b[0] == 0:
        return known(a[0] % b[0])
    return a if a[0] >= 0 and a[-1] < b[0] else range(b[0])


ARITHMETIC: dict[str, Callable[[range, range], Value]] = {
    "Add": _add,
    "Subtract": _subtract,
    "Multiply": _multiply,
    "FloorDivide": _floor_divide,
    "Modulo": _modulo,
}


def smallest(values: Sequence[Value]) -> Value:
    """Return the known value of min(values)."""
    spans = [value for value in values if isinstance(value, range)]
    if len(spans) < len(values):
        return None
    bound = min(s[-1] for s in spans)
    joined = join([s for s in spans if s[0] <= bound])
    assert isinstance(joined, range)
    return span(joined[0], bound, joined.step) if joined[-1] > bound else joined


def largest(values: Sequence[Value]) -> Value:
    """Return the known value of max(values)."""
    least = smallest([negated(value) for value in values])
    return negated(least)


def negated(value: Value) -> Value:
    """Return the known value of -value, for a float too."""
    if isinstance(value, range):
        return span(-value[-1], -value[0], _step(value))
    _, plain = constant(value)
    return known(-plain) if isinstance(plain, float) else None


def compare(operator: str, a: Value, b: Value) -> Value:
    """Return the known outcome of a comparison, a bool, or None."""
    if a is None or b is None:
        return None
    if operator in ("Equal", "NotEqual"):
        equal = _equal(a, b)
        return None if equal is None else known(equal is (operator == "Equal"))
    if not (isinstance(a, range) and isinstance(b, range)):
        return None
    if operator in ("GreaterThan", "GreaterThanEqual"):
        a, b = b, a
    if operator in ("LessThan", "GreaterThan"):
        return known(True) if a[-1] < b[0] else known(False) if a[0] >= b[-1] else None
    if operator in ("LessThanEqual", "GreaterThanEqual"):
        return known(True) if a[-1] <= b[0] else known(False) if a[0] > b[-1] else None
    return None


def _equal(a: range | frozenset[Any], b: range | frozenset[Any]) -> bool | None:
    """Return whether two values are equal, None where they may be."""
    if len(a) == len(b) == 1:
        return bool(next(iter(a)) == next(iter(b)))
    if isinstance(a, range) and isinstance(b, range):
        return False if a[-1] < b[0] or b[-1] < a[0] else None
    return False if type(a) is type(b) and not set(a) & set(b) else None
