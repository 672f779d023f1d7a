"""Low-rank chain y [m, n] = (x u) v from x^T [k, m], by NeuronMM's algorithm (arXiv 2510.25977).

Its loops (token blocks, then blocks of the contraction, then blocks of the rank; then output panels
and blocks of the rank), its block sizes, which follow from the token count alone, and its partial
sums, which leave PSUM once per block and are added in SBUF in the operands' dtype. Written anew for
current NKI; edge tiles by slice bounds where the original masks and pads. For the benchmark only.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from blocks import load_block, parts, product, zeros


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
            x_sb = load_block(x, k0, depth, m0, tokens)
            for r0 in range(0, r, r_block):
                columns = min(r_block, r - r0)
                u_sb = load_block(u, k0, depth, r0, columns)
                for ms in parts(tokens, 128):
                    for rs in parts(columns, 128):
                        sums = product(u_sb, rs, x_sb, ms, depth)
                        part = strip[0 : rs.stop - rs.start, (r0 + rs.start) // 128, ms]
                        nisa.tensor_tensor(dst=part, data1=part, data2=sums, op=nl.add)
        for n0 in range(0, n, n_block):
            columns = min(n_block, n - n0)
            results = zeros(tokens, columns, y.dtype)
            for r0 in range(0, r, r_block):
                depth = min(r_block, r - r0)
                v_sb = load_block(v, r0, depth, n0, columns)
                for ms, result in zip(parts(tokens, 128), results, strict=True):
                    for ns in parts(columns, 512):
                        part = result[:, ns]
                        sums = product(strip[:, r0 // 128 :, :], ms, v_sb, ns, depth)
                        nisa.tensor_tensor(dst=part, data1=part, data2=sums, op=nl.add)
            for ms, result in zip(parts(tokens, 128), results, strict=True):
                rows = slice(m0 + ms.start, m0 + ms.stop)
                nisa.dma_copy(dst=y[rows, n0 : n0 + columns], src=result)
    return y
