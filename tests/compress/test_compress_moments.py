"""Moments of the short side alone give what the moments of both sides give."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nmm_compiler.lowrank_models.apply import calibrate, compress
from nmm_compiler.lowrank_models.factorize import factorize, spectrum
from nmm_compiler.lowrank_models.moments import Moments, SecondMoment, regularize

# Elements, relative to the largest: sums of hundreds of products in two orders, and the
# eigenvalues of what they give.
CLOSE = 1e-12


def vectors(count, size, seed, decay=1.0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, -decay, size, dtype=torch.float64)
    return torch.randn(count, size, generator=generator, dtype=torch.float64) * scale


def moment(rows, through=None):
    made = SecondMoment(rows.shape[1], through)
    for piece in rows.split(37):
        made.add(piece)
    return made


@settings(deadline=None, max_examples=25)
@given(
    n=st.integers(2, 24), k=st.integers(2, 24), count=st.integers(1, 90),
    damping=st.sampled_from([0.0, 1e-6, 0.1]), shrinkage=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_factors_are_those_of_the_moments_of_both_sides(n, k, count, damping, shrinkage, seed):
    """For any shrinkage that is given: M ((1-s) A + t I) M^T = (1-s) M A M^T + t M M^T."""
    weight = vectors(n, k, seed, 0.5)
    x, g = vectors(count, k, seed + 1), vectors(count, n, seed + 2)
    whole = Moments(*(regularize(moment(rows), damping, shrinkage) for rows in (x, g)))
    inputs = moment(x, weight if n < k else None)
    gradients = moment(g, weight.T if n > k else None)
    short = Moments(*(regularize(m, damping, shrinkage) for m in (inputs, gradients)))
    a, b = spectrum(weight, whole), spectrum(weight, short)
    assert (a - b).abs().max() <= CLOSE * a.max()
    rank = max(1, min(n, k) // 2)
    gap = a[rank - 1] - a[rank] if rank < len(a) else a[rank - 1]
    if gap > 1e-3 * a[0] and shrinkage + damping > 0:  # else the factors are not unique
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
    # What the sums went through is let go of, or dense weights would outlive their layers.
    assert all(
        m.through is None for m in (*statistics.inputs.values(), *statistics.gradients.values())
    )


@pytest.mark.parametrize("decay", [0.0, 1.0, 4.0])
def test_the_norm_of_the_long_moment_is_estimated(decay):
    """Steep: nearly all of it lies in the span of 16 probes. Flat: Hutchinson's error remains.

    Its variance over p = 16 probes is at most 2 |A^2|_F^2 / p.
    """
    rows = vectors(4000, 256, 3, decay)
    exact = moment(rows).squared_norm()
    fourths = torch.linalg.eigvalsh(moment(rows).total).pow(4).sum()
    estimate = moment(rows, torch.zeros(4, 256, dtype=torch.float64)).squared_norm()
    hutchinson = 4 * float(2 * fourths / 16) ** 0.5 / exact
    assert abs(estimate / exact - 1) <= (0.1 * hutchinson if decay == 4 else hutchinson)
    one = torch.zeros(300, 256, dtype=torch.float64)
    one[:, 7] = 1.0  # one massive activation: exact
    assert moment(one, rows[:4]).squared_norm() == pytest.approx(300.0**2)


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
