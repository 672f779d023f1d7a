"""Runs LAPACK on one thread.

Eigendecompositions pass through thousands of short barriers. With more threads than free
cores every barrier waits for the scheduler: measured here on 2 cores under load, a 384 x 384 eigh
took 7.8 s on two threads and 0.07 s on one. Products keep all threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

SMALL_ELEMENTS = 1 << 21


@contextlib.contextmanager
def one_thread(elements: int = 0) -> Iterator[None]:
    """Set PyTorch's intra-op threads to one inside the block, and back after it.

    elements: size of the matrix. Above SMALL_ELEMENTS nothing is set, since the products are then
    faster on several threads.
    """
    if elements > SMALL_ELEMENTS:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def eigh(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eigenvalues, ascending, and eigenvectors of a symmetric matrix, which is overwritten.

    The eigenvectors overwrite the matrix, in LAPACK's column order: a copy would be a third of all
    the memory that a decomposition needs.
    """
    columns = matrix.T if matrix.is_contiguous() else matrix.clone().T
    values = torch.empty(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
    with one_thread():
        torch.linalg.eigh(columns, out=(values, columns))
    return values, columns


def eigvalsh(matrix: torch.Tensor) -> torch.Tensor:
    """Return the eigenvalues of a symmetric matrix, ascending."""
    with one_thread():
        return torch.linalg.eigvalsh(matrix)
