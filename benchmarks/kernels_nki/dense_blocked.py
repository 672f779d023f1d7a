"""Dense product c [m, n] = a^T b of a [k, m] and b [k, n], blocked in all three dimensions.

The loops, the block sizes and the partial sums in SBUF are those of the fully optimized kernel of
AWS's NKI matrix multiplication tutorial, with edge tiles by slice bounds, so that any size runs.
For the benchmark only.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from blocks import load_block, parts, product, zeros


@nki.jit
def dense_blocked(a, b, m_tiles_in_block=16, n_tiles_in_block=2, k_tiles_in_block=8):
    """Return c; the blocks count tiles of 128 (m, k) and 512 (n)."""
    k, m = a.shape
    n = b.shape[1]
    c = nl.ndarray((m, n), dtype=a.dtype, buffer=nl.shared_hbm)
    n_block = 512 * n_tiles_in_block
    m_block = 128 * m_tiles_in_block
    k_block = 128 * k_tiles_in_block
    for n0 in range(0, n, n_block):
        columns = min(n_block, n - n0)
        results = zeros(m, columns, c.dtype)
        for k0 in range(0, k, k_block):
            depth = min(k_block, k - k0)
            b_sb = load_block(b, k0, depth, n0, columns)
            for m0 in range(0, m, m_block):
                rows = min(m_block, m - m0)
                a_sb = load_block(a, k0, depth, m0, rows)
                for ns in parts(columns, 512):
                    for ms in parts(rows, 128):
                        part = results[(m0 + ms.start) // 128][:, ns]
                        sums = product(a_sb, ms, b_sb, ns, depth)
                        nisa.tensor_tensor(dst=part, data1=part, data2=sums, op=nl.add)
        for rows, result in zip(parts(m, 128), results, strict=True):
            nisa.dma_copy(dst=c[rows, n0 : n0 + columns], src=result)
    return c
