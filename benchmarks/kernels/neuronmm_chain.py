"""Low-rank chain y [m, n] = (x u) v from x^T [k, m], by NeuronMM's algorithm (arXiv 2510.25977).

Its loops (token blocks, then blocks of the contraction, then blocks of the rank; then output panels
and blocks of the rank), its block sizes, which follow from the token count alone, and its partial
sums, which leave PSUM once per block and are added in SBUF in the operands' dtype. Written anew for
current NKI; edge tiles by slice bounds where the original masks and pads. For the benchmark only.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from pieces import load_block, product, size, slices, within, zeros


@nki.jit
def neuronmm_chain(x, u, v, k_in_block=4, r_in_block=4, m_in_block=4, n_in_block=4):
    """Return y; the blocks count tiles of 128 (k, r, m) and 512 (n)."""
    k, m = x.shape
    r, n = v.shape
    y = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
    for block in slices(m, 128 * m_in_block):
        tiles = slices(size(block), 128)
        shape = (128, (r + 127) // 128, size(block))
        strip = nl.ndarray(shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.memset(dst=strip, value=0.0)
        for ks in slices(k, 128 * k_in_block):
            x_sb = load_block(x, ks, block)
            for columns in slices(r, 128 * r_in_block):
                u_sb = load_block(u, ks, columns)
                for ms in tiles:
                    for rs in slices(size(columns), 128):
                        sums = product(u_sb, rs, x_sb, ms, size(ks))
                        part = strip[0 : size(rs), (columns.start + rs.start) // 128, ms]
                        nisa.tensor_tensor(dst=part, data1=part, data2=sums, op=nl.add)
        for panel in slices(n, 512 * n_in_block):
            results = zeros(size(block), size(panel), y.dtype)
            for depth in slices(r, 128 * r_in_block):
                v_sb = load_block(v, depth, panel)
                for ms, result in zip(tiles, results, strict=True):
                    for ns in slices(size(panel), 512):
                        part, held = result[:, ns], strip[:, depth.start // 128 :, :]
                        sums = product(held, ms, v_sb, ns, size(depth))
                        nisa.tensor_tensor(dst=part, data1=part, data2=sums, op=nl.add)
            for rows, result in zip(within(block), results, strict=True):
                nisa.dma_copy(dst=y[rows, panel], src=result)
    return y
