"""Rank allocation: legal, within budget, near exhaustive search, and as worked out by hand."""

import itertools
import random

import pytest
from hypothesis import given, settings, strategies as st

from nmm_compiler.errors import ModelError
from nmm_compiler.lowrank_models.ranks import (
    Shape,
    allocate_global,
    allocate_uniform,
    choose_align,
    legal_ranks,
)

LLAMA = [
    Shape(f"{i}.{name}", k, n)
    for i in range(16)
    for name, k, n in (
        ("q", 2048, 2048), ("k", 2048, 512), ("v", 2048, 512), ("o", 2048, 2048),
        ("gate", 2048, 8192), ("up", 2048, 8192), ("down", 8192, 2048),
    )
]  # fmt: skip


def kept(shapes, ranks):
    return sum(s.cost(ranks[s.name]) for s in shapes)


def dense(shapes):
    return sum(s.k * s.n for s in shapes)


sizes = st.tuples(st.integers(20, 400), st.integers(20, 400))


@settings(deadline=None)
@given(
    dims=st.lists(sizes, min_size=1, max_size=6), ratio=st.floats(0.01, 0.95),
    align=st.sampled_from([1, 4, 16]),
)  # fmt: skip
def test_uniform_ranks_are_legal_and_meet_the_ratio(dims, ratio, align):
    shapes = [Shape(str(i), k, n) for i, (k, n) in enumerate(dims)]
    try:
        ranks = allocate_uniform(shapes, ratio, align)
    except ModelError:
        usable = [s for s in shapes if len(legal_ranks(s, align))]
        least = sum(align * (s.k + s.n) for s in usable)
        assert not usable or least > (1 - ratio) * dense(usable)
        return
    usable = [s for s in shapes if ranks[s.name] is not None]
    for shape in usable:
        assert ranks[shape.name] % align == 0
        assert ranks[shape.name] * (shape.k + shape.n) < shape.k * shape.n
    assert kept(usable, ranks) <= (1 - ratio) * dense(usable)
    by_shape = {}
    for shape in usable:
        assert by_shape.setdefault((shape.k, shape.n), ranks[shape.name]) == ranks[shape.name]


ENCODER = [Shape("a", 384, 384), Shape("b", 384, 1536), Shape("c", 1536, 384)]
SQUARE = [Shape("a", 256, 256)]


@pytest.mark.parametrize(
    ("shapes", "ratio", "align"), [(LLAMA, 0.2, 128), (ENCODER, 0.2, 32), (SQUARE, 0.99, 32)]
)
def test_a_tile_is_the_largest_that_matrices_have(shapes, ratio, align):
    assert choose_align(shapes, ratio) == align


def test_uniform_ranks_of_llama_are_whole_tiles_near_the_ratio():
    ranks = allocate_uniform(LLAMA, 0.2, 128)
    removed = 1 - kept(LLAMA, ranks) / dense(LLAMA)
    assert 0.2 <= removed <= 0.24
    assert ranks["0.gate"] == ranks["15.up"] == ranks["3.down"] == 1280


def brute_force(shapes, losses, ratio, align):
    tables = []
    for s in shapes:
        ranks = [*legal_ranks(s, align), None]
        tables.append([
            (s.cost(r), 0.0 if r is None else losses[s.name][r]) for r in ranks
        ])  # fmt: skip
    budget = (1 - ratio) * sum(s.cost(None) for s in shapes)
    fitting = [
        sum(loss for _, loss in choice)
        for choice in itertools.product(*tables)
        if sum(c for c, _ in choice) <= budget
    ]
    return min(fitting, default=None)


def tails(seed, size):
    """Losses of a random decreasing spectrum: convex, as squared singular values give."""
    values = sorted((random.Random(seed).random() ** 4 for _ in range(size)), reverse=True)
    return [sum(values[i:]) for i in range(size + 1)]


@settings(deadline=None)
@given(
    dims=st.lists(st.tuples(st.integers(8, 24), st.integers(8, 24)), min_size=2, max_size=3),
    ratio=st.floats(0.05, 0.7), seed=st.integers(0, 99),
)  # fmt: skip
def test_global_ranks_are_near_the_optimum_and_never_over_budget(dims, ratio, seed):
    shapes = [Shape(str(i), k, n) for i, (k, n) in enumerate(dims)]
    losses = {s.name: tails(seed + i, min(s.k, s.n)) for i, s in enumerate(shapes)}
    align = 2
    best = brute_force(shapes, losses, ratio, align)
    if best is None:
        with pytest.raises(ModelError):
            allocate_global(shapes, losses, ratio, align)
        return
    ranks = allocate_global(shapes, losses, ratio, align)
    assert kept(shapes, ranks) <= (1 - ratio) * dense(shapes)
    got = sum(0.0 if ranks[s.name] is None else losses[s.name][ranks[s.name]] for s in shapes)
    # The greedy stops short of the optimum by at most one step of the hull of one matrix.
    step = max(table[0] for table in losses.values())
    assert best - 1e-12 <= got <= best + step


