"""The documented NKI API as data: names, parameters, defaults, and what changed when.

Facts taken from the public documentation of AWS Neuron SDK 2.32 (NKI 0.6.0: the stubs of
`nki.isa`, `nki.language`, `nki.collectives`, the migration guides and the release notes of 0.2.0
to 0.6.0) and from the announcements of NKI 0.7.0. Nothing here is code of that project.
`api.py` reads these tables; a new NKI version is edited here and nowhere else.

One entry is `name, name, ...(parameters)`; entries that share a signature share a line.
"""

from __future__ import annotations

API_VERSION = "0.6"
"""The NKI version whose stubs the signatures below were read from."""

VERSIONS = ("0.3", "0.4", "0.5", "0.6", "0.7")
"""Versions the lint knows, oldest first."""

# Every one of these also takes name=None as its last parameter.
ISA_NAMED = """
dma_copy(dst, src, priority=None, oob_mode=oob_mode.error, dge_mode=dge_mode.unknown,
    engine=engine.unknown)
dma_transpose(dst, src, axes=None, priority=None, dge_mode=dge_mode.unknown,
    oob_mode=oob_mode.error)
dma_compute(dst, srcs, reduce_op, scales=None, unique_indices=True, oob_mode=oob_mode.error)
nc_matmul(dst, stationary, moving, is_stationary_onezero=False, is_moving_onezero=False,
    is_transpose=False, accumulate=None, tile_position=(), tile_size=(),
    perf_mode=matmul_perf_mode.none)
nc_matmul_mx(dst, stationary, moving, stationary_scale, moving_scale, tile_position=None,
    tile_size=None, accumulate=None)
nc_transpose(dst, data, engine=engine.unknown)
tensor_copy(dst, src, engine=engine.unknown)
memset(dst, value, engine=engine.unknown)
tensor_copy_predicated(dst, src, predicate, reverse_pred=False)
tensor_tensor(dst, data1, data2, op, engine=engine.unknown)
tensor_scalar(dst, data, op0, operand0, reverse0=False, op1=None, operand1=None,
    reverse1=False, engine=engine.unknown)
scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False)
tensor_reduce(dst, op, data, axis, negate=False, keepdims=False)
tensor_partition_reduce(dst, op, data)
tensor_scalar_reduce(dst, data, op0, operand0, reduce_op, reduce_res=None, reverse0=False,
    reduce_cmd=reduce_cmd.reset_reduce, reduce_init=None, reduce_res_negate=False)
tensor_scalar_cumulative(dst, src, op0, op1, imm0, imm1=None,
    reduce_cmd=reduce_cmd.reset_reduce)
tensor_tensor_scan(dst, data0, data1, initial, op0, op1, reverse0=False, reverse1=False)
activation(dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None,
    reduce_cmd=reduce_cmd.idle)
activation_reduce(dst, op, data, reduce_op, reduce_res, bias=None, scale=1.0)
activate2(dst, op, data, imm0, imm1, op0, op1, relu_param=0.0, reverse0=False, reverse1=False,
    reduce_op=None, reduce_res=None, reduce_cmd=reduce_cmd.idle)
exponential(dst, src, max_value=0.0, reduce_res=None, reduce_cmd=reduce_cmd.idle,
    reduce_init=0.0)
reciprocal(dst, data)
bn_stats, bn_aggr(dst, data)
iota(dst, pattern, offset=0, channel_multiplier=0)
affine_select(dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=equal,
    offset=0)
range_select(dst, on_true_tile, comp_op0, comp_op1, bound0, bound1,
    reduce_cmd=reduce_cmd.reset_reduce, reduce_res=None, reduce_op=maximum, range_start=0,
    on_false_value=...)
select_reduce(dst, predicate, on_true, on_false, reduce_res=None, reduce_cmd=reduce_cmd.idle,
    reduce_op=maximum, reverse_pred=False)
nc_stream_shuffle(dst, src, shuffle_mask)
local_gather(dst, src_buffer, index, num_elem_per_idx=1, num_valid_indices=None)
nc_n_gather(dst, data, indices)
dropout(dst, data, prob)
max8(dst, src)
nc_find_index8(dst, data, vals)
nc_match_replace8(dst, data, vals, imm, dst_idx=None)
topk(val_dst, idx_dst, src, n)
nonzero_with_count(dst, src, index_offset=0, padding_val=-1)
sequence_bounds(dst, segment_ids)
quantize_mx(dst, src, dst_scale)
rng(dst, engine=engine.vector)
rand2(dst, min, max)
set_rng_seed(src_seeds)
rand_set_state(src_seeds, engine=engine.gpsimd)
rand_get_state(dst, engine=engine.gpsimd)
core_barrier(data, cores, engine=engine.gpsimd)
sendrecv(src, dst, send_to_rank, recv_from_rank, pipe_id, dma_engine=dma_engine.dma)
"""

