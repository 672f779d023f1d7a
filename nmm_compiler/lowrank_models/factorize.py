"""Factorizes one matrix: the best rank-r approximation in the norm of the data.

In: W [n, k], the second moment A = E[x x^T] [k, k] of its inputs, and optionally the second moment
G [n, n] of the loss gradients at its outputs; that of the longer side may be multiplied onto the
shorter one (`moments.py`), which is enough here. Out: up [n, r] and down [r, k] that minimize
|G^1/2 (W - up down) A^1/2|_F. Without A and G this is the plain SVD; with A alone it is
activation-aware ("whitened") SVD, whose norm is the mean squared error of the layer's output; with
both it is the increase of the loss, to second order and with G and A taken as independent (the
K-FAC approximation, Martens and Grosse, 2015).

The idea: with G = L L^T, M = L^T W A^1/2 and U the leading left singular vectors of M, the optimum
is L^-T U U^T L^T W. So the eigenvectors of the small Gram matrix M M^T are enough, without an
inverse of A^1/2. L is the Cholesky factor: moments are positive definite, as `regularize` makes
them. Where n > k, W^T is factorized with A and G exchanged. All arithmetic is float64 until the
factors are stored, but W is widened one block at a time. `measure` gives the errors of factors as
stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from nmm_compiler.errors import ModelError
from nmm_compiler.lowrank_models.moments import (
    Moments,
    SecondMoment,
    blocks,
    product,
)

_NONE = Moments()


class Factors(NamedTuple):
    """up [n, r] and down [r, k]; where n < k, the C [r, n] of down = C W."""

    up: torch.Tensor
    down: torch.Tensor
    coefficients: torch.Tensor | None = None


def gram(weight: torch.Tensor, moments: Moments) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return M M^T [s, s] of M = L^T W A^1/2, a block at a time, and L, None for the identity.

    W is [s, l] with s <= l: the given matrix, or its transpose with A and G exchanged.
    """
    short, long = moments.gradients, moments.inputs
    if weight.shape[0] > weight.shape[1]:
        weight, short, long = weight.T, long, short
    size = weight.shape[0]
    total = torch.zeros(size, size, dtype=torch.float64, device=weight.device)
    if long is None or long.carried:
        for part in blocks(weight.shape[1], size):
            wide = weight[:, part].double()
            total.addmm_(wide, wide.T)
        if long is not None:
            total.mul_(long.shift).add_(long.total, alpha=long.scale)
    else:
        for part in blocks(size, weight.shape[1]):
            wide = weight[part].double()
            left = (wide @ long.total).mul_(long.scale).add_(wide, alpha=long.shift)
            product(left, weight.T, out=total[part])
    if short is None:
        return total, None
    lower = torch.linalg.cholesky(short.dense())
    total = lower.T @ total
    return total @ lower, lower


def spectrum(weight: torch.Tensor, moments: Moments = _NONE) -> torch.Tensor:
    """Return the squared singular values of G^1/2 W A^1/2, descending, [min(n, k)] float64."""
    squares, _ = gram(weight.detach(), moments)
    with one_thread():
        return torch.linalg.eigvalsh(squares).flip(0).clamp_min(0)


def factorize(
    weight: torch.Tensor, rank: int, moments: Moments = _NONE, name: str = "the matrix"
) -> Factors:
    """Return the factors of W [n, k] in float64 that are optimal at `rank` in the moments' norm.

    Raises ModelError, which calls the matrix by `name`, unless 1 <= rank <= min(n, k).
    """
    n, k = weight.shape
    if not 1 <= rank <= min(n, k):
        raise ModelError(f"rank {rank} for {name} [{n}, {k}]: pass 1 to {min(n, k)}")
    squares, lower = gram(weight.detach(), moments)
    with one_thread():
        _, vectors = torch.linalg.eigh(squares.T)
    left = vectors[:, -rank:].flip(1)
    del squares, vectors
    coefficients = left.T
    if lower is not None:
        coefficients = left.T @ lower.T
        left = torch.linalg.solve_triangular(lower.T, left, upper=True)
    right = product(coefficients, weight.detach() if n <= k else weight.detach().T)
    up, down = (left, right) if n <= k else (right.T, left.T)
    return Factors(up, down, coefficients if n < k else None)


