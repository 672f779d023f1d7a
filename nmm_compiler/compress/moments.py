"""Second moments of what calibration saw, and what they are regularized to.

`SecondMoment` is a running sum in float64, one per distinct input of a model; at widths of
thousands it is the largest thing a compression holds. So nothing here copies one: `regularize`
returns a `Moment`, which is the sum with a factor and a multiple of the identity beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

# Vectors are widened to float64 this many at a time.
_ROWS = 1024


@dataclass
class SecondMoment:
    """Running sum of v v^T over vectors v of one size, in float64.

    fourth: sum of |v|^4, which the shrinkage estimate needs. tokens: how many v were added.
    """

    size: int
    total: torch.Tensor = field(init=False)
    fourth: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.total = torch.zeros(self.size, self.size, dtype=torch.float64)

    def add(self, rows: torch.Tensor) -> None:
        """Add vectors, [tokens, size]."""
        self.total = self.total.to(rows.device)
        for piece in rows.detach().split(_ROWS):
            wide = piece.to(torch.float64)
            self.total.addmm_(wide.T, wide)
            self.fourth += float(wide.square().sum(1).square().sum())
        self.tokens += rows.shape[0]

    @property
    def mean(self) -> torch.Tensor:
        """E[v v^T], [size, size]: a new tensor."""
        return self.total / max(self.tokens, 1)


@dataclass(frozen=True)
class Moment:
    """The matrix A = scale * total + shift * I, [size, size], without a copy of `total`.

    total: symmetric positive semidefinite, float64; scale > 0 and shift >= 0.
    """

    total: torch.Tensor
    scale: float = 1.0
    shift: float = 0.0

    @property
    def size(self) -> int:
        """Rows, and columns, of A."""
        return self.total.shape[0]

    def times(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows @ A for rows [m, size] in float64."""
        return (rows @ self.total).mul_(self.scale).add_(rows, alpha=self.shift)

    def dense(self) -> torch.Tensor:
        """Return A as a new tensor."""
        matrix = self.total * self.scale
        matrix.diagonal().add_(self.shift)
        return matrix

    def to(self, device: torch.device | str) -> Moment:
        """Return the same moment on a device."""
        return Moment(self.total.to(device), self.scale, self.shift)


@dataclass(frozen=True)
class Moments:
    """What calibration knows of one layer: the moments that its error is weighed with.

    inputs: A [k, k], already regularized, or None for the identity. gradients: G [n, n], likewise.
    """

    inputs: Moment | None = None
    gradients: Moment | None = None

    def to(self, device: torch.device | str) -> Moments:
        """Return the same moments on a device."""
        return Moments(*(m if m is None else m.to(device) for m in (self.inputs, self.gradients)))


def shrinkage_of(moment: SecondMoment) -> float:
    """Return how far to pull a second moment to a multiple of the identity, 0 to 1.

    Ledoit and Wolf (2004), "A well-conditioned estimator for large-dimensional covariance
    matrices": the estimated squared error of the moment over its squared distance to the target.
    One vector says nothing about the moment's error: 1.
    """
    count, size = moment.tokens, moment.size
    if count <= 1:
        return 1.0
    squared = (float(torch.linalg.vector_norm(moment.total)) / count) ** 2
    error = max(0.0, (moment.fourth / count - squared) / (count - 1))
    distance = squared - (float(moment.total.trace()) / count) ** 2 / size
    return min(1.0, error / distance) if distance > 0 else 1.0


def regularize(
    moment: SecondMoment, damping: float = 1e-6, shrinkage: float | None = None
) -> Moment:
    """Return the mean moment, pulled to mean(diag) * I by the shrinkage and damped.

    A moment that is all zero (a layer that only ever sees zeros) gives the identity.
    """
    count = max(moment.tokens, 1)
    scale = float(moment.total.trace()) / count / moment.size
    if scale <= 0:
        return Moment(moment.total, 1.0, 1.0)
    share = shrinkage_of(moment) if shrinkage is None else shrinkage
    return Moment(moment.total, (1 - share) / count, scale * (share + damping))
