"""Second moments of calibration data, and their regularization.

`SecondMoment` is a running sum in float64, one for the inputs of each layer and one for the
gradients at its output. At widths of thousands it takes the most memory of a compression, so
nothing here copies one: `regularize` returns a `Moment`, which is the sum with a factor and a
multiple of the identity beside it.

A matrix W [n, k] has a short side and a long one, and `factorize.py` reads the moment of the long
side only through W: as W A W^T where n < k, as W^T G W where n > k. So only that product is summed,
of (M v)(M v)^T with M = W or W^T ("carried" to the short side). Pulling the long moment to a
multiple of the identity adds the same multiple of M M^T:

    M ((1 - s) A + t I) M^T = (1 - s) M A M^T + t M M^T,   t = (s + damping) trace(A) / size.

trace(A) is summed exactly. The estimate of the shrinkage s needs |A|_F^2, which is estimated from a
few products of A with random vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

# Elements that are widened to float64 at a time: 8 MiB.
_WIDE_ELEMENTS = 1 << 20
# Added to the diagonal of second moments, as a share of its mean.
_DAMPING = 1e-6
# Random vectors of the estimate of |A|_F^2: the first half spans A's largest directions.
_PROBES = 32


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite."""
    # by the least and the greatest: isfinite() makes copies, and takes 200 times as long in bf16
    ends = torch.aminmax(tensor) if tensor.numel() else ()
    return all(bool(torch.isfinite(end)) for end in ends)


@dataclass
class SecondMoment:
    """Running sum of v v^T over vectors v of one size, in float64.

    short: s, where `total` is the sum of (M v)(M v)^T, [s, s], of a matrix M [s, size] instead.
    fourth: sum of |v|^4, which the shrinkage estimate needs. squares: sums of v_j^2, [size].
        tokens: how many v were added.
    """

    size: int
    short: int | None = None
    device: torch.device | None = None
    total: torch.Tensor = field(init=False)
    squares: torch.Tensor = field(init=False)
    fourth: float = 0.0
    tokens: int = 0
    _probes: torch.Tensor = field(init=False)
    _products: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows = self.short or self.size
        self.total = torch.zeros(rows, rows, dtype=torch.float64, device=self.device)
        self.squares = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        shape = (self.size, _PROBES if self.carried else 0)
        signs = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0))
        self._probes = signs.mul_(2).sub_(1).to(self.total)
        self._products = torch.zeros_like(self._probes)

    @property
    def carried(self) -> bool:
        """Whether `total` is of the short side."""
        return self.short is not None

    def add(self, rows: torch.Tensor, through: torch.Tensor | None = None) -> None:
        """Add vectors, [tokens, size]. through: M, where the moment is carried."""
        for piece in rows.detach().split(max(64, _WIDE_ELEMENTS // self.size)):
            wide = piece.to(torch.float64)
            squares = wide.square()
            self.squares += squares.sum(0)
            self.fourth += float(squares.sum(1).square().sum())
            if through is not None:
                self._products.addmm_(wide.T, wide @ self._probes)
                wide = product(wide, through.T)
            self.total.addmm_(wide.T, wide)
        self.tokens += rows.shape[0]

    def bytes(self) -> int:
        """Return the bytes that the sums take."""
        sums = (self.total, self.squares, self._probes, self._products)
        return sum(tensor.nbytes for tensor in sums)

    def squared_norm(self) -> float:
        """Return |sum of v v^T|_F^2; an unbiased estimate where only the short side is kept.

        With S the sum, Z random signs and Y = S Z: the half of Y gives the Nystroem approximation N
        of S, whose norm is known; the other half gives Hutchinson's estimate of what is left,
        |S|^2 = |N|^2 + 2 <N, S - N> + |S - N|^2, which is small where N is close.
        """
        if not self.carried:
            return float(torch.linalg.vector_norm(self.total)) ** 2
        half = _PROBES // 2
        y, z = self._products[:, :half], self._probes[:, :half]
        core = torch.linalg.pinv(z.T @ y, rtol=1e-10, hermitian=True)
        rest, probes = self._products[:, half:], self._probes[:, half:]
        near = y @ (core @ (y.T @ probes))  # N Z
        left = rest - near
        inner = core @ (y.T @ y)
        known = float((inner * inner.T).sum())
        return known + float(2 * (near * left).sum() + left.square().sum()) / half


def product(
    left: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return left [m, s] @ matrix [s, l] in float64, widening a block of columns at a time."""
    if out is None:
        out = left.new_empty(left.shape[0], matrix.shape[1])
    for part in blocks(matrix.shape[1], matrix.shape[0]):
        out[:, part] = left @ matrix[:, part].double()
    return out


def blocks(count: int, width: int) -> list[slice]:
    """Return the rows of a matrix [count, width] in blocks that are widened one at a time."""
    size = max(64, _WIDE_ELEMENTS // width)
    return [slice(start, start + size) for start in range(0, count, size)]


@dataclass(frozen=True)
class Moment:
    """The matrix A = scale * total + shift * I, [size, size], without a copy of `total`.

    total: symmetric positive semidefinite, float64; scale > 0 and shift >= 0.
    carried: `total` is M A M^T instead, [s, s], for the matrix M that the moment is used with.
    """

    total: torch.Tensor
    scale: float = 1.0
    shift: float = 0.0
    carried: bool = False

    def dense(self) -> torch.Tensor:
        """Return A as a new tensor."""
        matrix = self.total * self.scale
        matrix.diagonal().add_(self.shift)
        return matrix


@dataclass(frozen=True)
class Moments:
    """The moments that weigh the error of one layer.

    inputs: A [k, k], already regularized, or None for the identity. gradients: G [n, n], likewise.
    """

    inputs: Moment | None = None
    gradients: Moment | None = None


def shrinkage_of(moment: SecondMoment) -> float:
    """Return how far to pull a second moment to a multiple of the identity, 0 to 1.

    Ledoit and Wolf (2004), "A well-conditioned estimator for large-dimensional covariance
    matrices": the estimated squared error of the moment over its squared distance to the target.
    One vector says nothing about the moment's error: 1.
    """
    count, size = moment.tokens, moment.size
    if count <= 1:
        return 1.0
    squared = moment.squared_norm() / count**2
    error = max(0.0, (moment.fourth / count - squared) / (count - 1))
    distance = squared - (float(moment.squares.sum()) / count) ** 2 / size
    return min(1.0, error / distance) if distance > 0 else 1.0


def regularize(
    moment: SecondMoment, damping: float = _DAMPING, shrinkage: float | None = None
) -> Moment:
    """Return the mean moment, pulled to mean(diag) * I by the shrinkage and damped.

    A moment of zeros (of a layer whose inputs are all zero) gives the identity.
    """
    count = max(moment.tokens, 1)
    scale = float(moment.squares.sum()) / count / moment.size
    if scale <= 0:
        return Moment(moment.total, 1.0, 1.0, moment.carried)
    share = shrinkage_of(moment) if shrinkage is None else shrinkage
    return Moment(moment.total, (1 - share) / count, scale * (share + damping), moment.carried)
