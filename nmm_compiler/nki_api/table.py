"""The documented NKI API as data: what changed when, and what the simulator has no function for.

Facts taken from the public documentation of AWS Neuron SDK 2.32 (NKI 0.6.0: the stubs of
`nki.isa`, `nki.language`, `nki.collectives`, the migration guides and the release notes of 0.2.0
to 0.6.0) and of SDK 2.33 (NKI 0.7.0: the announcement, the pages of the functions that are new,
of `nki.compiler` and of the compiler's error codes). Nothing here is code of that project.
`api.py` reads these tables; what a new NKI version removes or renames is edited here alone.

One entry is `name, name, ...(parameters)`; entries that share a signature share a line.
"""

from __future__ import annotations

API_VERSION = "0.6"
"""The NKI version whose stubs the signatures were read from."""

VERSIONS = ("0.3", "0.4", "0.5", "0.6", "0.7")
"""Versions the lint knows, oldest first."""

# Functions that the simulator does not have, by module.
FUNCTIONS = {
    "nki.isa": """
scalar_load(src)
scalar_store(dst, value)
""",
    "nki.language": """
tiles(source, tile_shape=None)
blocks(source, tile_shape=None, block_shape=None)
alloc_tiles(tile_shape, element_shape, buffer, dtype, address=None, name='')
alloc_blocks(tile_shape, block_shape, element_shape, buffer, dtype, address=None, name='')
""",
    "nki.collectives": """
all_gather_v, all_to_all_v, all_gather_v_prepare, all_to_all_v_prepare(srcs, dsts, replica_group,
    metadata_tensor, recv_counts_known=False, has_rdispls=False, priority=None, name=None)
all_gather_v_trigger, all_to_all_v_trigger(prepare_instr, name=None)
""",
}

# Classes that the simulator does not have.
CLASSES = """nki.isa.NkiScalar nki.language.NkiGrid nki.language.NkiTileGrid
nki.language.NkiBlockGrid"""

TOP_VALUES = "jit simulate isa language collectives typing dtype meta compiler experimental"
"""Names of `nki` itself; the modules not described above are opaque to the lint."""

# name -> version that brought it (nothing: before 0.3)
ADDED = {
    "nki.isa.activate2": "0.4",
    "nki.language.abs_max": "0.4",
    "nki.language.abs_min": "0.4",
    "nki.language.prelu": "0.4",
    "nki.language.bypass": "0.4",
    "nki.language.tile_size.sbuf_size_bytes": "0.4",
    "nki.language.tile_size.sbuf_fmax": "0.4",
    "nki.language.tile_size.sbuf_fmax_bytes": "0.4",
    "nki.language.tile_size.psum_bank_fmax": "0.4",
    "nki.language.tile_size.psum_bank_fmax_bytes": "0.4",
    "nki.language.tile_size.psum_num_banks": "0.5",
    "nki.language.float8_e8m0fnu": "0.5",
    "nki.isa.topk": "0.6",
    "nki.language.fori_loop": "0.6",
    "nki.language.while_loop": "0.6",
    "nki.collectives.all_gather_v": "0.6",
    "nki.isa.NkiScalar": "0.7",
    "nki.isa.scalar_load": "0.7",
    "nki.isa.scalar_store": "0.7",
    "nki.language.NkiGrid": "0.7",
    "nki.language.NkiTileGrid": "0.7",
    "nki.language.NkiBlockGrid": "0.7",
    "nki.language.tiles": "0.7",
    "nki.language.blocks": "0.7",
    "nki.language.alloc_tiles": "0.7",
    "nki.language.alloc_blocks": "0.7",
    "nki.collectives.all_gather_v_prepare": "0.7",
    "nki.collectives.all_gather_v_trigger": "0.7",
    "nki.collectives.all_to_all_v_prepare": "0.7",
    "nki.collectives.all_to_all_v_trigger": "0.7",
}

# Methods of tensors -> version that brought them (nothing: before 0.3).
TENSOR_METHODS_ADDED = dict.fromkeys(
    ("slice", "select", "permute", "broadcast", "expand_dim", "squeeze_dim", "reshape_dim",
     "flatten_dims", "rearrange", "vector_select", "is_contiguous", "is_indirect", "indirect"),
    "0.5",
)  # fmt: skip

