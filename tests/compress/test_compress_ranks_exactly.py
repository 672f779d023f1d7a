"""Ranks where every tile counts: exact answers on matrices small enough to work out by hand."""

import pytest

from nmm_compiler.errors import ModelError
from nmm_compiler.lowrank_models.ranks import (
    Shape,
    allocate_global,
    allocate_uniform,
    legal_ranks,
)


@pytest.mark.parametrize(("k", "n"), [(64, 64), (66, 66), (1, 9), (3, 100), (128, 32), (2, 2)])
@pytest.mark.parametrize("align", [1, 2, 16, 32])
def test_legal_ranks_are_all_multiples_below_break_even(k, n, align):
    legal = [r for r in range(1, k * n) if r % align == 0 and r * (k + n) < k * n]
    assert list(legal_ranks(Shape("a", k, n), align)) == legal


# At align 16 the small ones have no legal rank, and stay dense; one tile of the large one is half
# of its 4,096 elements.
LARGE, SMALL = Shape("large", 64, 64), [Shape("s0", 30, 30), Shape("s1", 30, 30)]
FLAT = {name: [1.0 - r / 64 for r in range(65)] for name in ("large", "s0", "s1")}


def test_matrices_that_stay_dense_give_nothing_of_their_share_away():
    with pytest.raises(ModelError, match="cannot be met"):
        allocate_uniform([LARGE, *SMALL], 0.6, 16)
    with pytest.raises(ModelError, match="cannot be met"):
        allocate_global([LARGE, *SMALL], FLAT, 0.6, 16)
    assert allocate_uniform([LARGE, *SMALL], 0.5, 16) == {"large": 16, "s0": None, "s1": None}


def test_half_an_element_over_the_budget_is_over_it():
    ratio = 1 - 2047.5 / 4096
    for allocate in (allocate_uniform, lambda *a: allocate_global(a[0], FLAT, *a[1:])):
        with pytest.raises(ModelError, match="cannot be met"):
            allocate([LARGE], ratio, 16)
        assert allocate([LARGE], 0.5, 16) == {"large": 16}


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


def test_steps_are_taken_by_the_loss_they_save_per_element():
    losses = {"small": [37, 27, 17, 8, 0], "large": [48, 34, 22, 11, 0.2, 0]}
    ranks = global_ranks(losses, 10, {"small": 32, "large": 128})  # a rank of large costs 4 units
    assert ranks == {"small": 4, "large": 1}


def test_a_flat_tail_takes_nothing_from_another_matrix():
    first = [200, 100, 1, 0.9, 0.8, 0.7, 0]
    second = [20 * 0.5**i for i in range(20)]
    assert global_ranks({"first": first, "second": second}, 9) == {"first": 2, "second": 7}


def test_budget_that_no_step_of_a_hull_fits_is_spent_rank_by_rank():
    """With losses on a line all but the dense matrix lie above the hull."""
    line = [10 - 0.1 * rank for rank in range(20)]
    assert global_ranks({"a": line}, 8) == {"a": 8}


def test_a_rank_that_saves_no_loss_is_not_bought():
    losses = {"a": [8, 4, 2, 1, 0], "b": [8, 4, 2, 1, 0]}
    assert global_ranks(losses, 30) == {"a": 4, "b": 4}
