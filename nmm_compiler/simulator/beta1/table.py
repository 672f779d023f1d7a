"""NKI Beta 1 (`neuronxcc.nki`, NKI 0.1) as data: names, parameters, and the result of each call.

Facts taken from the public stubs and error pages of AWS Neuron SDK 2.26 (aws-neuron-sdk,
commit 1db4d74e, `nki/api/nki`); nothing here is code of that project.

An entry is `name, name(parameters) -> result`. In this dialect an instruction has no destination:
it returns a tile of the shape and the memories that the destination of its row in `simulator/isa`
has. The result says what the row cannot: the tile's dtype where it is not that of the operands, or
`exact` for an instruction that does not round to it. What differs more has a function of its own in
`simulator/beta1/instructions.py`.
"""

from __future__ import annotations

import functools

from nmm_compiler.simulator.signatures import Api, entries

# All of these also take mask=None and dtype=None, by keyword. nc_matmul's perf_mode
# is nki-samples', a keyword that its stub's **kwargs take.
ISA = """
activation(op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None,
    reduce_cmd=reduce_cmd.idle)
activation_reduce(op, data, reduce_op, reduce_res, bias=None, scale=1.0)
tensor_copy(src, engine=engine.unknown) -> exact
tensor_tensor(data1, data2, op, engine=engine.unknown)
tensor_scalar(data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False,
    engine=engine.unknown)
scalar_tensor_tensor(data, op0, operand0, op1, operand1, reverse0=False, reverse1=False)
tensor_tensor_scan(data0, data1, initial, op0, op1, reverse0=False, reverse1=False)
tensor_scalar_reduce(data, op0, operand0, reduce_op, reduce_res, reverse0=False)
reciprocal(data)
dropout(data, prob) -> exact
nc_match_replace8(data, vals, imm, dst_idx=None) -> exact
range_select(on_true_tile, comp_op0, comp_op1, bound0, bound1, reduce_cmd=reduce_cmd.idle,
    reduce_res=None, reduce_op=maximum, range_start=0, on_false_value=-3.4028234663852886e+38)
tensor_reduce(op, data, axis, negate=False, keepdims=False)
tensor_partition_reduce(op, data)
bn_stats(data)
bn_aggr(data)
max8(src)
nc_find_index8(data, vals) -> uint32
nc_transpose(data, engine=engine.unknown)
dma_transpose(src, axes=None)
affine_select(pred, on_true_tile, on_false_value)
iota(expr, dtype)
memset(shape, value, dtype, engine=engine.unknown)
nc_stream_shuffle(src, dst, shuffle_mask)
tensor_copy_predicated(src, dst, predicate, reverse_pred=False)
select_reduce(dst, predicate, on_true, on_false, reduce_res=None, reduce_cmd=reduce_cmd.idle,
    reduce_op=maximum, reverse_pred=False)
tensor_copy_dynamic_src(src, engine=engine.unknown) -> exact
tensor_copy_dynamic_dst(dst, src, engine=engine.unknown)
"""
# mask=None, no dtype.
ISA_WITHOUT_DTYPE = """
local_gather(src_buffer, index, num_elem_per_idx=1, num_valid_indices=None)
nc_matmul(stationary, moving, is_stationary_onezero=False, is_moving_onezero=False,
    is_transpose=False, tile_position=(), tile_size=(), perf_mode=None)
dma_copy(dst, src, dst_rmw_op=None, oob_mode=oob_mode.error, dge_mode=dge_mode.unknown)
"""
# Neither; sequence_bounds has its dtype.
ISA_UNMASKED = """
sequence_bounds(segment_ids, dtype=None)
builtin_custom_op(function_name, lib_file_name, ulib_to_ucode_version, ulib_to_isa_version, srcs,
    dsts)
get_nc_version()
"""

ISA_ENUMS = {
    "engine": "tensor vector scalar gpsimd sync unknown",
    "reduce_cmd": "idle reset reduce reset_reduce",
    "dge_mode": "unknown swdge hwdge none",
    "oob_mode": "error skip",
    "nc_version": "gen2 gen3",
}
ISA_VALUES = "tensor_engine vector_engine scalar_engine gpsimd_engine dma_engine unknown_engine"

