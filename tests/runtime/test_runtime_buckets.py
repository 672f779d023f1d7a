"""Which buckets serve a token count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmm_compiler.errors import ShapeError
from nmm_compiler.runtime.kernels import bucket, planned_buckets

LADDERS = st.none() | st.lists(st.integers(1, 5000), min_size=1, max_size=8, unique=True).map(
    lambda steps: tuple(sorted(steps))
)


@given(st.integers(1, 20000), LADDERS)
def test_a_bucket_is_the_smallest_that_holds_the_tokens(tokens, ladder):
    steps = list(ladder) if ladder else [2**i for i in range(13)]
    steps += [steps[-1] * i for i in range(2, 20000 // steps[-1] + 3)]
    assert bucket(tokens, ladder) == min(s for s in steps if s >= tokens)


@given(st.integers(1, 20000), LADDERS, st.floats(0.1, 50), st.floats(0.001, 1))
def test_a_plan_covers_the_tokens_pads_only_at_its_end_and_is_never_dearer(
    tokens, ladder, fixed, each
):
    def cost_us(m):
        return fixed + each * m

    chosen = planned_buckets(tokens, ladder, cost_us)
    assert sum(chosen) >= tokens > sum(chosen[:-1])
    assert sum(map(cost_us, chosen)) <= cost_us(bucket(tokens, ladder))


def test_a_plan_splits_when_padding_costs_more_than_a_launch():
    assert planned_buckets(4097, None, lambda m: 10 + m) == (4096, 1)
    assert planned_buckets(4097, None, lambda m: 10000 + m) == (8192,)
    assert planned_buckets(64, None, lambda m: -m) == (64,)


def test_no_tokens_is_an_error():
    with pytest.raises(ShapeError, match="at least 1 token"):
        bucket(0)