ISA_PLAIN = """
register_alloc(x=None)
register_move, register_load, register_store(dst, src)
get_nc_version, get_nc_sub_version()
"""

# Enumerations of nki.isa: the name and its members.
ISA_ENUMS = {
    "engine": "tensor vector scalar gpsimd dma sync unknown",
    "reduce_cmd": "idle reset reduce reset_reduce load_reduce",
    "dge_mode": "unknown swdge hwdge none",
    "oob_mode": "error skip",
    "matmul_perf_mode": "none double_row",
    "nc_version": "gen2 gen3 gen4",
    "dma_engine": "dma gpsimd_dma",
}

ISA_VALUES = """NkiInstruction NkiValidationError VirtualRegister tensor_engine vector_engine
scalar_engine gpsimd_engine unknown_engine constants"""

LANGUAGE = """
exp, log, sqrt, rsqrt, tanh, sigmoid, relu, gelu, gelu_apprx_sigmoid, gelu_apprx_tanh,
    gelu_dx, gelu_apprx_sigmoid_dx, silu, silu_dx, softplus, mish, erf, erf_dx, reciprocal, sin,
    cos, tan, arctan, ceil, floor, trunc, negative, sign, abs, square, invert, logical_not,
    copy, transpose(x, dtype=None)
add, subtract, multiply, divide, maximum, minimum, abs_max, abs_min, power, fmod, mod, equal,
    not_equal, less, less_equal, greater, greater_equal, bitwise_and, bitwise_or, bitwise_xor,
    left_shift, right_shift, logical_and, logical_or, logical_xor(x, y, dtype=None)
sum, max, min, mean, prod, var(x, axis, dtype=None, keepdims=False)
all(x, axis, dtype=None)
softmax(x, axis=-1, dtype=None)
rms_norm(x, w, axis, n, epsilon=1e-06, dtype=None, compute_dtype=None)
where(condition, x, y, dtype=None)
dropout(x, rate, dtype=None)
matmul(x, y, transpose_x=False)
expand_dims(x, axis)
broadcast_to(x, shape, dtype=None)
ndarray(shape, dtype, buffer=sbuf, name='', address=None)
zeros, ones, rand(shape, dtype, buffer=sbuf, name='')
full(shape, fill_value, dtype, buffer=sbuf, name='')
zeros_like, empty_like(x, dtype=None, buffer=None, name='')
load(src, dtype=None)
store(dst, value)
load_transpose2d(src, dtype=None)
gather_flattened(data, indices, axis=0, dtype=None)
ds(start, size)
affine_range, sequential_range, static_range, dynamic_range(start, stop=None, step=1)
fori_loop(lower, upper, body_fun, step=1)
while_loop(init, body_fun)
no_reorder, program_ndim()
program_id(axis=0)
num_programs(axes=0)
shared_constant(constant)
shared_identity_matrix(n, dtype=uint8, dst=None)
device_print(print_prefix, tensor)
random_seed(seed)
is_hbm, is_on_chip, is_psum, is_sbuf(buffer)
"""

