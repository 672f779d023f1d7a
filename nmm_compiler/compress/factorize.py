"""One matrix into two factors: the best rank-r approximation in the norm of the data.

Goes in: W [n, k], the second moment A = E[x x^T] [k, k] of its inputs, and optionally the second
moment G [n, n] of the loss gradients at its outputs. Comes out: up [n, r] and down [r, k] that
minimize |G^1/2 (W - up down) A^1/2|_F. Without A and G this is the plain SVD; with A alone it is
activation-aware ("whitened") SVD, whose norm is the mean squared error of the layer's output; with
both it is, to second order and with G and A taken as independent, what the loss gains (the K-FAC
approximation, Martens and Grosse, 2015).

The one idea: with M = G^1/2 W A^1/2 and U the leading left singular vectors of M, the optimum is
G^-1/2 U U^T G^1/2 W. So the eigenvectors of the small Gram matrix M M^T are all that is needed: no
Cholesky factor that fails on singular moments, and no inverse of A^1/2 when n <= k. Everything is
float64 until the factors are stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nmm_compiler.compress.one_thread import eigh, eigvalsh, orthonormal
from nmm_compiler.errors import RankError, WeightError

# The randomized solver is tried where the sketch is at most this share of the smaller side ...
_SKETCH_SHARE = 1 / 8
_ROWS = 1024  # of a residual that is formed at a time
_OVERSAMPLE = 16
# ... and kept where it provably leaves at most this much more squared error than the optimum.
_SKETCH_EXCESS = 0.01


@dataclass(frozen=True)
class Moments:
    """What calibration knows of one layer, in float64: second moments of inputs and gradients.

    inputs: A [k, k], already regularized (see `calibrate.regularize`), or None for the identity.
    gradients: G [n, n], likewise.
    """

    inputs: torch.Tensor | None = None
    gradients: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Moments:
        """Return the same moments on a device."""
        return Moments(*(m if m is None else m.to(device) for m in (self.inputs, self.gradients)))


@dataclass(frozen=True)
class Factors:
    """up [n, r] and down [r, k] in float64, with the squared error that theory predicts.

    squared_error: |G^1/2 (W - up down) A^1/2|_F^2, as the sum of the discarded squared singular
        values; squared_norm: the same norm of W.
    solver: "eigh" or "randomized"; excess: proved bound on the share by which the squared error can
        exceed the optimum (0 for eigh).
    """

    up: torch.Tensor
    down: torch.Tensor
    squared_error: float
    squared_norm: float
    solver: str = "eigh"
    excess: float = 0.0

    @property
    def relative_error(self) -> float:
        """The predicted weighted relative error."""
        if not self.squared_norm:
            return 0.0
        return math.sqrt(self.squared_error / self.squared_norm)


def spectrum(
    weight: torch.Tensor, moments: Moments | None = None, name: str = "the matrix"
) -> torch.Tensor:
    """Return the squared singular values of G^1/2 W A^1/2, descending, [min(n, k)] float64."""
    gram = _gram(_wide(weight, name), moments or Moments())
    return eigvalsh(gram).flip(0).clamp_min(0)


def factorize(
    weight: torch.Tensor, rank: int, moments: Moments | None = None, name: str = "the matrix"
) -> Factors:
    """Return the factors of W [n, k] at `rank` that are optimal in the moments' norm.

    Raises RankError unless 1 <= rank <= min(n, k), and WeightError for a weight that is not finite;
    both call the matrix by `name`.
    """
    n, k = weight.shape
    if not 1 <= rank <= min(n, k):
        raise RankError(f"rank {rank} for {name} [{n}, {k}]: pass 1 to {min(n, k)}")
    wide = _wide(weight, name)
    moments = moments or Moments()
    if moments.inputs is None and moments.gradients is None:
        if rank + _OVERSAMPLE <= _SKETCH_SHARE * min(n, k):
            sketched = _randomized(wide, rank)
            if sketched is not None:
                return sketched
        return _plain(wide, rank)
    return _weighted(wide, rank, moments)


def balance(factors: Factors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (up, down) scaled so that column i of up and row i of down have equal norms.

    The product is the same. Equal norms keep both in range of float16, and make gradient steps on
    the two comparable.
    """
    up, down = factors.up, factors.down
    up_norm, down_norm = up.norm(dim=0), down.norm(dim=1)
    usable = (up_norm > 0) & (down_norm > 0)
    ratio = torch.where(usable, down_norm / up_norm.clamp_min(1e-300), torch.ones_like(up_norm))
    scale = ratio.sqrt()
    return up * scale, down / scale[:, None]


