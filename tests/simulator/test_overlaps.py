"""One rule for all instructions: what may lie over an operand that is still read.

An identical view is fine for elementwise work, and what lies behind the reading position; all other
operands share no element with dst. Each row is a call with D for dst and S for that operand.
"""

import numpy as np
import pytest
from simulator_kernels import refused, run

from nmm_compiler import errors
from nmm_compiler.nki_api.api import api
from nmm_compiler.simulator.isa.instruction import INSTRUCTIONS

TILE = "t = nl.full(({shape}), 1, nl.{dtype})\nu = nl.full(({shape}), 1, nl.{dtype})\n" \
       "w = nl.full(({shape}), 1, nl.{dtype})\n" \
       "v = u[:, 0:8]\none = nl.full((32, 1), 1.0, nl.float32)\n" \
       "many = nl.full((32, 1), 1000.0, nl.float32)\n"  # fmt: skip

STREAMS = {
    "tensor_copy": "D, S",
    "tensor_tensor data1": "D, S, v, op=nl.add",
    "tensor_tensor data2": "D, v, S, op=nl.add",
    "tensor_scalar": "D, S, op0=nl.add, operand0=1.0",
    "scalar_tensor_tensor data": "D, S, nl.add, 1.0, nl.add, v",
    "scalar_tensor_tensor operand1": "D, v, nl.add, 1.0, nl.add, S",
    "reciprocal": "D, S",
    "activation": "D, nl.exp, S",
    "activate2 trn3": "D, nl.exp, S, 1.0, 1.0, nl.multiply, nl.add",
    "exponential trn3": "D, S",
    "tensor_scalar_reduce": "D, S, nl.add, 1.0, nl.add",
    "tensor_scalar_cumulative": "D, S, nl.add, nl.add, 1.0",
    "tensor_tensor_scan data0": "D, S, v, 0.0, nl.multiply, nl.add",
    "tensor_tensor_scan data1": "D, v, S, 0.0, nl.multiply, nl.add",
    "affine_select": "D, [[1, 8]], 0, S, 0.0",
    "range_select": "D, S, nl.greater_equal, nl.less, one, many, nisa.reduce_cmd.reset_reduce, one",
    "select_reduce on_true": "D, nl.full((32, 8), 1, nl.uint8), S, 0.0",
    "select_reduce predicate uint8": "D, S, v, 0.0",
    "tensor_copy_predicated src": "D, S, nl.full((32, 8), 1, nl.uint8)",
    "tensor_copy_predicated predicate uint8": "D, v, S",
    "nc_match_replace8 data": "D, S, v, 0.0",
    "nc_n_gather indices uint32": "D, v, S",
    "nc_stream_shuffle": "D, S, list(range(32))",
    "dropout": "D, S, 0.5",
}
WHOLE = {
    "nc_n_gather data uint32": ("t[:, 0:8]", "t[:, 0:8]", "D, S, v"),
    "local_gather src": ("t[:, 0:16]", "t[:, 0:16]", "D, S, nl.full((32, 1), 0, nl.uint16)"),
    "local_gather index uint16": ("t[:, 0:16]", "t[:, 0:1]", "D, u, S"),
    "nc_transpose": ("t[:, 0:32]", "t[:, 0:32]", "D, S, engine=nisa.engine.vector"),
    "max8": ("t[:, 0:8]", "t[:, 0:8]", "D, S"),
    "nc_find_index8 data": ("t.view(nl.uint16)[:, 0:8]", "t[:, 0:8]", "D, S, v"),
    "nc_find_index8 vals": ("t.view(nl.uint16)[:, 0:8]", "t[:, 0:8]", "D, v, S"),
    "nc_match_replace8 vals": ("t[:, 0:8]", "t[:, 0:8]", "D, v, S, 0.0"),
    "bn_stats": ("t[:, 0:6]", "t[:, 0:6]", "D, S"),
    "bn_aggr": ("t[:, 0:2]", "t[:, 0:6]", "D, S"),
    "tensor_partition_reduce": ("t[0:1, 0:8]", "t[:, 0:8]", "D, nl.add, S"),
    "nonzero_with_count int32": ("t[:, 0:9]", "t[:, 0:8]", "D, S"),
    "sequence_bounds": ("t[0:1, 0:16].reshape((1, 2, 8))", "t[0:1, 0:8]", "D, S"),
    "topk val_dst bfloat16 trn3": (
        "t[:, 0:8]", "t[:, 0:8]", "D, nl.zeros((32, 8), nl.uint32), S, 128"
    ),
    "topk idx_dst bfloat16 trn3": ("t.view(nl.uint32)[:, 0:8]", "t[:, 0:8]", "v, D, S, 128"),
    "quantize_mx dst bfloat16 trn3": (
        "t.view(nl.float8_e4m3fn_x4)[:, 0:4]", "t[:, 0:16]", "D, S, nl.zeros((32, 4), nl.uint8)"
    ),
    "quantize_mx dst_scale bfloat16 trn3": (
        "t.view(nl.uint8)[:, 0:4]", "t[:, 0:16]",
        "nl.ndarray((32, 4), nl.float8_e4m3fn_x4), S, D"
    ),
    "tensor_scalar operand0": ("t[:, 0:8]", "t[:, 3:4]", "D, v, op0=nl.add, operand0=S"),
    "activation bias": ("t[:, 0:8]", "t[:, 3:4]", "D, nl.copy, v, bias=S"),
    "activation reduce_res": (
        "t[:, 3:4]", "t[:, 0:8]", "w[:, 8:16], nl.copy, S, reduce_res=D, "
        "reduce_cmd=nisa.reduce_cmd.reset_reduce",
    ),
    "dma_transpose bfloat16": ("t[:, 0:32]", "t[:, 0:32]", "D, S"),
    "sendrecv": (
        "t[:, 0:8]", "t[:, 0:8]", "S, D, 1 - nl.program_id(), 1 - nl.program_id(), 0"
    ),
}  # fmt: skip
TWO = {
    "activation": ("t[:, 3:4]", "D, nl.copy, v, reduce_res=S, reduce_cmd=C"),
    "activate2 trn3": (
        "t[:, 3:4]", "D, nl.copy, v, 1.0, 0.0, nl.multiply, nl.add, reduce_res=S, reduce_cmd=C"
    ),
    "exponential trn3": ("t[:, 3:4]", "D, v, reduce_res=S, reduce_cmd=C"),
    "tensor_scalar_reduce": ("t[:, 3:4]", "D, v, nl.add, 1.0, nl.add, S"),
    "range_select": (
        "t[:, 3:4]", "D, v, nl.greater_equal, nl.less, one, many, reduce_cmd=C, reduce_res=S"
    ),
    "select_reduce": (
        "t[:, 3:4]", "D, nl.full((32, 8), 1, nl.uint8), v, 0.0, reduce_res=S, reduce_cmd=C"
    ),
    "nc_match_replace8": ("t.view(nl.uint32)[:, 7:15]", "D, v, v, 0.0, dst_idx=S"),
    "topk bfloat16 trn3": ("t.view(nl.uint32)[:, 2:10]", "D, S, v, 128"),
    "quantize_mx bfloat16 trn3": (
        "t.view(nl.uint8)[:, 2:6]",
        "t.view(nl.float8_e4m3fn_x4)[:, 0:4], u[:, 0:16], S",
    ),
}  # fmt: skip
"""Instructions of two results: the second one inside of the first, and the call."""
APART = {  # PSUM and SBUF, nothing read, or not of one storage
    "nc_matmul", "nc_matmul_mx", "iota", "memset", "rng", "rand2", "rand_get_state",
    "register_store", "core_barrier", "register_load", "register_move", "set_rng_seed",
    "rand_set_state", "register_alloc", "get_nc_version", "get_nc_sub_version",
}  # fmt: skip
ELSEWHERE = {"dma_copy", "dma_compute", "tensor_reduce", "activation_reduce"}
MODES = ("functional", "timing")


