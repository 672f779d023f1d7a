"""Rounds a weight to few bits beside a branch, given the moments of its inputs.

Base and branch are fitted in turn (as CALDERA does, arXiv 2405.18886): the branch is the best one
of W - Q in the norm of the data, then Q is W - branch rounded again. Columns of a block format are
rounded one after the other, each making up for the error of those before (GPTQ, arXiv 2210.17323).
That fits the calibration more than other texts, so the moment is first pulled far to a multiple of
the identity. Formats of a scale a row have 8 bits and little to mend: they round to nearest.
"""

from __future__ import annotations

import numpy as np
import torch

from nmm_compiler.kernels.packed_formats import FORMATS
from nmm_compiler.lowrank_models.factorize import factorize
from nmm_compiler.lowrank_models.moments import Moment, Moments
from nmm_compiler.lowrank_models.quantize import QuantizedLinear, residual

ROUNDS = 2
"""How often a base is fitted to its branch: more gain little."""
PULL = 0.4
"""Share of the identity in the moment that columns are rounded by. With less the outputs have less
error in the calibration's domain and more in another one."""


def rounded_beside(
    weight: torch.Tensor, format: str, rank: int, moments: Moments, name: str
) -> QuantizedLinear:
    """Return the base of a weight [n, k] beside a branch of a rank, 0 for none.

    The branch is `factorize` of what it leaves, with the same moments.
    """
    base = QuantizedLinear.of(weight, format)
    if weight.is_meta or moments.inputs is None or FORMATS[format].block is None:
        return base
    spread = _spread(moments.inputs)
    for _ in range(ROUNDS if rank else 1):
        wanted = weight
        if rank:
            branch = factorize(residual(weight, base), rank, moments, name)
            wanted = (weight.double() - branch.up @ branch.down).to(weight.dtype)
        base = QuantizedLinear.of(wanted, format, spread=spread)
    return base


def _spread(moment: Moment) -> np.ndarray:
    """Return U, upper triangular, with U^T U the inverse of a moment that is pulled."""
    matrix = moment.dense().cpu().mul_(1 - PULL)
    matrix.diagonal().add_(PULL / (1 - PULL) * matrix.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    return torch.linalg.cholesky(inverse).mT.float().numpy()
