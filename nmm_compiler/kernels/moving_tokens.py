"""Tokens that fill no tile of 128: how many of them move past stationary weights, at what cost.

A pass with a tile of tokens stationary takes 128 columns of each weight tile, however few tokens
the tile has. The tokens beyond whole tiles, alone or with one whole tile, may move instead: a pass
takes a column for each. y^T comes out, and TensorE turns it in squares of 128 x 128; of one token
beyond a tile, many tiles of outputs share a square. `pieces/moving_tokens.py` computes it.
"""

from __future__ import annotations

from collections.abc import Iterable

from nmm_compiler.kernels.tiling import tiles
from nmm_compiler.kernels.work import Tally
from nmm_compiler.targets import Target

# A square also leaves PSUM, and the last one delays the last store.
_SQUARE = 1.5
_SUMS = 4  # tiles of outputs in turns: a sum takes a pass when the one before is through
_GAIN = 1.05  # what moving has to gain, as its sums take more steps to leave

Sizes = Iterable[tuple[int, int]]
"""(contraction, outputs) of the products whose results come out by rows."""


def ways(m: int) -> tuple[int, ...]:
    """Return how many tokens may move: none, those beyond whole tiles, and 128 more."""
    left = m % 128
    return (0, left, 128 + left) if left and m > 128 else (0,)


def squares(moving: int, n: int) -> int:
    """Return the transposes of y^T of so many tokens."""
    if moving % 128 == 1:
        return tiles(n, 128) * (moving // 128) + tiles(n, 128 * 128)
    return tiles(n, 128) * tiles(moving, 128)


def best(m: int, sizes: Sizes, target: Target) -> int:
    """Return the number of moving tokens with the least cycles of TensorE."""
    sizes = tuple(sizes)
    if not sizes:
        return 0
    return min(ways(m), key=lambda moving: _cycles(m, moving, sizes, target))


def _cycles(m: int, moving: int, sizes: Sizes, target: Target) -> float:
    over = target.tensor_interval_overhead_cycles
    total = 0.0
    for k, n in sizes:
        depth, wide = tiles(k, 128), tiles(n, 128)
        total += depth * wide * tiles(m - moving, 128) * (128 + over / 4)
        if moving:
            each = max(moving, target.tensor_min_interval_cycles) + over
            turn = target.tensor_latency_seconds * target.tensor_clock_hz / _SUMS
            total += depth * wide * max(each, turn)
            total += _SQUARE * squares(moving, n) * (128 + over)
    return total * _GAIN if moving else total


def tally_moving(tally: Tally, moving: int, depth: int, n: int) -> None:
    """Add the passes of moving tokens, `depth` for each tile of n outputs, and their transposes."""
    if moving:
        turned = squares(moving, n)
        tally.matmuls += [(depth * tiles(n, 128), moving), (turned, 128)]
        tally.evictions += [(tiles(n, 128), moving), (tiles(turned, 4), 512)]


def moving_bytes(moving: int, panel: int, size: int) -> dict[str, int]:
    """Return bytes per partition of a panel of y^T, and of y after it is turned."""
    return {"moving": (tiles(panel, 128) * moving + panel + 128) * size} if moving else {}


def described(moving: int) -> tuple[str, ...]:
    """Return the line about moving tokens in the header of an emitted file."""
    line = f"the first {moving} tokens of the last block move past stationary weights instead"
    return (f"results: {line}; TensorE turns these.",) if moving else ()
