"""One rule for all instructions: what may lie over an operand that is still read.

An identical view is fine for elementwise work, and what lies behind the reading position; all other
operands share no element with dst. Each row is a call with D for dst and S for that operand.

Two programs that use one place, one of them to write, with no wait between, are warned of."""

import textwrap

import numpy as np
import pytest
from simulator_kernels import refused, run

from nmm_compiler import errors
from nmm_compiler.nki_api.api import api
from nmm_compiler.simulator.isa.names import INSTRUCTIONS

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
    assert {op for op in INSTRUCTIONS if len(INSTRUCTIONS[op].writes) > 1} == {
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


WRITES = """
result = nl.ndarray((128, 8), nl.float32, nl.shared_hbm, name="result")
tile = nl.ndarray((128, 8), nl.float32, nl.sbuf)
core = nl.program_id(0)
nisa.memset(dst=tile, value={zeros})
nisa.dma_copy(dst=result, src=tile)
{between}
nisa.memset(dst=tile, value=1 + core)
half = nl.ds(core * 64, 64)
{store}
return result
"""
DIRECT = "nisa.dma_copy(dst=result[half, :], src=tile[0:64, :])"
SCATTERED = """
rows = nl.ndarray((64, 1), nl.int32, nl.sbuf)
nisa.iota(dst=rows, pattern=[[1, 1]], offset=core * 64, channel_multiplier=1)
nisa.dma_copy(dst=result.ap(pattern=[[8, 64], [1, 8]], offset=0, vector_offset=rows,
                            indirect_dim=0), src=tile[0:64, :])
"""
ROWS = """
rows = nl.full((64, 1), 0, nl.int32)
nisa.memset(dst=rows[0:32], value=1000)
table = nl.full((64, 8), 1.0 + core, nl.float32, nl.private_hbm)
nisa.dma_copy(dst=result[half, :], src=table.vector_select(0, rows), oob_mode=nisa.oob_mode.{mode})
"""
SKIPPED = ROWS.format(mode="skip")
SUMMED = "nisa.dma_compute(result[half, :], [tile[0:64, :]], nl.add)"
AS_BITS = "nisa.dma_copy(dst=result[half, :].view(nl.int32), src=tile[0:64, :].view(nl.int32))"
AS_HALVES = "nisa.dma_copy(dst=result[half, :].view(nl.int16), src=tile[0:64, :].view(nl.int16))"
BARRIER = "nisa.core_barrier(result, (0, 1))"
EXCHANGE = """
other = nl.ndarray((128, 8), nl.float32, nl.sbuf)
nisa.sendrecv(src=tile, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
"""


def races(zeros="0", between="", store=DIRECT):
    done = run(WRITES.format(zeros=zeros, between=between, store=store), grid=2)
    return done.output, [w for w in done.warnings if "two programs write to one place" in w]


@pytest.mark.parametrize(
    ("store", "count"),
    [(DIRECT, 512), (SCATTERED, 512), (SUMMED, 512), (AS_BITS, 512), (AS_HALVES, 512),
     (SKIPPED, 256)],
)  # fmt: skip
def test_zeros_of_the_other_program_over_what_one_has_stored(store, count):
    output, (found,) = races(store=store)
    assert f"{count} of 1024 elements that program 1 writes to 'result' (128, 8)" in found
    assert np.all(output[:32] == (store != SKIPPED)), "rows without an index are skipped"
    assert np.all(output[32:64] == 1), "in step, both programs' zeros came first"
    assert np.all(output[96:] == 2)


@pytest.mark.parametrize("store", [DIRECT, SCATTERED, SKIPPED, SUMMED, AS_BITS, AS_HALVES])
@pytest.mark.parametrize("between", [BARRIER, EXCHANGE])
def test_programs_that_wait_for_each_other_do_not_race(between, store):
    output, found = races(between=between, store=store)
    assert not found
    assert np.all(output[32:64] == 1)
    assert np.all(output[96:] == 2)


LATE = """
result = nl.ndarray((128, 8), nl.float32, nl.shared_hbm, name="result")
tile = nl.ndarray((128, 8), nl.float32, nl.sbuf)
core = nl.program_id(0)
nisa.memset(dst=tile, value=1 + core)
if core == 1:
    nisa.dma_copy(dst=result[0:64, :], src=tile[0:64, :])
nisa.dma_copy(dst=result, src=tile)
return result
"""


def test_of_two_racing_writes_the_one_with_the_higher_number_stays():
    output = run(LATE, grid=2).output
    assert np.all(output == 2), "program 1's second write is later than program 0's first"
    output = run(WRITES.format(zeros="0", between="", store=DIRECT), grid=2).output
    assert np.all(output[:64] == 1), "program 0's second write is later than program 1's first"


@pytest.mark.parametrize("value", [1, np.nan])
@pytest.mark.parametrize("returned", ["result", "out(load(result))"])
def test_equal_values_are_no_race(returned, value):
    """NaN too: bits are compared. What both have written may be read by both."""
    body = f"""
    result = nl.ndarray((128, 8), nl.float32, nl.shared_hbm)
    nisa.dma_copy(dst=result, src=load(a))
    return {returned}
    """
    given = np.full((128, 8), value, np.float32)
    done = run(body, given, grid=2)
    assert not done.warnings
    assert np.array_equal(done.output, given, equal_nan=True)


READS = """
kept = nl.ndarray((128, 8), nl.float32, nl.shared_hbm, name="kept")
result = nl.ndarray((256, 8), nl.float32, nl.shared_hbm, name="result")
tile = nl.full((128, 8), 1.0, nl.float32)
core = nl.program_id(0)
if core == {first}:
    nisa.dma_copy(dst=kept, src=tile)
nisa.core_barrier(kept, (0, 1))
if core == {writer}:
    nisa.memset(dst=tile, value={value})
    nisa.dma_copy(dst=kept{part}, src=tile{part})
{between}
if core != {writer}:
{read}
rows = nl.ds(core * 128, 128)
nisa.dma_copy(dst=result[rows, :], src=tile)
return result
"""
HOW = {
    "dma_copy": "nisa.dma_copy(dst=tile, src=kept)",
    "part": "nisa.dma_copy(dst=tile[0:8], src=kept[56:64])",
    "vector_offset": "i = nl.full((8, 1), 3, nl.int32)\n"
    "nisa.dma_copy(dst=tile[0:8], src=kept.vector_select(0, i))",
    "scalar_offset": "i = nisa.register_alloc(3)\n"
    "nisa.dma_copy(dst=tile[0:1], src=kept.ap([[8, 1], [1, 8]], scalar_offset=i))",
    "register": "i = nisa.register_alloc()\nnisa.register_load(i, kept.view(nl.int32)[0, 0:1])",
    "dma_compute": "nisa.dma_compute(tile, [tile, kept], nl.add)",
    "dma_transpose": "t = nl.ndarray((16, 128), nl.bfloat16)\n"
    "nisa.dma_transpose(dst=t, src=kept.view(nl.bfloat16))",
    "bits": "nisa.dma_copy(dst=tile.view(nl.int32), src=kept.view(nl.int32))",
    "to HBM": "own = nl.ndarray((128, 8), nl.float32, nl.private_hbm)\n"
    "nisa.dma_copy(dst=own, src=kept)",
    "transposed": "t = nl.load_transpose2d(kept.view(nl.bfloat16))",
}


def uses(how, writer=0, between="", part="", value=2.0):
    read = textwrap.indent(HOW[how], "    ")
    text = READS.format(
        writer=writer, first=1 - writer, between=between, part=part, value=value, read=read
    )
    return [w for w in run(text, grid=2).warnings if "two programs" in w]


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("how", HOW)
def test_a_read_of_what_the_other_program_writes(how, writer):
    """Program 1 runs first here: it writes before the other reads, or reads before it writes."""
    (found,) = uses(how, writer)
    assert "two programs use one place" in found
    assert ("were written by" if writer == 1 else "were read by") in found
    assert "'kept' (128, 8)" in found


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("between", [BARRIER.replace("result", "kept"), EXCHANGE])
def test_a_read_after_a_wait_is_no_race(how, writer, between):
    assert not uses(how, writer, between)


@pytest.mark.parametrize("writer", [0, 1])
def test_other_rows_are_no_race(writer):
    assert not uses("part", writer, part="[0:32]")
    assert uses("part", writer, part="[32:64]")


def test_a_write_of_the_same_values_is_no_race_for_who_has_read_them():
    assert not uses("dma_copy", writer=0, value=1.0)


@pytest.mark.parametrize("mode", ["functional", "timing"])
@pytest.mark.parametrize("grid", [1, 2])
@pytest.mark.parametrize(
    "constant",
    ["np.full((4, 8), {}, np.float32)", "np.ones((4, 8), ['int32', 'float32'][int({})])",
     "np.ones((4 + int({}), 8), np.float32)", "files[int({})]"],
)  # fmt: skip
def test_a_shared_constant_is_the_same_for_all_programs(constant, grid, mode, tmp_path):
    files = [str(tmp_path / f"{n}.npy") for n in range(2)]
    for n, file in enumerate(files):
        np.save(file, np.full((4, 8), n, np.float32))
    body = f"""
    files = {files}
    c = nl.shared_constant({{}})
    t = nl.ndarray(c.shape, c.dtype)
    nisa.dma_copy(dst=t, src=c)
    return a
    """
    a = np.ones((4, 8), np.float32)
    run(body.format(constant.format("1")), a, grid=grid, mode=mode)
    differs = body.format(constant.format("nl.program_id(0)"))
    with refused(errors.SimulationError, "shared_constant", unless=grid == 1):
        run(differs, a, grid=grid, mode=mode)


@pytest.mark.parametrize("mode", ["functional", "timing"])
@pytest.mark.parametrize("grid", [1, 2])
@pytest.mark.parametrize(
    "write",
    ["nisa.memset({}, value=0)", "nisa.tensor_copy({}, t)", "nisa.dma_copy({}, t)",
     "nisa.tensor_scalar({0}, {0}, op0=nl.add, operand0=1.0)", "{}[0:4] = t[0:4]",
     "nisa.memset({}[:, 0:1], value=0)", "nisa.memset({}.view(nl.int32), value=0)",
     "nisa.activation(t, nl.copy, t, reduce_res={}[:, 0:1], "
     "reduce_cmd=nisa.reduce_cmd.reset_reduce)",
     "nisa.memset({}.ap([[8, 8], [1, 1]]), value=0)"],
)  # fmt: skip
def test_the_shared_identity_is_not_written(write, grid, mode):
    body = """
    t = nl.zeros((8, 8), nl.float32)
    i = {}
    {}
    again = nl.shared_identity_matrix(8, nl.float32)
    return out(again)
    """
    shared = "nl.shared_identity_matrix(8, nl.float32{})"
    with pytest.raises(errors.HazardError, match="shared constant"):
        run(body.format(shared.format(""), write.format("i")), grid=grid, mode=mode)
    own = body.format(shared.format(", dst=nl.ndarray((8, 8), nl.float32)"), write.format("i"))
    done = run(own, grid=grid, mode=mode)
    assert done.outputs is None or np.array_equal(done.output, np.eye(8))


@pytest.mark.parametrize("mode", ["functional", "timing"])
@pytest.mark.parametrize("grid", [1, 2])
@pytest.mark.parametrize(
    ("edges", "holds"),
    [("0<0", False), ("0<1 1<0", False), ("0<1 1<2 2<0", False), ("2<1 1<0 0<2", False),
     ("0<3 3<1 1<0", False), ("1<0 2<1 3<2", True), ("0<3", True), ("0<3 1<3 2<3 3<1", False),
     ("1<0 2<0 3<1 3<2", True)],
)  # fmt: skip
def test_instructions_do_not_wait_for_each_other(edges, holds, grid, mode):
    """a<b: a depends on b."""
    made = "i = [nisa.memset(x, value=1) for x in t]\n"
    _hold_dependencies(made, edges, holds, grid, mode)


@pytest.mark.parametrize("mode", ["functional", "timing"])
@pytest.mark.parametrize(
    ("second", "holds"),
    [("nisa.tensor_copy(t[1], t[0])", False), ("nisa.memset(t[0][0:2], value=1)", False),
     ("nisa.tensor_copy(t[1][:, 0:1], t[0][:, 3:4])", False),
     ("nisa.tensor_copy(t[3], t[1])", True), ("nisa.memset(t[1], value=1)", True)],
)  # fmt: skip
def test_an_instruction_does_not_wait_for_what_needs_its_data(second, holds, mode):
    """The first depends on the second, or on the third, which takes data that leads back or not."""
    made = f"nisa.memset(t[1], value=2)\ni = [nisa.memset(t[0], value=1), {second}]\n" \
           "i += [nisa.tensor_copy(t[2], t[1])]\n"  # fmt: skip
    _hold_dependencies(made, "0<1", holds, 1, mode)
    reaches_the_last = second.startswith("nisa.tensor_copy(t[1]")
    _hold_dependencies(made, "0<2", not reaches_the_last, 1, mode)


def _hold_dependencies(made, edges, holds, grid, mode):
    lines = "t = [nl.ndarray((4, 4), nl.float32) for _ in range(4)]\n" + made
    for edge in edges.split():
        lines += "i[{}].depends_on(i[{}])\n".format(*edge.split("<"))
    lines += "return out(t[0])"
    with refused(errors.HazardError, r"so that neither ever runs.*\.py:[1-9]", unless=holds):
        run(lines, grid=grid, mode=mode)