def square_root(moment: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Return the symmetric square root of a positive semidefinite matrix, or its pseudo-inverse.

    Eigenvalues below dim * eps * the largest count as zero, for the root and its inverse alike.
    """
    values, vectors = eigh(moment)
    floor = values[-1].clamp_min(0) * values.numel() * torch.finfo(values.dtype).eps
    roots = torch.where(values > floor, values, torch.zeros_like(values)).sqrt()
    if inverse:
        roots = torch.where(roots > 0, 1 / roots, torch.zeros_like(roots))
    return (vectors * roots) @ vectors.T


def check_finite(weight: torch.Tensor, name: str) -> None:
    """Raise WeightError, naming the matrix, for a weight with NaN or infinite elements."""
    if not torch.isfinite(weight).all():
        raise WeightError(
            f"the weight of {name} {list(weight.shape)} has NaN or infinite elements and cannot be "
            "factorized; repair it, or name it in exclude="
        )


def _wide(weight: torch.Tensor, name: str) -> torch.Tensor:
    check_finite(weight, name)
    return weight.detach().to(torch.float64)


def _gram(weight: torch.Tensor, moments: Moments) -> torch.Tensor:
    """Return M M^T [n, n] or M^T M [k, k], whichever is smaller, for M = G^1/2 W A^1/2."""
    n, k = weight.shape
    a, g = moments.inputs, moments.gradients
    if n <= k:
        inner = weight @ (weight.T if a is None else a @ weight.T)
        if g is not None:
            root = square_root(g)
            inner = root @ inner @ root
    else:
        inner = weight.T @ (weight if g is None else g @ weight)
        if a is not None:
            root = square_root(a)
            inner = root @ inner @ root
    return (inner + inner.T) / 2


def _plain(weight: torch.Tensor, rank: int) -> Factors:
    n, k = weight.shape
    values, vectors = _leading(_gram(weight, Moments()), rank)
    if n <= k:
        up, down = vectors, vectors.T @ weight
    else:
        up, down = weight @ vectors, vectors.T.contiguous()
    return Factors(up, down, _tail(values, rank), _squared_norm(weight))


def _weighted(weight: torch.Tensor, rank: int, moments: Moments) -> Factors:
    n, k = weight.shape
    a, g = moments.inputs, moments.gradients
    values, vectors = _leading(_gram(weight, moments), rank)
    if n <= k:
        if g is None:
            up, down = vectors, vectors.T @ weight
        else:
            up = square_root(g, inverse=True) @ vectors
            down = vectors.T @ (square_root(g) @ weight)
    elif a is None:
        up, down = weight @ vectors, vectors.T.contiguous()
    else:
        up = weight @ (square_root(a) @ vectors)
        down = vectors.T @ square_root(a, inverse=True)
    return Factors(up, down, _tail(values, rank), float(values.clamp_min(0).sum()))


def _leading(gram: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all eigenvalues, descending, and the `rank` leading eigenvectors."""
    values, vectors = eigh(gram)
    return values.flip(0), vectors[:, -rank:].flip(1)


def _tail(values: torch.Tensor, rank: int) -> float:
    return float(values[rank:].clamp_min(0).sum())


def _squared_norm(matrix: torch.Tensor) -> float:
    """Return |M|_F^2, without a temporary of M's size."""
    return float(torch.linalg.vector_norm(matrix)) ** 2


def _randomized(wide: torch.Tensor, rank: int, seed: int = 0) -> Factors | None:
    """Return factors from a randomized range finder, or None where they are not provably enough.

    Halko, Martinsson and Tropp (2011), with one power iteration. The proof is a posteriori: with
    Q the sketch, B = Q^T W and E = W - Q B, the Gram matrix of W is B^T B + E^T E, so by Ky Fan no
    rank-r factors leave less than sum over i > r of s_i(B)^2 (within the sketch), and these leave
    that plus |E|_F^2. The share |E|_F^2 / (that sum) is reported as the excess.
    """
    n, k = wide.shape
    generator = torch.Generator().manual_seed(seed)
    width = rank + _OVERSAMPLE
    sketch = torch.randn(k, width, generator=generator, dtype=torch.float64).to(wide.device)
    basis = orthonormal(wide @ sketch)
    basis = orthonormal(wide @ (wide.T @ basis))
    inner = basis.T @ wide
    outside = sum(
        _squared_norm(rows - q @ inner)
        for rows, q in zip(wide.split(_ROWS), basis.split(_ROWS), strict=True)
    )
    values, vectors = _leading(inner @ inner.T, rank)
    inside = _tail(values, rank)
    norm = _squared_norm(wide)
    # Below this the error is rounding of float64 sums, not of the choice of subspace.
    rounding = norm * torch.finfo(torch.float64).eps * max(n, k)
    if outside > max(_SKETCH_EXCESS * inside, rounding):
        return None
    excess = outside / inside if inside > 0 else 0.0
    return Factors(basis @ vectors, vectors.T @ inner, inside + outside, norm, "randomized", excess)
