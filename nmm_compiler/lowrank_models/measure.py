"""The errors of stored factors: of the matrix, and of its output over the data."""

from __future__ import annotations

import torch

from nmm_compiler.lowrank_models.factorize import Factors
from nmm_compiler.lowrank_models.moments import SecondMoment, blocks


def scaled_coefficients(factors: Factors, down: torch.Tensor) -> torch.Tensor:
    """Return C [r, n] of down = C W, for the stored `down`, which is balanced and perhaps
    rounded."""
    assert factors.coefficients is not None
    norms = factors.down.norm(dim=1)
    scale = down.double().norm(dim=1) / norms.clamp_min(torch.finfo(norms.dtype).tiny)
    return factors.coefficients * scale[:, None]


def measure(
    weight: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    moment: SecondMoment | None,
    coefficients: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
) -> tuple[float, float | None]:
    """Return (|T - up down| / |W|, the same in the norm of a moment A), of the factors as stored.

    target: T, what a base leaves of W; None for W itself. moment: of the inputs. coefficients:
    C [r, n] where it is carried, down = C T + rounding. Then A is known as T A T^T, and the squared
    error is that of (1 - up C) T A T^T (1 - up C)^T, plus what the rounding of `down` adds where it
    is independent from column to column: sum over j of |up (down - C T)_j|^2 A_jj.

    Computed in float32 for weights of half precision (whose rounding is coarser), else float64;
    blocks of W and of A are widened one at a time.
    """
    wide = torch.float32 if weight.dtype.itemsize <= 2 else torch.float64
    sums = torch.zeros(4, dtype=torch.float64)
    wide_down = down.to(wide)
    direct = None if moment is None or moment.carried else moment.total.to(weight.device)
    for rows in blocks(*weight.shape):
        block = weight[rows].to(wide)
        wanted = block if target is None else target[rows].to(wide)
        missing = torch.addmm(wanted, up[rows].to(wide), wide_down, alpha=-1)
        sums[0] += _dot(missing, missing)
        sums[1] += _dot(block, block)
        for columns in blocks(*direct.shape) if direct is not None else ():
            assert direct is not None
            a = direct[:, columns].to(wide)
            sums[2] += _dot(missing @ a, missing[:, columns])
            sums[3] += _dot(block @ a, block[:, columns])
    if moment is not None and coefficients is not None:
        wanted = weight if target is None else target
        sums[2], sums[3] = _measure_carried(wanted, up, down, moment, coefficients)
        if target is not None:
            sums[3] = moment.energy
    left, whole, weighted_left, weighted_whole = sums.tolist()
    plain = (left / whole) ** 0.5 if whole > 0 else 0.0
    if moment is None:
        return plain, None
    return plain, (max(weighted_left, 0.0) / weighted_whole) ** 0.5 if weighted_whole > 0 else 0.0


def _measure_carried(
    weight: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    moment: SecondMoment,
    coefficients: torch.Tensor,
) -> torch.Tensor:
    """Return (squared error, squared norm) in the norm of a carried moment."""
    total, squares = moment.total.to(weight.device), moment.squares.to(weight.device)
    wide_up = up.double()
    left = (wide_up @ coefficients).neg_()
    left.diagonal().add_(1)
    error = ((left @ total) * left).sum()
    gram = wide_up.T @ wide_up
    for part in blocks(*weight.T.shape):
        rounding = down[:, part].double() - coefficients @ weight[:, part].double()
        error += (((gram @ rounding) * rounding).sum(0) * squares[part]).sum()
    return torch.stack([error, total.trace()]).cpu()


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the sum of a * b, accumulated in float64."""
    return float((a * b).sum(dtype=torch.float64))
