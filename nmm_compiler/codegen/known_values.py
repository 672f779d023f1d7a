"""The known value of an expression: a constant, a span of integers, or unknown.

A Span holds every integer lo, lo + step, ..., hi. That is enough to decide `min(128, k - 128 * i)`
inside `for i in range(16)`, or that a row count is a multiple of 128, without unrolling anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Span:
    """Integers lo, lo + step, ... up to hi; step 0 when lo == hi."""

    lo: int
    hi: int
    step: int = 1

    @property
    def exact(self) -> bool:
        """Whether this is one integer."""
        return self.lo == self.hi


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A constant that is no integer: text, bool, float, None, a tuple of constants."""

    value: Any


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of several constants that are no integers: text that differs between calls."""

    values: frozenset[Any]


Value = Span | Fixed | OneOf | None


def known(value: object) -> Value:
    """Return the Value of a Python constant."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Span(value, value, 0)
    return Fixed(value)


def constant(value: Value) -> tuple[bool, Any]:
    """Return (True, the constant) or (False, None)."""
    if isinstance(value, Fixed):
        return True, value.value
    if isinstance(value, Span) and value.exact:
        return True, value.lo
    return False, None


def truth(value: Value) -> bool | None:
    """Return the truth of a value, or None when it is not known."""
    if isinstance(value, Span) and (value.lo > 0 or value.hi < 0):
        return True
    fixed, plain = constant(value)
    return bool(plain) if fixed else None


def join(values: Sequence[Value]) -> Value:
    """Return the known value of an expression that has one of these values."""
    if not values:
        return None
    first = values[0]
    if all(value == first for value in values):
        return first
    if all(isinstance(value, (Fixed, OneOf)) for value in values):
        return one_of([item for value in values for item in _items(value)])
    if not all(isinstance(value, Span) for value in values):
        return None
    spans = [value for value in values if isinstance(value, Span)]
    lo, hi = min(s.lo for s in spans), max(s.hi for s in spans)
    step = math.gcd(*(s.step for s in spans), *(s.lo - lo for s in spans))
    return Span(lo, hi, step)


def _items(value: Value) -> Sequence[Any]:
    return [value.value] if isinstance(value, Fixed) else list(getattr(value, "values", ()))


def one_of(items: Sequence[Any]) -> Value:
    """Return the known value of an expression that is one of these constants."""
    distinct = frozenset(items)
    return Fixed(next(iter(distinct))) if len(distinct) == 1 else OneOf(distinct)


def without(value: Value, item: Any) -> Value:
    """Return the known value if `value` is not `item`."""
    if isinstance(value, OneOf) and item in value.values and len(value.values) > 1:
        return one_of([other for other in value.values if other != item])
    return value


def length(value: Value) -> Value:
    """Return len of a constant tuple."""
    fixed, plain = constant(value)
    return known(len(plain)) if fixed and isinstance(plain, tuple) else None


def item(value: Value, index: Value) -> Value:
    """Return the known value of an element of a constant tuple."""
    fixed, plain = constant(value)
    if not (fixed and isinstance(plain, tuple) and isinstance(index, Span)):
        return None
    if index.lo < 0 or index.hi >= len(plain):
        return None
    return join([known(plain[i]) for i in range(index.lo, index.hi + 1, index.step or 1)])


def loop_values(start: Value, stop: Value, step: Value) -> tuple[Value, int | None]:
    """Return (the values of a `range` variable, the number of iterations if it is known)."""
    if not (isinstance(start, Span) and isinstance(stop, Span) and isinstance(step, Span)):
        return None, None
    if not step.exact or step.lo <= 0:
        return None, None
    if start.exact and stop.exact:
        values = range(start.lo, stop.lo, step.lo)
        if not values:
            return None, 0
        return Span(values[0], values[-1], step.lo if len(values) > 1 else 0), len(values)
    if start.exact:
        last = range(start.lo, max(stop.hi, start.lo + 1), step.lo)[-1]
        once = 1 if start.lo < stop.lo and stop.hi <= start.lo + step.lo else None
        return Span(start.lo, last, step.lo if last > start.lo else 0), once
    if stop.hi <= start.lo:
        return None, 0
    once = 1 if stop.lo > start.hi and stop.hi <= start.lo + step.lo else None
    return Span(start.lo, max(stop.hi - 1, start.lo), math.gcd(start.step, step.lo)), once