def balance(factors: Factors, dtype: torch.dtype = torch.float64) -> Factors:
    """Return factors whose column i of up and row i of down have equal norms.

    The product is the same. Equal norms keep both in range of float16, and make gradient steps on
    the two comparable. dtype: what both are rounded to.
    """
    up_norm, down_norm = factors.up.norm(dim=0), factors.down.norm(dim=1)
    usable = (up_norm > 0) & (down_norm > 0)
    ratio = torch.where(usable, down_norm / up_norm.clamp_min(1e-300), torch.ones_like(up_norm))
    scale = ratio.sqrt()
    up = (factors.up * scale).to(dtype).contiguous()
    down = (factors.down / scale[:, None]).to(dtype).contiguous()
    inside = factors.coefficients
    return Factors(up, down, None if inside is None else inside / scale[:, None])


@torch.no_grad()
def measure(
    weight: torch.Tensor, target: torch.Tensor, factors: Factors, moment: SecondMoment | None
) -> tuple[float, float | None]:
    """Return (|T - up down| / |W|, the same in the norm of a moment A), of the factors as stored.

    target: T, what a base leaves of W, or W itself. moment: of the inputs. Where it is carried, A
    is known as W A W^T, down = C W + rounding, and the squared error is that of
    (1 - up C) W A W^T (1 - up C)^T, plus what the rounding of `down` adds where it is independent
    from column to column: sum over j of |up (down - C W)_j|^2 A_jj.

    Computed in float32 for weights of half precision (whose rounding is coarser), else float64;
    blocks of W and of A are widened one at a time.
    """
    wide = torch.float32 if weight.dtype.itemsize <= 2 else torch.float64
    sums = torch.zeros(4, dtype=torch.float64)
    up, down, coefficients = factors
    wide_down = down.to(wide)
    direct = None if moment is None or moment.carried else moment.total
    for rows in blocks(*weight.shape):
        block = weight[rows].to(wide)
        missing = torch.addmm(target[rows].to(wide), up[rows].to(wide), wide_down, alpha=-1)
        sums[0] += _dot(missing, missing)
        sums[1] += _dot(block, block)
        for columns in blocks(*direct.shape) if direct is not None else ():
            assert direct is not None
            a = direct[:, columns].to(wide)
            sums[2] += _dot(missing @ a, missing[:, columns])
            sums[3] += _dot(block @ a, block[:, columns])
    if moment is not None and moment.carried:
        assert coefficients is not None
        wide_up = up.double()
        left = (wide_up @ coefficients).neg_()
        left.diagonal().add_(1)
        error = ((left @ moment.total) * left).sum()
        gram = wide_up.T @ wide_up
        for part in blocks(*weight.T.shape):
            rounding = down[:, part].double() - coefficients @ weight[:, part].double()
            error += (((gram @ rounding) * rounding).sum(0) * moment.squares[part]).sum()
        sums[2:] = torch.stack([error, moment.total.trace()]).cpu()
    plain, weighted = (
        (max(left, 0.0) / whole) ** 0.5 if whole > 0 else 0.0
        for left, whole in sums.reshape(2, 2).tolist()
    )
    return plain, None if moment is None else weighted


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the sum of a * b, accumulated in float64."""
    return float((a * b).sum(dtype=torch.float64))


# LAPACK runs on one thread: eigendecompositions pass through thousands of short barriers, and with
# more threads than free cores every barrier waits for the scheduler. Measured on 2 cores under
# load, a 384 x 384 eigh took 7.8 s on two threads and 0.07 s on one. Products keep all threads.
@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Set PyTorch's intra-op threads to one inside the block, and back after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
