"""The known value of an expression: the set of the constants that it may be, or None.

Integers are kept as the least evenly spaced set that holds them, as a loop's variable has it. That
is enough to decide `min(128, k - 128 * i)` inside `for i in range(16)`, or that a row count is a
multiple of 128, without unrolling anything.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Value = frozenset[Any] | None
_MOST = 1 << 15
"""The most constants, or combinations of them, that are looked at; more count as unknown."""


def known(value: object) -> Value:
    """Return the Value of a Python constant."""
    return frozenset([value])


def constant(value: Value) -> tuple[bool, Any]:
    """Return (True, the constant) or (False, None)."""
    if value is None or len(value) != 1:
        return False, None
    return True, next(iter(value))


def truth(value: Value) -> bool | None:
    """Return the truth of a value, or None when it is not known."""
    return constant(computed(bool, value))[1]


def is_whole(value: Any) -> bool:
    """Return whether a constant is an integer, and no bool."""
    return type(value) is int


def _spaced(given: Iterable[Any]) -> Value:
    """Return the set of constants, of integers the evenly spaced one.

    None where integers and others are mixed: 1 == True, so that a set would hold one of them.
    """
    several = list(given)
    if len(several) < 2 or not any(map(is_whole, several)):
        return frozenset(several)
    if not all(map(is_whole, several)):
        return None
    first, last = min(several), max(several)
    spaced = range(first, last + 1, math.gcd(*(value - first for value in several)) or 1)
    return frozenset(spaced) if len(spaced) <= _MOST else None


def join(values: Sequence[Value]) -> Value:
    """Return the known value of an expression that has one of these values."""
    several = [value for value in values if value is not None]
    if not values or len(several) < len(values):
        return None
    return _spaced(itertools.chain(*several))


def computed(function: Callable[..., Any], *values: Value) -> Value:
    """Return the known value of a function's result for arguments of these values."""
    given = [value for value in values if value is not None]
    if len(given) < len(values) or math.prod(map(len, given)) > _MOST:
        return None
    return _spaced(itertools.starmap(function, itertools.product(*given)))


def are_whole(*values: Value) -> bool:
    """Return whether values are known and integers."""
    return None not in values and all(map(is_whole, itertools.chain(*filter(None, values))))


def of_whole(function: Callable[..., Any], *values: Value) -> Value:
    """Return the known value of a function of integers that grows or falls with each of them.

    The first and the last two of each argument give the bounds and the spacing of all results.
    """
    if not are_whole(*values):
        return None
    ends = (sorted(value) for value in values if value is not None)
    return computed(function, *(frozenset([*each[:2], *each[-2:]]) for each in ends))


def divided(function: Callable[[int, int], int], value: Value, divisor: Value) -> Value:
    """Return the known value of value // divisor, or of value % divisor, for a constant divisor.

    A remainder is the one that all values have, or the values themselves, or any.
    """
    fixed, size = constant(divisor)
    if not fixed or not are_whole(value, divisor) or size < 1:
        return None
    found = computed(function, value, divisor)
    several = found is not None and len(found) > 1 and found != value
    return frozenset(range(size)) if several and function is operator.mod else found


def loop_values(*bounds: Value) -> tuple[Value, int | None]:
    """Return (the values of the variable of a `range` of these, how many if that is known)."""
    ranges = of_whole(range, *bounds) if all(constant(step)[0] for step in bounds[2:]) else None
    if ranges is None or sum(map(len, ranges)) > _MOST:
        return None, None
    counts = set(map(len, ranges))
    taken = _spaced(itertools.chain(*ranges)) if counts != {0} else None
    return taken, counts.pop() if len(counts) == 1 else None
