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

trace(A) is summed exactly. The shrinkage s is estimated from the vectors that are summed: v, or
M v where they are carried.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

# Elements that are widened to float64 at a time: 8 MiB.
_WIDE_ELEMENTS = 1 << 20
# Added to the diagonal of second moments, as a share of its mean.
_DAMPING = 1e-6


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite."""
    # by the least and the greatest: isfinite() makes copies, and takes 200 times as long in bf16
    ends = torch.aminmax(tensor) if tensor.numel() else ()
    return all(bool(torch.isfinite(end)) for end in ends)


@dataclass
class SecondMoment:
    """Running sum of v v^T over vectors v of one size, in float64.

    short: s, where `total` is the sum of (M v)(M v)^T, [s, s], of a matrix M [s, size] instead.
    fourth: sum of |v|^4, or |M v|^4, which the shrinkage estimate needs. squares: sums of v_j^2,
        [size]. tokens: how many v were added.
    """

    size: int
    short: int | None = None
    device: torch.device | None = None
    total: torch.Tensor = field(init=False)
    squares: torch.Tensor = field(init=False)
    fourth: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        rows = self.short or self.size
        self.total = torch.zeros(rows, rows, dtype=torch.float64, device=self.device)
        self.squares = torch.zeros(self.size, dtype=torch.float64, device=self.device)

    @property
    def carried(self) -> bool:
        """Whether `total` is of the short side."""
        return self.short is not None

    def add(self, rows: torch.Tensor, through: torch.Tensor | None = None) -> None:
        """Add vectors, [tokens, size]. through: M, where the moment is carried."""
        for piece in rows.detach().split(max(64, _WIDE_ELEMENTS // self.size)):
            wide = piece.to(torch.float64)
            self.squares += wide.square().sum(0)
            if through is not None:
                wide = product(wide, through.T)
            self.fourth += float(wide.square().sum(1).square().sum())
            self.total.addmm_(wide.T, wide)
        self.tokens += rows.shape[0]

    @property
    def mean(self) -> torch.Tensor:
        """`total` over the tokens: a new tensor."""
        return self.total / max(self.tokens, 1)


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
    count = moment.tokens
    if count <= 1:
        return 1.0
    squared = float(torch.linalg.vector_norm(moment.mean)) ** 2
    error = max(0.0, (moment.fourth / count - squared) / (count - 1))
    distance = squared - (float(moment.total.trace()) / count) ** 2 / len(moment.total)
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
