"""Three kernels that show how fast the simulator is: `speed.py --only simulator` prints it.

Process time of one core, best of three. Timing mode: instructions per second of simulation and
timing pass together; no data. Functional mode: its time over NumPy's for the same products.
"""

from __future__ import annotations

from typing import Any

import numpy as np

TILED = """\
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def tiled(lhsT, rhs):
    k, m = lhsT.shape
    n = rhs.shape[1]
    result = nl.ndarray((m, n), lhsT.dtype, buffer=nl.shared_hbm)
    for i in range(m // 128):
        for j in range(n // 512):
            acc = nl.ndarray((128, 512), nl.float32, buffer=nl.psum)
            for l in range(k // 128):
                a = nl.ndarray((128, 128), lhsT.dtype, buffer=nl.sbuf)
                b = nl.ndarray((128, 512), rhs.dtype, buffer=nl.sbuf)
                rows = nl.ds(l * 128, 128)
                nisa.dma_copy(dst=a, src=lhsT[rows, i * 128:(i + 1) * 128])
                nisa.dma_copy(dst=b, src=rhs[rows, j * 512:(j + 1) * 512])
                nisa.nc_matmul(dst=acc, stationary=a, moving=b)
            out = nl.ndarray((128, 512), lhsT.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=out, src=acc)
            nisa.dma_copy(dst=result[i * 128:(i + 1) * 128, j * 512:(j + 1) * 512], src=out)
    return result
"""

LOW_RANK = """\
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def low_rank(xT, u, v):
    k, m = xT.shape
    r, n = v.shape
    result = nl.ndarray((m, n), xT.dtype, buffer=nl.shared_hbm)
    factor = []
    for j in range(k // 128):
        tile = nl.ndarray((128, r), u.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=u[j * 128:(j + 1) * 128, :])
        factor.append(tile)
    for i in range(m // 512):
        middle = []
        x = []
        for j in range(k // 128):
            tile = nl.ndarray((128, 512), xT.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=tile, src=xT[j * 128:(j + 1) * 128, i * 512:(i + 1) * 512])
            x.append(tile)
        for s in range(r // 128):
            acc = nl.ndarray((128, 512), nl.float32, buffer=nl.psum)
            for j in range(k // 128):
                nisa.nc_matmul(dst=acc, stationary=factor[j][:, s * 128:(s + 1) * 128],
                               moving=x[j])
            p = nl.ndarray((128, 512), xT.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=p, src=acc, engine=nisa.engine.vector)
            middle.append(p)
        for c in range(n // 512):
            w = []
            for s in range(r // 128):
                tile = nl.ndarray((128, 512), v.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=tile, src=v[s * 128:(s + 1) * 128, c * 512:(c + 1) * 512])
                w.append(tile)
            for t in range(4):
                acc = nl.ndarray((128, 512), nl.float32, buffer=nl.psum)
                for s in range(r // 128):
                    nisa.nc_matmul(dst=acc, stationary=middle[s][:, t * 128:(t + 1) * 128],
                                   moving=w[s])
                out = nl.ndarray((128, 512), xT.dtype, buffer=nl.sbuf)
                nisa.activation(dst=out, op=nl.copy, data=acc)
                row = i * 512 + t * 128
                nisa.dma_copy(dst=result[row:row + 128, c * 512:(c + 1) * 512], src=out)
    return result
"""

SOFTMAX = """\
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def scores(qT, kT):
    d, m = qT.shape
    n = kT.shape[1]
    result = nl.ndarray((m, n), nl.float32, buffer=nl.shared_hbm)
    keys = nl.ndarray((d, n), kT.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=keys, src=kT)
    for i in range(m // 128):
        q = nl.ndarray((d, 128), qT.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=q, src=qT[:, i * 128:(i + 1) * 128])
        row = nl.ndarray((128, n), nl.float32, buffer=nl.sbuf)
        for j in range(n // 512):
            acc = nl.ndarray((128, 512), nl.float32, buffer=nl.psum)
            nisa.nc_matmul(dst=acc, stationary=q, moving=keys[:, j * 512:(j + 1) * 512])
            nisa.tensor_copy(dst=row[:, j * 512:(j + 1) * 512], src=acc)
        top = nl.ndarray((128, 1), nl.float32, buffer=nl.sbuf)
        total = nl.ndarray((128, 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=top, op=nl.maximum, data=row, axis=1, negate=True)
        nisa.activation(dst=row, op=nl.exp, data=row, bias=top, reduce_op=nl.add,
                        reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce)
        nisa.reciprocal(dst=total, data=total)
        nisa.tensor_scalar(dst=row, data=row, op0=nl.multiply, operand0=total)
        nisa.dma_copy(dst=result[i * 128:(i + 1) * 128, :], src=row)
    return result
"""


def softmax(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    scores = q.T @ k
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


KERNELS: list[tuple[str, str, Any, list[tuple[int, int]], list[tuple[int, int]]]] = [
    ("tiled matmul", TILED, lambda a, b: a.T @ b, [(1024, 1024), (1024, 2048)],
     [(4096, 2048), (4096, 4096)]),
    ("low rank", LOW_RANK, lambda x, u, v: (x.T @ u) @ v, [(1024, 1024), (1024, 512), (512, 2048)],
     [(4096, 4096), (4096, 1024), (1024, 8192)]),
    ("softmax scores", SOFTMAX, softmax, [(128, 2048), (128, 2048)], [(128, 16384), (128, 8192)]),
]  # fmt: skip