LANGUAGE_VALUES = """bool_ int8 int16 int32 uint8 uint16 uint32 float16 bfloat16 tfloat32 float32
float8_e4m3 float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e5m2_x4 float8_e4m3fn_x4
float4_e2m1fn_x4 sbuf psum hbm private_hbm shared_hbm average prelu bypass DType MemoryRegion
NKIObject NkiTensor"""

LANGUAGE_RECORDS = {
    "tile_size": """pmax psum_fmax psum_bank_fmax psum_bank_fmax_bytes gemm_stationary_fmax
        gemm_moving_fmax bn_stats_fmax psum_min_align sbuf_min_align psum_num_banks
        sbuf_size_bytes sbuf_fmax sbuf_fmax_bytes total_available_sbuf_size""",
    "MemoryRegion": "sbuf psum private_hbm shared_hbm",
}

COLLECTIVES = """
all_reduce(srcs, dsts, replica_group, op, priority=None, name=None)
all_gather, all_to_all(srcs, dsts, replica_group, collective_dim, priority=None, name=None)
all_gather_v, all_to_all_v(srcs, dsts, replica_group, metadata_tensor, recv_counts_known=False,
    has_rdispls=False, priority=None, name=None)
reduce_scatter(srcs, dsts, replica_group, collective_dim, op, priority=None, name=None)
collective_permute(srcs, dsts, source_target_pairs, priority=None, name=None)
collective_permute_implicit(srcs_by_channel, dsts_by_channel, replica_group, channel_ids=[0],
    priority=None, name=None)
collective_permute_implicit_reduce(srcs0_by_channel, srcs1_by_channel, dsts_by_channel,
    replica_group, op, channel_ids=[0], priority=None, name=None)
collective_permute_implicit_current_processing_rank_id(iteration_id, replica_group,
    channel_id=0, name=None)
rank_id(name=None)
"""

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
}

METHODS_OF_0_5 = """slice select permute broadcast expand_dim squeeze_dim reshape_dim flatten_dims
rearrange vector_select is_contiguous is_indirect indirect"""

# Methods of tensors -> version that brought them (nothing: before 0.3).
TENSOR_METHODS_ADDED = dict.fromkeys(METHODS_OF_0_5.split(), "0.5")

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

# Parameters that came after their function, and those that became optional.
PARAMETER_ADDED = {("nki.isa.dma_compute", "oob_mode"): "0.4"}
COLLECTIVE_NAME_ADDED = "0.5"
PARAMETER_OPTIONAL = {("nki.isa.tensor_scalar_reduce", "reduce_res"): "0.6"}

# (function, parameter) -> what to write instead; all of them are gone before or with 0.3
PARAMETER_REMOVED = {
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
# Parameters that every nki.isa function lost in 0.2.
ISA_PARAMETER_REMOVED = {
    "mask": "slice bounds clamped with min()",
    "dtype": "a dst tensor of that dtype",
}

# Parameters that take a member of an enumeration (a raw integer is refused since 0.3).
ENUM_PARAMETERS = {
    "engine": "nki.isa.engine",
    "dge_mode": "nki.isa.dge_mode",
    "oob_mode": "nki.isa.oob_mode",
    "reduce_cmd": "nki.isa.reduce_cmd",
    "perf_mode": "nki.isa.matmul_perf_mode",
    "dma_engine": "nki.isa.dma_engine",
}

# Callable in AWS's simulator, documented as failing when compiled for a device.
NOT_ON_DEVICE = {
    "nki.language.divide": "nl.multiply(x, nl.reciprocal(y))",
    "nki.language.fmod": "integer arithmetic on shapes, or nisa instructions",
    "nki.language.mod": "integer arithmetic on shapes, or nisa instructions",
}
