"""The token counts that kernels are built for, and the launches for a call of m tokens.

A kernel has a fixed shape. Static graphs get one for their exact token count; calls with a symbolic
count go to buckets: a call takes the next larger bucket with its rows padded, or is cut into
several launches, whichever is predicted to be faster. Padding is safe because tokens are
independent rows of every product here: the padded rows' results are dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from nmm_compiler.errors import ShapeError
from nmm_compiler.options import LADDER


def bucket(tokens: int, ladder: tuple[int, ...] | None = None) -> int:
    """Return the smallest bucket that holds `tokens`.

    A ladder goes on with the multiples of its last step; the default one is 1, 2, 4 ... 4096.
    Raises ShapeError for less than one token.
    """
    if tokens < 1:
        raise ShapeError(f"a kernel needs at least 1 token, got {tokens}")
    steps = ladder or LADDER
    beyond = -(-tokens // steps[-1]) * steps[-1]
    return min((step for step in steps if step >= tokens), default=beyond)


def plan(
    tokens: int,
    ladder: tuple[int, ...] | None = None,
    cost_us: Callable[[int], float] | None = None,
) -> tuple[int, ...]:
    """Return the buckets to launch, in token order: their sum is at least `tokens`.

    cost_us gives the predicted time of one launch with that many tokens, in microseconds; without
    it the answer is one padded launch. Only the last launch is ever padded. The choice is between
    one padded launch, and the largest full bucket followed by a padded rest.
    """
    whole, steps = bucket(tokens, ladder), ladder or LADDER
    full = max((step for step in steps if step <= tokens), default=0)
    if full == steps[-1]:
        full = tokens // full * full
    if cost_us is None or whole == tokens or not full:
        return (whole,)
    rest = bucket(tokens - full, ladder)
    if rest >= whole or cost_us(full) + cost_us(rest) >= cost_us(whole):
        return (whole,)
    return (full, rest)
