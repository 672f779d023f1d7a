"""The factors against float64 brute force."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmm_compiler.errors import ModelError
from nmm_compiler.lowrank_models.factorize import balance, factorize, spectrum
from nmm_compiler.lowrank_models.moments import Moment, Moments

EPS = torch.finfo(torch.float64).eps


def moment(size, generator, condition=1e4):
    """A positive definite matrix of a known condition number."""
    q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    values = torch.logspace(0, -math.log10(condition), size, dtype=torch.float64)
    return (q * values) @ q.T


def weighing(a, g=None):
    return Moments(a if a is None else Moment(a), g if g is None else Moment(g))


def roots(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def brute_force(weight, rank, a, g):
    """Return (optimal squared error, squared norm) from the SVD of the weighted matrix itself."""
    m = weight
    m = m if g is None else roots(g) @ m
    m = m if a is None else m @ roots(a)
    squares = torch.linalg.svdvals(m).square()
    return float(squares[rank:].sum()), float(squares.sum())


def reached(weight, factors, a, g):
    left = weight - factors.up @ factors.down
    left = left if g is None else roots(g) @ left
    left = left if a is None else left @ roots(a)
    return float(left.square().sum())


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 24), k=st.integers(1, 24), share=st.floats(0, 1), seed=st.integers(0, 999),
    sides=st.sampled_from(["none", "inputs", "gradients", "both"]),
)  # fmt: skip
def test_error_is_what_theory_says(n, k, share, seed, sides):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator, dtype=torch.float64)
    rank = max(1, round(share * min(n, k)))
    a = moment(k, generator) if sides in ("inputs", "both") else None
    g = moment(n, generator) if sides in ("gradients", "both") else None
    factors = factorize(weight, rank, weighing(a, g))
    best, norm = brute_force(weight, rank, a, g)
    # Eigenvalues of M M^T are off by eps * dim of the largest; the inverse root of the moments
    # (condition 1e4, so 1e2 each) multiplies the rounding of the factors.
    tolerance = 10 * EPS * (n + k) * norm * (1e4 if sides == "both" else 1e2)
    # The residual is squared, so rounding enters through its root.
    assert math.sqrt(reached(weight, factors, a, g)) <= math.sqrt(best) + math.sqrt(tolerance)
    squares = spectrum(weight, weighing(a, g))
    assert float(squares[rank:].sum()) == pytest.approx(best, abs=tolerance)
    assert float(squares.sum()) == pytest.approx(norm, rel=10 * EPS * (n + k), abs=tolerance)


@pytest.mark.parametrize(("n", "k"), [(20, 12), (12, 20)])
def test_whitening_beats_plain_in_the_data_norm(n, k):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(n, k, generator=generator, dtype=torch.float64)
    a = moment(k, generator)
    plain = reached(weight, factorize(weight, 4), a, None)
    assert reached(weight, factorize(weight, 4, weighing(a)), a, None) < 0.5 * plain


@pytest.mark.parametrize(("n", "k"), [(10, 16), (16, 10)])
def test_singular_moments_and_rank_deficient_weights(n, k):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, k, generator=generator, dtype=torch.float64)
    a = x.T @ x  # rank 3: a Cholesky factorization of it fails
    weight = torch.randn(n, k, generator=generator, dtype=torch.float64)
    factors = factorize(weight, 3, weighing(a))
    assert torch.isfinite(factors.up).all()
    assert torch.isfinite(factors.down).all()
    # Three directions of data need no more than rank 3: outputs on the data are exact.
    exact = x @ weight.T
    bound = EPS * k * exact.norm() * 1e3
    assert (x @ (factors.up @ factors.down).T - exact).norm() <= bound

    deficient = weight[:, :2] @ torch.randn(2, k, generator=generator, dtype=torch.float64)
    factors = factorize(deficient, 4)
    left = (deficient - factors.up @ factors.down).norm()
    assert left <= EPS * (n + k) * deficient.norm()


def test_zero_weight_and_zero_moment():
    factors = factorize(torch.zeros(5, 7), 2, weighing(torch.eye(7, dtype=torch.float64)))
    up, down = balance(factors)
    assert torch.equal(up @ down, torch.zeros(5, 7, dtype=torch.float64))
    nothing = torch.zeros(5, 5, dtype=torch.float64)  # gradients that are all zero, unregularized
    factors = factorize(torch.randn(5, 7), 2, weighing(None, nothing))
    assert torch.equal(factors.up @ factors.down, torch.zeros(5, 7, dtype=torch.float64))


def test_a_moment_is_a_multiple_plus_identity_without_a_copy():
    generator = torch.Generator().manual_seed(0)
    total = moment(6, generator)
    lazy = Moment(total, 0.3, 0.7)
    rows = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    dense = 0.3 * total + 0.7 * torch.eye(6, dtype=torch.float64)
    assert lazy.total is total
    assert torch.allclose(lazy.dense(), dense, rtol=4 * EPS, atol=0)
    assert (lazy.times(rows) - rows @ dense).norm() <= 20 * EPS * rows.norm() * dense.norm()


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (1, 1)])
def test_one_row_matrices_are_exact_at_rank_one(shape):
    weight = torch.randn(shape, dtype=torch.float64)
    factors = factorize(weight, 1)
    assert (factors.up @ factors.down - weight).norm() <= EPS * sum(shape) * weight.norm()


def test_balanced_factors_have_equal_norms_and_the_same_product():
    factors = factorize(torch.randn(12, 30, dtype=torch.float64), 6)
    up, down = balance(factors)
    assert torch.allclose(up.norm(dim=0), down.norm(dim=1), rtol=EPS * 100, atol=0)
    product = factors.up @ factors.down
    assert (up @ down - product).norm() <= EPS * 100 * product.norm()


def test_bad_rank_and_bad_weight_are_named():
    with pytest.raises(ModelError, match=r"rank 9 for mlp\.up \[8, 16\]: pass 1 to 8"):
        factorize(torch.randn(8, 16), 9, name="mlp.up")
    with pytest.raises(ModelError):
        factorize(torch.randn(8, 16), 0)
    weight = torch.randn(8, 16)
    weight[3, 5] = math.nan
    with pytest.raises(ModelError, match=r"mlp\.up.*NaN"):
        factorize(weight, 2, name="mlp.up")
