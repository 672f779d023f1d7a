"""Dense product y = activation(x w + bias), in any layout of x, w and y.

The contraction lies on the partitions of both operands. For y the tokens are stationary and w
moves; for y^T tiles of w are stationary and the tokens move. Sums stay in PSUM over all of k.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from ..pieces.loads_and_stores import bias_columns, position, product_scales, split, spread_bias
from ..pieces.product_to_hbm import expand_columns, expand_rows
from ..pieces.records import Base, Block, Epilogue, Product, Result, Strip, Weight


@nki.jit
def matmul(x, w, spec, schedule, **others):
    """Return y."""
    m = spec.m  # tokens
    k = spec.k  # input features
    n = spec.n  # output features
    m_block = schedule.m_block
    k_tiles = (k + 127) // 128
    w_all = None
    bias_sb = None
    scale_sb = None
    y_dtype = x.dtype if spec.result_dtype == spec.dtype else getattr(nl, spec.result_dtype)
    if spec.out_layout == "row":
        out = nl.ndarray((m, n), dtype=y_dtype, buffer=nl.shared_hbm)
    else:
        out = nl.ndarray((n, m), dtype=y_dtype, buffer=nl.shared_hbm)
    if spec.bias:
        if spec.out_layout == "row":
            bias_sb = spread_bias(others.get("bias"), n)
        else:
            bias_sb = bias_columns(others.get("bias"), n)
    if spec.fp8:
        scale_sb = product_scales(
            others.get("w_scale"), others.get("x_scale"), n, spec.scales,
            spec.out_layout == "col", True,
        )  # fmt: skip
    if schedule.w.resident:
        aligned = schedule.double_row or schedule.w.load == "dma"
        w_pitch = (n + 15) // 16 * 16 if aligned else n
        w_all = nl.ndarray((128, k_tiles, w_pitch), dtype=w.dtype, buffer=nl.sbuf)
    right = Weight(w, w_all, schedule.w, schedule.ahead, False, None)
    epilogue = Epilogue(scale_sb, bias_sb, spec.scales, spec.bias, spec.activation)

    first = 0
    if schedule.m_loop:
        # on the device: the compiled program holds one block, whatever the number of tokens
        first = m - m % m_block
        x_dim = 1 if spec.x_layout == "col" else 0
        out_dim = 0 if spec.out_layout == "row" else 1
        x_blocks = split(x, x_dim, m // m_block, m_block)
        out_blocks = split(out, out_dim, m // m_block, m_block)

        def body(i):
            at = position(i)
            x_part = x_blocks.select(x_dim, at)
            out_part = out_blocks.select(out_dim, at)
            matmul_block(out_part, x_part, right, epilogue, Block(0, m_block), spec, schedule)

        # a bound in a register makes the variable one too
        nl.fori_loop(0, nisa.register_alloc(m // m_block), body)
    for m0 in range(first, m, m_block):
        matmul_block(out, x, right, epilogue, Block(m0, min(m_block, m - m0)), spec, schedule)
    return out


def matmul_block(out, x, right: Weight, epilogue: Epilogue, at: Block, spec, schedule):
    """Compute a block of tokens."""
    k_tiles = (spec.k + 127) // 128
    turned = schedule.x.load == "dma" or schedule.x.load == "dma16"
    pitch = (at.tokens + 15) // 16 * 16 if schedule.double_row or turned else at.tokens
    x_sb = nl.ndarray((128, k_tiles, pitch), dtype=x.dtype, buffer=nl.sbuf)
    left = Strip(x_sb, x, schedule.x)
    product = Product(spec.k, spec.n, schedule.k_order, spec.k, schedule.double_row, False)
    base = Base(None, None, 0, "rows", 128, schedule.k_order)
    whole = spec.n % 128 == 0 and not spec.bias
    result = Result(out, False, schedule.own_queue, schedule.tail if whole else 0)
    if spec.out_layout == "row":
        expand_rows(result, left, right, base, at, product, epilogue)
    else:
        expand_columns(result, left, right, base, at, product, epilogue)