# All but the last groups also take mask=None, by keyword.
LANGUAGE = """
abs, arctan, ceil, cos, erf, erf_dx, exp, floor, gelu, gelu_apprx_sigmoid, gelu_apprx_tanh,
    gelu_dx, invert, log, mish, negative, reciprocal, relu, rsqrt, sigmoid, sign,
    silu, silu_dx, sin, softplus, sqrt, square, tan, tanh, trunc, transpose(x, dtype=None)
add, bitwise_and, bitwise_or, bitwise_xor, divide, fmod, left_shift, maximum, minimum, mod,
    multiply, power, right_shift, subtract(x, y, dtype=None)
equal, greater, greater_equal, less, less_equal, logical_and, logical_or, logical_xor,
    not_equal(x, y, dtype=bool)
logical_not(x, dtype=bool)
max, mean, min, prod, sum(x, axis, dtype=None, keepdims=False)
all(x, axis, dtype=bool)
var(x, axis, dtype=None)
softmax(x, axis, dtype=None, compute_dtype=None)
rms_norm(x, w, axis, n, epsilon=1e-06, dtype=None, compute_dtype=None)
where(condition, x, y, dtype=None)
dropout(x, rate, dtype=None)
matmul(x, y, transpose_x=False)
copy(src, dtype=None)
load, load_transpose2d(src, dtype=None)
store(dst, value)
gather_flattened(data, indices, dtype=None)
loop_reduce(x, op, loop_indices, dtype=None)
all_reduce(x, op, program_axes, dtype=None, parallel_reduce=True, asynchronous=False)
atomic_rmw(dst, value, op)
device_print(prefix, x)
random_seed(seed)
"""
LANGUAGE_UNMASKED = """
affine_range, sequential_range, static_range(start, stop=None, step=1)
arange(start, stop=None)
ds(start, size)
broadcast_to(src, shape)
expand_dims(data, axis)
ndarray, zeros, ones(shape, dtype, buffer=None, name='')
full(shape, fill_value, dtype, buffer=None, name='')
empty_like, zeros_like(a, dtype=None, buffer=None, name='')
rand(shape, dtype=float32)
shared_constant(constant, dtype=None)
shared_identity_matrix(n, dtype=uint8)
static_cast(input_data, dtype)
finfo(dtype)
program_id(axis)
num_programs(axes=None)
program_ndim()
par_dim(size)
spmd_dim(first, second)
nc(size)
gemm_grid, gemm_stationary_grid()
"""
LANGUAGE_VALUES = """bool_ int8 int16 int32 uint8 uint16 uint32 float16 float32 bfloat16 tfloat32
float8_e4m3 float8_e5m2 sbuf psum hbm private_hbm shared_hbm mgrid fp32 bfp16 par_dim nc spmd_dim"""
LANGUAGE_RECORDS = {
    "tile_size": """pmax psum_fmax gemm_stationary_fmax gemm_moving_fmax bn_stats_fmax
        psum_min_align sbuf_min_align total_available_sbuf_size""",
    "fp32": "min",
    "bfp16": "min",
}

TOP_VALUES = """jit benchmark baremetal profile simulate_kernel trace tensor FrameworkKernel
language isa typing compiler errors nccl"""

UNDOCUMENTED = ("lazy_initialization", "init_value")
"""Keywords that published kernels pass to what makes a tensor; they change nothing here."""

# name -> what to write instead
REFUSED = {
    "nki.language.all_reduce": "one program that reduces over its own tiles",
    "nki.language.gemm_grid": "nl.mgrid[0:128, 0:512]",
    "nki.language.gemm_stationary_grid": "nl.mgrid[0:128, 0:128]",
    "nki.isa.builtin_custom_op": "instructions of nki.isa",
    "nki.isa.tensor_copy_dynamic_dst": "nisa.dma_copy through HBM with an index tile",
}
"""Documented names that the simulator refuses, because it has no documented semantics for them."""


@functools.cache
def beta_1() -> Api:
    """Return the API of NKI Beta 1 under the names of the current one ("nki.isa.nc_matmul").

    So one set of lint rules and one simulator serve both.
    """
    functions = {
        function.name: function
        for module, text, more in (
            ("nki.isa", ISA, "mask=None, dtype=None"),
            ("nki.isa", ISA_WITHOUT_DTYPE, "mask=None"),
            ("nki.isa", ISA_UNMASKED, ""),
            ("nki.language", LANGUAGE, "mask=None"),
            ("nki.language", LANGUAGE_UNMASKED, ""),
        )
        for function in entries(module, text, more)
    }
    members = {f"nki.isa.{name}": tuple(text.split()) for name, text in ISA_ENUMS.items()}
    members |= {f"nki.language.{name}": tuple(t.split()) for name, t in LANGUAGE_RECORDS.items()}
    values = {f"nki.isa.{n}" for n in ISA_VALUES.split()} | set(members)
    values |= {f"nki.language.{n}" for n in LANGUAGE_VALUES.split()}
    values |= {f"nki.{n}" for n in TOP_VALUES.split()}
    return Api("0.1", functions, frozenset(values), members)