def _add(a: Span, b: Span) -> Value:
    return Span(a.lo + b.lo, a.hi + b.hi, math.gcd(a.step, b.step))


def _subtract(a: Span, b: Span) -> Value:
    return Span(a.lo - b.hi, a.hi - b.lo, math.gcd(a.step, b.step))


def _multiply(a: Span, b: Span) -> Value:
    if a.exact:
        a, b = b, a
    corners = [x * y for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    step = abs(b.lo) * a.step if b.exact else 1
    lo, hi = min(corners), max(corners)
    return Span(lo, hi, step if lo < hi else 0)


def _floor_divide(a: Span, b: Span) -> Value:
    if not b.exact or b.lo <= 0:
        return None
    lo, hi = a.lo // b.lo, a.hi // b.lo
    whole = a.lo % b.lo == 0 and a.step % b.lo == 0
    return Span(lo, hi, 0 if lo == hi else a.step // b.lo if whole else 1)


def _modulo(a: Span, b: Span) -> Value:
    if not b.exact or b.lo <= 0:
        return None
    if a.step % b.lo == 0:
        return known(a.lo % b.lo)
    if a.lo >= 0 and a.hi < b.lo:
        return a
    return Span(0, b.lo - 1, 1)


ARITHMETIC: dict[str, Callable[[Span, Span], Value]] = {
    "Add": _add,
    "Subtract": _subtract,
    "Multiply": _multiply,
    "FloorDivide": _floor_divide,
    "Modulo": _modulo,
}


def smallest(values: Sequence[Value]) -> Value:
    """Return the known value of min(values)."""
    if not all(isinstance(value, Span) for value in values):
        return None
    spans = [value for value in values if isinstance(value, Span)]
    bound = min(s.hi for s in spans)
    joined = join([s for s in spans if s.lo <= bound])
    if isinstance(joined, Span) and joined.hi > bound:
        return Span(joined.lo, bound, joined.step if joined.lo < bound else 0)
    return joined


def largest(values: Sequence[Value]) -> Value:
    """Return the known value of max(values)."""
    negated = [Span(-v.hi, -v.lo, v.step) if isinstance(v, Span) else None for v in values]
    result = smallest(negated)
    return Span(-result.hi, -result.lo, result.step) if isinstance(result, Span) else None


def compare(operator: str, a: Value, b: Value) -> Value:
    """Return the known outcome of a comparison, as Fixed(bool), or None."""
    fixed_a, plain_a = constant(a)
    fixed_b, plain_b = constant(b)
    if operator in ("Equal", "NotEqual"):
        equal: bool | None = None
        if fixed_a and fixed_b:
            equal = bool(plain_a == plain_b)
        elif _differ(a, b):
            equal = False
        if equal is None:
            return None
        return Fixed(equal if operator == "Equal" else not equal)
    if not (isinstance(a, Span) and isinstance(b, Span)):
        return None
    if operator in ("GreaterThan", "GreaterThanEqual"):
        a, b = b, a
    if operator in ("LessThan", "GreaterThan"):
        return Fixed(True) if a.hi < b.lo else Fixed(False) if a.lo >= b.hi else None
    if operator in ("LessThanEqual", "GreaterThanEqual"):
        return Fixed(True) if a.hi <= b.lo else Fixed(False) if a.lo > b.hi else None
    return None


def _differ(a: Value, b: Value) -> bool:
    """Return whether two values, not both constant, can never be equal."""
    if isinstance(a, Span) and isinstance(b, Span):
        return a.hi < b.lo or b.hi < a.lo
    if isinstance(b, OneOf):
        a, b = b, a
    return isinstance(a, OneOf) and isinstance(b, Fixed) and b.value not in a.values
