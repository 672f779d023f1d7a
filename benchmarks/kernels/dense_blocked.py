"""Dense product c [m, n] = a^T b of a [k, m] and b [k, n], blocked in all three dimensions.

The loops, the block sizes and the partial sums in SBUF are those of the fully optimized kernel of
AWS's NKI matrix multiplication tutorial, with edge tiles by slice bounds, so that any size runs.
For the benchmark only.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from pieces import load_block, product, result_of_product, size, slices, zeros


@nki.jit
def dense_blocked(a, b, m_tiles_in_block=16, n_tiles_in_block=2, k_tiles_in_block=8):
    """Return c; the blocks count tiles of 128 (m, k) and 512 (n)."""
    c, k, m, n = result_of_product(a, b)
    for ns in slices(n, 512 * n_tiles_in_block):
        results = zeros(m, size(ns), c.dtype)
        for ks in slices(k, 128 * k_tiles_in_block):
            b_sb = load_block(b, ks, ns)
            for ms in slices(m, 128 * m_tiles_in_block):
                a_sb = load_block(a, ks, ms)
                for columns in slices(size(ns), 512):
                    for rows in slices(size(ms), 128):
                        part = results[(ms.start + rows.start) // 128][:, columns]
                        sums = product(a_sb, rows, b_sb, columns, size(ks))
                        nisa.tensor_tensor(dst=part, data1=part, data2=sums, op=nl.add)
        for rows, result in zip(slices(m, 128), results, strict=True):
            nisa.dma_copy(dst=c[rows, ns], src=result)
    return c