@pytest.mark.parametrize(
    ("shapes", "ratio", "align", "words"),
    [
        ([Shape("mlp", 48, 48)], 0.2, 32, r"align=32 .*mlp \[48, 48\].*ranks up to 23"),
        (LLAMA, 0.99, 128, r"ratio 0.99 cannot be met .*align=128.*removes 0.\d+"),
        (SQUARE, 0.99, 32, r"the smallest in every matrix removes 0\.750"),
        ([Shape("row", 1, 9)], 0.2, 1, "ranks up to 0"),
    ],
)
def test_what_no_aligned_rank_can_meet_is_refused_with_a_way_out(shapes, ratio, align, words):
    with pytest.raises(ModelError, match=words):
        allocate_uniform(shapes, ratio, align)
    with pytest.raises(ModelError):
        allocate_global(shapes, {s.name: [1.0] * (s.k + 1) for s in shapes}, ratio, align)


def test_a_stack_counts_as_many_matrices():
    losses = {name: [float(32 - i) for i in range(33)] for name in ("one", "four")}
    shapes = [Shape("one", 64, 64), Shape("four", 64, 64, count=4)]
    ranks = allocate_global(shapes, losses, 0.5, align=1)
    kept = (ranks["one"] or 32) + 4 * (ranks["four"] or 32)
    assert kept <= 0.5 * 5 * 32
    assert (ranks["one"] or 32) > ranks["four"]  # the same gain at a quarter of the price


@pytest.mark.parametrize(("k", "n"), [(64, 64), (66, 66), (1, 9), (3, 100), (128, 32), (2, 2)])
@pytest.mark.parametrize("align", [1, 2, 16, 32])
def test_legal_ranks_are_all_multiples_below_break_even(k, n, align):
    legal = [r for r in range(1, k * n) if r % align == 0 and r * (k + n) < k * n]
    assert list(legal_ranks(Shape("a", k, n), align)) == legal


# Matrices small enough to work out by hand, where every tile counts.
# At align 16 the small ones have no legal rank, and stay dense; one tile of the large one is half
# of its 4,096 elements.
LARGE, SMALL = Shape("large", 64, 64), [Shape("s0", 30, 30), Shape("s1", 30, 30)]
FLAT = {name: [1.0 - r / 64 for r in range(65)] for name in ("large", "s0", "s1")}


def globally(shapes, ratio, align):
    return allocate_global(shapes, FLAT, ratio, align)


@pytest.mark.parametrize("allocate", [allocate_uniform, globally])
def test_matrices_that_stay_dense_give_nothing_away_and_half_an_element_over_is_over(allocate):
    for shapes, ratio in (([LARGE, *SMALL], 0.6), ([LARGE], 1 - 2047.5 / 4096)):
        with pytest.raises(ModelError, match="cannot be met"):
            allocate(shapes, ratio, 16)
    assert allocate([LARGE], 0.5, 16) == {"large": 16}
    assert allocate([LARGE, *SMALL], 0.5, 16) == {"large": 16, "s0": None, "s1": None}


def test_the_matrix_that_keeps_the_largest_share_is_shrunk_first():
    """The first tile of 40 x 40 is above its half, so another has to give one up."""
    shapes = [Shape("over", 40, 40), Shape("half", 128, 128), Shape("less", 130, 130)]
    assert allocate_uniform(shapes, 0.5, 16) == {"over": 16, "half": 16, "less": 32}


def test_what_is_left_of_the_budget_is_given_to_the_last_element():
    """Both halves are 24, one and a half tiles: what the two lack is one tile of either."""
    shapes = [Shape("wide", 144, 72), Shape("tall", 72, 144)]
    assert sorted(allocate_uniform(shapes, 0.5, 16).values()) == [16, 32]


def global_ranks(losses, units, sizes=None):
    """Return the ranks of square matrices that share `units` rows and columns of the smallest."""
    sizes = sizes or dict.fromkeys(losses, 40)
    shapes = [Shape(name, size, size) for name, size in sizes.items()]
    dense = sum(s.k * s.n for s in shapes)
    budget = (units + 0.5) * 2 * min(sizes.values())  # not on the edge of a rounding
    full = {
        name: [*tail, *[tail[-1]] * (sizes[name] + 1 - len(tail))] for name, tail in losses.items()
    }
    return allocate_global(shapes, full, 1 - budget / dense, 1)


@pytest.mark.parametrize(
    ("losses", "units", "sizes", "wanted"),
    [
        # steps by the loss that they save per element: a rank of large costs 4 units
        (
            {"small": [37, 27, 17, 8, 0], "large": [48, 34, 22, 11, 0.2, 0]},
            10,
            {"small": 32, "large": 128},
            {"small": 4, "large": 1},
        ),
        # a flat tail takes nothing from another matrix
        (
            {"flat": [200, 100, 1, 0.9, 0.8, 0.7, 0], "steep": [20 * 0.5**i for i in range(20)]},
            9,
            None,
            {"flat": 2, "steep": 7},
        ),
        # losses on a line: all but the dense matrix lie above the hull
        ({"line": [10 - 0.1 * rank for rank in range(20)]}, 8, None, {"line": 8}),
        # a rank that saves no loss is not bought
        ({"a": [8, 4, 2, 1, 0], "b": [8, 4, 2, 1, 0]}, 30, None, {"a": 4, "b": 4}),
    ],
)
def test_the_budget_goes_where_it_saves_most(losses, units, sizes, wanted):
    assert global_ranks(losses, units, sizes) == wanted
