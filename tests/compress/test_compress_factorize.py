"""The factors against float64 brute force."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from nmm_compiler.errors import ModelError
from nmm_compiler.lowrank_models.apply import calibrate, compress
from nmm_compiler.lowrank_models.factorize import balance, factorize, spectrum
from nmm_compiler.lowrank_models.moments import Moment, Moments, SecondMoment, regularize

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


@settings(deadline=None)
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


def test_rank_deficient_and_zero_weights():
    generator = torch.Generator().manual_seed(3)
    for n, k in ((10, 16), (16, 10)):
        left, right = (torch.randn(s, generator=generator).double() for s in ((n, 2), (2, k)))
        factors = factorize(left @ right, 4)
        lost = (left @ right - factors.up @ factors.down).norm()
        assert lost <= EPS * (n + k) * (left @ right).norm()
    factors = factorize(torch.zeros(5, 7), 2, weighing(torch.eye(7, dtype=torch.float64)))
    up, down, _ = balance(factors)
    assert torch.equal(up @ down, torch.zeros(5, 7, dtype=torch.float64))


def test_balanced_factors_have_equal_norms_and_the_same_product():
    factors = factorize(torch.randn(12, 30, dtype=torch.float64), 6)
    up, down, _ = balance(factors)
    assert torch.allclose(up.norm(dim=0), down.norm(dim=1), rtol=EPS * 100, atol=0)
    product = factors.up @ factors.down
    assert (up @ down - product).norm() <= EPS * 100 * product.norm()


def test_a_bad_rank_is_named():
    with pytest.raises(ModelError, match=r"rank 9 for mlp\.up \[8, 16\]: pass 1 to 8"):
        factorize(torch.randn(8, 16), 9, name="mlp.up")
    with pytest.raises(ModelError):
        factorize(torch.randn(8, 16), 0)


# Moments of the short side alone give what the moments of both sides give.

# Elements, relative to the largest: sums of hundreds of products in two orders, and the
# eigenvalues of what they give.
CLOSE = 1e-12


def vectors(count, size, seed, decay=1.0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, -decay, size, dtype=torch.float64)
    return torch.randn(count, size, generator=generator, dtype=torch.float64) * scale


def collected(rows, through=None):
    made = SecondMoment(rows.shape[1], None if through is None else len(through))
    for piece in rows.split(37):
        made.add(piece, through)
    return made


@settings(deadline=None, max_examples=25)
@given(
    n=st.integers(2, 24), k=st.integers(2, 24), count=st.integers(1, 90),
    damping=st.sampled_from([1e-6, 0.1]), shrinkage=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_factors_are_those_of_the_moments_of_both_sides(n, k, count, damping, shrinkage, seed):
    """For any shrinkage that is given: M ((1-s) A + t I) M^T = (1-s) M A M^T + t M M^T."""
    weight = vectors(n, k, seed, 0.5)
    x, g = vectors(count, k, seed + 1), vectors(count, n, seed + 2)
    whole = Moments(*(regularize(collected(rows), damping, shrinkage) for rows in (x, g)))
    inputs = collected(x, weight if n < k else None)
    gradients = collected(g, weight.T if n > k else None)
    short = Moments(*(regularize(m, damping, shrinkage) for m in (inputs, gradients)))
    a, b = spectrum(weight, whole), spectrum(weight, short)
    assert (a - b).abs().max() <= CLOSE * a.max()
    rank = max(1, min(n, k) // 2)
    gap = a[rank - 1] - a[rank] if rank < len(a) else a[rank - 1]
    if gap > 1e-3 * a[0]:  # else the factors are not unique
        p, q = (factorize(weight, rank, m) for m in (whole, short))
        left, right = p.up @ p.down, q.up @ q.down
        # Eigenvectors turn by the error of the Gram matrix over the gap, and G^-1/2 lengthens them.
        assert (left - right).norm() <= 1e3 * CLOSE * a[0] / gap * left.norm()


def test_only_the_short_sides_are_kept():
    model = nn.Sequential(nn.Linear(96, 8), nn.Linear(8, 96), nn.Linear(96, 96))
    statistics = calibrate(model, [torch.randn(50, 96)])
    shapes = {
        name: [statistics.inputs[name].total.shape[0], statistics.gradients[name].total.shape[0]]
        for name in "012"
    }
    assert shapes == {"0": [8, 8], "1": [8, 8], "2": [96, 96]}
    assert statistics.inputs["0"].bytes() == 8 * (8 * 8 + 96 * (1 + 2 * 32))


@pytest.mark.parametrize("decay", [0.0, 1.0, 4.0])
def test_the_norm_of_the_long_moment_is_estimated(decay):
    """Steep: nearly all of it lies in the span of 16 probes. Flat: Hutchinson's error remains.

    Its variance over p = 16 probes is at most 2 |A^2|_F^2 / p.
    """
    rows = vectors(4000, 256, 3, decay)
    exact = collected(rows).squared_norm()
    fourths = torch.linalg.eigvalsh(collected(rows).total).pow(4).sum()
    estimate = collected(rows, torch.zeros(4, 256, dtype=torch.float64)).squared_norm()
    hutchinson = 4 * float(2 * fourths / 16) ** 0.5 / exact
    assert abs(estimate / exact - 1) <= (0.1 * hutchinson if decay == 4 else hutchinson)
    one = torch.zeros(300, 256, dtype=torch.float64)
    one[:, 7] = 1.0  # one massive activation: exact
    assert collected(one, rows[:4]).squared_norm() == pytest.approx(300.0**2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(24, 64), (64, 24), (32, 32)])
def test_the_reported_output_error_is_that_of_the_stored_factors(n, k, dtype):
    """On the short side too, where rounding of `down` is counted as independent per column."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(k, n, bias=False)).to(dtype)
    weight = model[0].weight.detach().double()
    x = vectors(500, k, 5).to(dtype)
    for rank in (2, 6):
        small = nn.Sequential(nn.Linear(k, n, bias=False)).to(dtype)
        small.load_state_dict({"0.weight": weight.to(dtype)})
        (layer,) = compress(small, rank=rank, method="whitened", calibration=[x]).layers
        product = small[0].up.weight.double() @ small[0].down.weight.double()
        wanted = x.double() @ weight.T
        error = float((x.double() @ product.detach().T - wanted).norm() / wanted.norm())
        assert layer.output_error == pytest.approx(
            error, rel=1e-5 if dtype == torch.float32 else 0.01
        )