def attempt(row, dst, src, call, mode):
    op, *words = row.split()
    dtype = next((w for w in words if w in ("uint8", "uint16", "uint32", "int32", "bfloat16")),
                 "float32")  # fmt: skip
    tile = TILE.format(shape="32, 64", dtype=dtype)
    text = tile + f"nisa.{op}({call.replace('D', dst).replace('S', src)})\nreturn a"
    run(
        text, np.ones((2, 2), np.float32), mode=mode, grid=1 + (op == "sendrecv"),
        target="trn3" if "trn3" in words else "trn2",
    )  # fmt: skip


def test_every_instruction_that_reads_and_writes_is_here():
    known = {row.split()[0] for row in (*STREAMS, *WHOLE)} | APART | ELSEWHERE
    functions = {name.rpartition(".")[2] for name in api("0.6").functions if "nki.isa." in name}
    assert functions - known == set()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", STREAMS)
def test_elementwise_work_may_be_in_place(row, mode):
    attempt(row, "t[:, 0:8]", "t[:, 0:8]", STREAMS[row], mode)
    attempt(row, "t[:, 0:8]", "t[:, 1:9]", STREAMS[row], mode)
    with pytest.raises(errors.HazardError, match="still has to read"):
        attempt(row, "t[:, 1:9]", "t[:, 0:8]", STREAMS[row], mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", WHOLE)
def test_what_is_read_in_another_order_is_not_written(row, mode):
    dst, src, call = WHOLE[row]
    with pytest.raises(errors.HazardError, match="still has to read"):
        attempt(row, dst, src, call, mode)
    attempt(row, dst.replace("t", "w", 1), src, call, mode)


def test_every_instruction_of_two_results_is_here():
    assert {op for op in INSTRUCTIONS if len(INSTRUCTIONS[op].row.writes) > 1} == {
        row.split()[0] for row in TWO
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", TWO)
def test_two_results_share_no_element(row, mode):
    other, call = TWO[row]
    call = call.replace("=C", "=nisa.reduce_cmd.reset_reduce")
    with pytest.raises(errors.HazardError, match="to the same elements"):
        attempt(row, "t[:, 0:8]", other, call, mode)
    attempt(row, "t[:, 0:8]", other.replace("t", "w", 1), call, mode)


@pytest.mark.parametrize(("dst", "holds"), [("t[:, 0:4]", True), ("t[:, 2:6]", False)])
def test_a_reduction_writes_behind_what_it_reads(dst, holds):
    text = TILE.format(shape="32, 64", dtype="float32")
    text += f"nisa.tensor_reduce({dst}, nl.add, t[:, 0:8].reshape((32, 4, 2)), 2)\nreturn a"
    with refused(errors.HazardError, unless=holds):
        run(text, np.ones((2, 2), np.float32))


def test_bytes_inside_of_a_wider_element_count():
    text = TILE.format(shape="32, 64", dtype="float32")
    text += "nisa.tensor_copy(t[:, 4:8], t.view(nl.bfloat16)[:, 5:9])\nreturn a"
    with pytest.raises(errors.HazardError):
        run(text, np.ones((2, 2), np.float32))


DMA = {"dma_copy": "nisa.dma_copy(D, S)", "dma_compute": "nisa.dma_compute(D, [S, S], nl.add)"}
MOVES = {
    "t[0:16, 0:8], t[0:16, 0:8]": True,
    "t[0:16, 0:8], t[16:32, 0:8]": True,
    "t[0:16, 0:8], t[0:16, 8:16]": True,
    "t[1:17, 0:8], t[0:16, 0:8]": False,
    "t[0:16, 0:8], t[1:17, 0:8]": False,
    "t[0:16, 1:9], t[0:16, 0:8]": False,
    "t[0:16, 0:8], t[0:16, 1:9]": False,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("memory", ["nl.sbuf", "nl.shared_hbm"])
@pytest.mark.parametrize("op", DMA)
@pytest.mark.parametrize("views", MOVES)
def test_a_dma_moves_elements_in_no_order(views, op, memory, mode):
    dst, src = views.split(", t[")
    call = DMA[op].replace("D", dst).replace("S", "t[" + src)
    text = f"t = nl.full((32, 64), 1.0, nl.float32, {memory})\n{call}\nreturn a"
    with refused(errors.HazardError, "still has to read", unless=MOVES[views]):
        run(text, np.ones((2, 2), np.float32), mode=mode)


INDEXED = """
t = nl.full((32, 8), 1.0, nl.float32, nl.shared_hbm)
rows = nl.ndarray((4, 1), nl.int32)
nisa.iota(rows, [[1, 1]], {first}, 1)
one = nisa.register_alloc({first})
chosen = {{
    "vector": t.ap([[8, 4], [1, 8]], vector_offset=rows),
    "vector_select": t.vector_select(0, rows),
    "scalar": t.ap([[8, 4], [1, 8]], scalar_offset=one),
}}["{kind}"]
nisa.dma_copy({call})
return t
"""


@pytest.mark.parametrize("kind", ["vector", "vector_select", "scalar"])
@pytest.mark.parametrize("call", ["chosen, t[8:12]", "t[8:12], chosen"])
def test_rows_that_are_chosen_at_run_time_count_where_they_are(call, kind):
    run(INDEXED.format(kind=kind, call=call, first=16))
    with pytest.raises(errors.HazardError, match="still has to read"):
        run(INDEXED.format(kind=kind, call=call, first=10))


@pytest.mark.parametrize(("dim", "holds"), [(0, True), (1, False), (-1, False)])
@pytest.mark.parametrize("mode", MODES)
def test_a_vector_of_offsets_chooses_rows(dim, holds, mode):
    text = INDEXED.format(kind="vector", call="nl.ndarray((4, 8), nl.float32), chosen", first=1)
    text = text.replace("vector_offset=rows", f"vector_offset=rows, indirect_dim={dim}")
    with refused(errors.UnsupportedInstructionError, "dimension 0 only", unless=holds):
        run(text, mode=mode)


SUMS = {
    "tensor_scalar_reduce": "t[P], t[P], nl.add, 0.0, nl.add, res[P], reduce_cmd=C",
    "tensor_scalar_cumulative": "t[P], t[P], nl.add, nl.add, 0.0, reduce_cmd=C",
    "range_select": "t[P], t[P], nl.greater_equal, nl.less, res[P], top[P], reduce_cmd=C, "
    "reduce_res=res[P], reduce_op=nl.maximum",
    "select_reduce": "t[P], mask[P], t[P], 0.0, reduce_res=res[P], reduce_cmd=C",
    "exponential": "t[P], t[P], reduce_res=res[P], reduce_cmd=C",
    "activation": "t[P], nl.copy, t[P], reduce_res=res[P], reduce_cmd=C",
    "activate2": "t[P], nl.copy, t[P], 1.0, 0.0, nl.multiply, nl.add, reduce_res=res[P], "
    "reduce_cmd=C",
}
VECTOR = tuple(op for op in SUMS if not op.startswith("activat"))


TILES_OF_SUMS = """
t = nl.full((128, 8), 0.5, nl.float32)
res = nl.zeros((128, 1), nl.float32)
top = nl.full((128, 1), 9.0, nl.float32)
mask = nl.full((128, 8), 1, nl.uint8)
"""


def summed(*calls):
    lines = TILES_OF_SUMS
    for op, rows, command in calls:
        given = SUMS[op].replace("P", rows).replace("=C", f"=nisa.reduce_cmd.{command}")
        lines += f"nisa.{op}({given})\n"
    return run(lines + "return a", np.ones((2, 2), np.float32), target="trn3")


@pytest.mark.parametrize("op", SUMS)
def test_a_sum_goes_on_where_it_began(op):
    summed((op, "0:32", "reset_reduce"), (op, "0:32", "reduce"))
    with pytest.raises(errors.HazardError, match="which no instruction has set"):
        summed((op, "0:32", "reduce"))
    for first, then in (("0:32", "32:64"), ("32:64", "0:32"), ("0:32", "0:64"), ("0:64", "0:32")):
        with pytest.raises(errors.HazardError, match="the last instruction has set"):
            summed((op, first, "reset_reduce"), (op, then, "reduce"))


@pytest.mark.parametrize("then", SUMS)
@pytest.mark.parametrize("first", SUMS)
def test_instructions_of_one_engine_share_its_sums(first, then):
    calls = (first, "0:32", "reset_reduce"), (then, "0:32", "reduce")
    with refused(errors.HazardError, unless=(first in VECTOR) == (then in VECTOR)):
        summed(*calls)
