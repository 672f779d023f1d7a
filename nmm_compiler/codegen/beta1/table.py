"""Instruction forms and enumerators of Beta 1 for those of templates.

In Beta 1 an instruction returns its result: `nisa.f(dst=t, ...)` is `t[...] = nisa.f(...)`.
`dtype=` is the dtype to which the result is rounded; its default is that of an operand.
"""

from __future__ import annotations

# Instruction -> attributes of the destination t that it takes as keywords: dtype=t.dtype.
ADDED: dict[str, tuple[str, ...]] = {
    "tensor_copy": ("dtype",),
    "activation": ("dtype",),
    "tensor_tensor": ("dtype",),
    "tensor_scalar": ("dtype",),
    "scalar_tensor_tensor": ("dtype",),
    "reciprocal": ("dtype",),
    "tensor_reduce": ("dtype",),
    "affine_select": ("dtype",),
    "memset": ("shape", "dtype"),
    "nc_transpose": (),
    "dma_transpose": (),
    "nc_matmul": (),
}

# Keywords that Beta 1 has no form for. The queue of a DMA is the compiler's choice there.
DROPPED: dict[str, tuple[str, ...]] = {
    "nc_matmul": ("accumulate",),
    "affine_select": ("pattern", "channel_multiplier", "cmp_op", "offset"),
    "dma_copy": ("dge_mode", "engine"),
    "dma_transpose": ("dge_mode", "engine"),
}

# Modules and enumerators. `perf_mode` is text, as in nki-samples' double_row_matmul for SDK 2.26.
NAMES: dict[str, str] = {
    "import nki\n": "import neuronxcc.nki as nki\n",
    "import nki.": "import neuronxcc.nki.",
    "nisa.engine.tensor": "nisa.tensor_engine",
    "nisa.engine.vector": "nisa.vector_engine",
    "nisa.engine.scalar": "nisa.scalar_engine",
    "nisa.engine.gpsimd": "nisa.gpsimd_engine",
    "nisa.matmul_perf_mode.double_row": '"double_row_gen3"',
}
