"""The token counts that kernels are built for, and the launches for a call of m tokens.

A kernel has a fixed shape. Static graphs get one for their exact token count; calls with a symbolic
count go to buckets: a call takes the next larger bucket with its rows padded, or is cut into
several launches, whichever is predicted to be faster. Padding is safe because tokens are
independent rows of every product here: the padded rows' results are dropped.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from nmm_compiler.errors import ShapeError
from nmm_compiler.options import LARGEST_BUCKET


def bucket(tokens: int, ladder: tuple[int, ...] | None = None) -> int:
    """Return the smallest bucket that holds `tokens`.

    The default ladder is 1, 2, 4 ... 4096 and then every multiple of 4096; a given ladder goes on
    with the multiples of its last step. Raises ShapeError for less than one token.
    """
    if tokens < 1:
        raise ShapeError(f"a kernel needs at least 1 token, got {tokens}")
    last = ladder[-1] if ladder else LARGEST_BUCKET
    if tokens > last:
        return -(-tokens // last) * last
    if ladder:
        return ladder[bisect.bisect_left(ladder, tokens)]
    return 1 << (tokens - 1).bit_length()


def _bucket_below(tokens: int, ladder: tuple[int, ...] | None) -> int | None:
    """Return the largest bucket that `tokens` fill, or None if they fill none."""
    last = ladder[-1] if ladder else LARGEST_BUCKET
    if tokens >= last:
        return tokens // last * last
    if ladder:
        index = bisect.bisect_right(ladder, tokens)
        return ladder[index - 1] if index else None
    return 1 << (tokens.bit_length() - 1)


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
    whole = bucket(tokens, ladder)
    if cost_us is None or whole == tokens:
        return (whole,)
    below = _bucket_below(tokens, ladder)
    if below is None:
        return (whole,)
    rest = bucket(tokens - below, ladder)
    if rest >= whole or cost_us(below) + cost_us(rest) >= cost_us(whole):
        return (whole,)
    return (below, rest)
