"""Two programs that use one place, one of them to write, with no wait between, are warned of."""

import textwrap

import numpy as np
import pytest
from simulator_kernels import refused, run

from nmm_compiler import errors

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