# name -> (first version without it, what to write instead); "0.2" is before all VERSIONS
REMOVED = {
    "nki.isa.tensor_copy_dynamic_src": ("0.4", "tensor_copy() from .ap(scalar_offset=...)"),
    "nki.isa.tensor_copy_dynamic_dst": ("0.4", "tensor_copy() into .ap(scalar_offset=...)"),
    "nki.language.dynamic_range": ("0.7", "nl.fori_loop(lower, upper, body)"),
    "nki.language.arange": ("0.2", "slices, or .ap() for what slices cannot say"),
    "nki.language.mgrid": ("0.2", "slices, or .ap() for what slices cannot say"),
    "nki.language.par_dim": ("0.2", "a tensor whose first dimension is the partition"),
    "nki.language.spmd_dim": ("0.2", "kernel[n], with one launch dimension"),
    "nki.language.nc": ("0.2", "kernel[n], with one launch dimension"),
    "nki.benchmark": ("0.2", "neuron-explorer on a device, or nmm simulate"),
    "nki.baremetal": ("0.2", "a call with NumPy arrays"),
    "nki.profile": ("0.2", "neuron-explorer on a device, or nmm simulate"),
    "nki.simulate_kernel": ("0.2", "nki.simulate(kernel)"),
    "nki.tensor": ("0.2", "nki.meta.tensor"),
}

# name -> (version that deprecates it, what to write instead)
DEPRECATED = {
    "nki.isa.tensor_copy_dynamic_src": ("0.3", "tensor_copy() from .ap(scalar_offset=...)"),
    "nki.isa.tensor_copy_dynamic_dst": ("0.3", "tensor_copy() into .ap(scalar_offset=...)"),
    "nki.isa.tensor_engine": ("0.6", "nki.isa.engine.tensor"),
    "nki.isa.vector_engine": ("0.6", "nki.isa.engine.vector"),
    "nki.isa.scalar_engine": ("0.6", "nki.isa.engine.scalar"),
    "nki.isa.gpsimd_engine": ("0.6", "nki.isa.engine.gpsimd"),
    "nki.isa.unknown_engine": ("0.6", "nki.isa.engine.unknown"),
    "nki.language.affine_range": ("0.6", "range()"),
    "nki.language.sequential_range": ("0.6", "range()"),
    "nki.language.static_range": ("0.6", "range()"),
    "nki.language.dynamic_range": ("0.6", "nl.fori_loop(lower, upper, body)"),
    "nki.language.tile_size.psum_fmax": ("0.4", "tile_size.psum_bank_fmax"),
    "nki.language.tile_size.total_available_sbuf_size": ("0.4", "tile_size.sbuf_fmax_bytes"),
}

# (function, parameter), or (module, parameter) of all of its functions -> version that brought it
PARAMETER_ADDED = {
    ("nki.isa.dma_compute", "oob_mode"): "0.4",
    ("nki.collectives", "name"): "0.5",
}
# Parameters that became optional.
PARAMETER_OPTIONAL = {("nki.isa.tensor_scalar_reduce", "reduce_res"): "0.6"}

# (function, parameter), or (module, parameter) of all of its functions -> what to write instead;
# all of them are gone before or with 0.3
PARAMETER_REMOVED = {
    ("nki.isa", "mask"): "slice bounds clamped with min()",
    ("nki.isa", "dtype"): "a dst tensor of that dtype",
    ("nki.isa.dma_copy", "dst_rmw_op"): "nisa.dma_compute(dst, srcs, reduce_op)",
    ("nki.isa.dma_copy", "unique_indices"): "nisa.dma_compute(..., unique_indices=...)",
    ("nki.isa.nc_matmul", "psumAccumulateFlag"): "nothing, or accumulate=",
    ("nki.isa.nc_matmul", "is_moving_zero"): "is_moving_onezero=",
    ("nki.isa.sendrecv", "use_gpsimd_dma"): "dma_engine=nisa.dma_engine.gpsimd_dma",
    ("nki.isa.register_move", "imm"): "src= (a register made by nisa.register_alloc(value))",
    (
        "nki.collectives.collective_permute_implicit_current_processing_rank_id",
        "num_channels",
    ): "channel_ids= of collective_permute_implicit",
    ("nki.jit", "mode"): "nothing: the framework is found from the arguments",
    ("nki.jit", "platform_target"): "the variable NEURON_PLATFORM_TARGET_OVERRIDE",
}
JIT_IGNORED = ("mode",)

# Callable in AWS's simulator, documented as failing when compiled for a device.
NOT_ON_DEVICE = {
    "nki.language.divide": "nl.multiply(x, nl.reciprocal(y))",
    "nki.language.fmod": "integer arithmetic on shapes, or nisa instructions",
    "nki.language.mod": "integer arithmetic on shapes, or nisa instructions",
}
