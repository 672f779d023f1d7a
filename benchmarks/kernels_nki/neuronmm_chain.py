"""Low-rank chain y [m, n] = (x u) v from x^T [k, m], by NeuronMM's algorithm (arXiv 2510.25977).

Its loops (token blocks, then blocks of the contraction, then blocks of the rank; then output panels
and blocks of the rank), its block sizes, which follow from the token count alone, and its partial
sums, which leave PSUM once per block and are added in SBUF in the operands' dtype. Written anew for
current NKI; edge tiles by slice bounds where the original masks and pads. For the benchmark only.
"""

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def neuronmm_chain(x, u, v, k_in_block=4, r_in_block=4, m_in_block=4, n_in_block=4):
    """Return y; the blocks count tiles of 128 (k, r, m) and 512 (n)."""
    k, m = x.shape
    r, n = v.shape
    y = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
    k_block = 128 * k_in_block
    r_block = 128 * r_in_block
    m_block = 128 * m_in_block
    n_block = 512 * n_in_block
    for m0 in range(0, m, m_block):
        tokens = min(m_block, m - m0)
        strip = nl.ndarray((128, (r + 127) // 128, tokens), dtype=x.dtype, buffer=nl.sbuf)
        nisa.memset(dst=strip, value=0.0)
        for k0 in range(0, k, k_block):
            depth = min(k_block, k - k0)
            k_tiles = (depth + 127) // 128
            x_sb = nl.ndarray((128, k_tiles, tokens), dtype=x.dtype, buffer=nl.sbuf)
            for kt in range(k_tiles):
                kp = min(128, depth - 128 * kt)
                row = k0 + 128 * kt
                nisa.dma_copy(dst=x_sb[0:kp, kt, :], src=x[row : row + kp, m0 : m0 + tokens])
            for r0 in range(0, r, r_block):
                columns = min(r_block, r - r0)
                u_sb = nl.ndarray((128, k_tiles, columns), dtype=u.dtype, buffer=nl.sbuf)
                for kt in range(k_tiles):
                    kp = min(128, depth - 128 * kt)
                    row = k0 + 128 * kt
                    nisa.dma_copy(dst=u_sb[0:kp, kt, :], src=u[row : row + kp, r0 : r0 + columns])
                for ms in range(0, tokens, 128):
                    mw = min(128, tokens - ms)
                    for rs in range(0, columns, 128):
                        rp = min(128, columns - rs)
                        sums = nl.ndarray((rp, mw), dtype=nl.float32, buffer=nl.psum)
                        for kt in range(k_tiles):
                            kp = min(128, depth - 128 * kt)
                            nisa.nc_matmul(
                                dst=sums,
                                stationary=u_sb[0:kp, kt, rs : rs + rp],
                                moving=x_sb[0:kp, kt, ms : ms + mw],
                                accumulate=kt > 0,
                            )
                        part = strip[0:rp, (r0 + rs) // 128, ms : ms + mw]
                        nisa.tensor_tensor(dst=part, data1=part, data2=sums, op=nl.add)
        for n0 in range(0, n, n_block):
            columns = min(n_block, n - n0)
            results = []
            for ms in range(0, tokens, 128):
                result = nl.ndarray((min(128, tokens - ms), columns), dtype=y.dtype)
                nisa.memset(dst=result, value=0.0)
                results.append(result)
            for r0 in range(0, r, r_block):
                depth = min(r_block, r - r0)
                r_tiles = (depth + 127) // 128
                v_sb = nl.ndarray((128, r_tiles, columns), dtype=v.dtype, buffer=nl.sbuf)
                for rt in range(r_tiles):
                    rp = min(128, depth - 128 * rt)
                    row = r0 + 128 * rt
                    nisa.dma_copy(dst=v_sb[0:rp, rt, :], src=v[row : row + rp, n0 : n0 + columns])
                for ms in range(0, tokens, 128):
                    mw = min(128, tokens - ms)
                    for ns in range(0, columns, 512):
                        nw = min(512, columns - ns)
                        sums = nl.ndarray((mw, nw), dtype=nl.float32, buffer=nl.psum)
                        for rt in range(r_tiles):
                            rp = min(128, depth - 128 * rt)
                            nisa.nc_matmul(
                                dst=sums,
                                stationary=strip[0:rp, r0 // 128 + rt, ms : ms + mw],
                                moving=v_sb[0:rp, rt, ns : ns + nw],
                                accumulate=rt > 0,
                            )
                        part = results[ms // 128][0:mw, ns : ns + nw]
                        nisa.tensor_tensor(dst=part, data1=part, data2=sums, op=nl.add)
            for ms in range(0, tokens, 128):
                mw = min(128, tokens - ms)
                nisa.dma_copy(
                    dst=y[m0 + ms : m0 + ms + mw, n0 : n0 + columns], src=results[ms // 128]
                )
    return y
