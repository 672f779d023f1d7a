"""The kernel of `nmm doctor --device` that holds a loop on the device, which came with NKI 0.6.

An NKI file as rungs.py is, apart from it so that the other kernels run with NKI 0.5.
"""

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def device_loop_register(x):
    """Copy x in a loop on the device whose bound is a register."""
    rows, columns = x.shape
    turns = rows // 128
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    blocks, results = x.reshape_dim(0, (turns, 128)), out.reshape_dim(0, (turns, 128))

    def body(i):
        at = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)  # views are addressed by it there
        nisa.register_store(at, i)
        held = nl.ndarray((128, columns), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=held, src=blocks.select(0, at))
        nisa.dma_copy(dst=results.select(0, at), src=held)

    nl.fori_loop(0, nisa.register_alloc(turns), body)
    return out
