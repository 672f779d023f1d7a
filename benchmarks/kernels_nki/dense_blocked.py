"""Dense product c [m, n] = a^T b of a [k, m] and b [k, n], blocked in all three dimensions.

The loops, the block sizes and the partial sums in SBUF are those of the fully optimized kernel of
AWS's NKI matrix multiplication tutorial, with edge tiles by slice bounds, so that any size runs.
For the benchmark only.
"""

import nki
import nki.isa as nisa
import nki.language as nl


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
        results = []
        for mt in range(0, m, 128):
            result = nl.ndarray((min(128, m - mt), columns), dtype=c.dtype, buffer=nl.sbuf)
            nisa.memset(dst=result, value=0.0)
            results.append(result)
        for k0 in range(0, k, k_block):
            depth = min(k_block, k - k0)
            k_tiles = (depth + 127) // 128
            b_sb = nl.ndarray((128, k_tiles, columns), dtype=b.dtype, buffer=nl.sbuf)
            for kt in range(k_tiles):
                kp = min(128, depth - 128 * kt)
                row = k0 + 128 * kt
                nisa.dma_copy(dst=b_sb[0:kp, kt, :], src=b[row : row + kp, n0 : n0 + columns])
            for m0 in range(0, m, m_block):
                rows = min(m_block, m - m0)
                a_sb = nl.ndarray((128, k_tiles, rows), dtype=a.dtype, buffer=nl.sbuf)
                for kt in range(k_tiles):
                    kp = min(128, depth - 128 * kt)
                    row = k0 + 128 * kt
                    nisa.dma_copy(dst=a_sb[0:kp, kt, :], src=a[row : row + kp, m0 : m0 + rows])
                for ns in range(0, columns, 512):
                    nw = min(512, columns - ns)
                    for ms in range(0, rows, 128):
                        mw = min(128, rows - ms)
                        sums = nl.ndarray((mw, nw), dtype=nl.float32, buffer=nl.psum)
                        for kt in range(k_tiles):
                            kp = min(128, depth - 128 * kt)
                            nisa.nc_matmul(
                                dst=sums,
                                stationary=a_sb[0:kp, kt, ms : ms + mw],
                                moving=b_sb[0:kp, kt, ns : ns + nw],
                                accumulate=kt > 0,
                            )
                        result = results[(m0 + ms) // 128]
                        nisa.tensor_tensor(
                            dst=result[0:mw, ns : ns + nw],
                            data1=result[0:mw, ns : ns + nw],
                            data2=sums,
                            op=nl.add,
                        )
        for mt in range(0, m, 128):
            mw = min(128, m - mt)
            nisa.dma_copy(dst=c[mt : mt + mw, n0 : n0 + columns], src=results[mt // 128])
    return c
