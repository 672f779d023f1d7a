"""The device traces a loop's body once: what differs from turn to turn in Python is refused."""

import itertools
import textwrap

import ml_dtypes
import numpy as np
import pytest
from simulator_kernels import refused, run

from nmm_compiler import errors
from nmm_compiler.simulator.run import ArraySpec

BEFORE = """
kept = [nl.zeros((4, 4), nl.float32), nl.zeros((4, 4), nl.float32)]
x, y = kept
bank = nl.ndarray((4, 4), nl.float32, nl.psum)
n = {"n": 0}
made = []
r = nisa.register_alloc(2)
count = nl.full((1, 1), 3, nl.int32)
flag = nisa.register_alloc(3)
result = nl.zeros((4, 4), nl.float32, nl.shared_hbm)
"""
LOOPS = {
    "fori_loop": "def body(i):\n{}\nnl.fori_loop(0, 3, body)",
    "dynamic_range": "for i in nl.dynamic_range(3):\n{}",
    "while_loop": """\
def body(i):
{}
    nisa.tensor_scalar(dst=count, data=count, op0=nl.add, operand0=-1.0)
    left = nisa.register_alloc()
    nisa.register_load(left, count)
    return left
nl.while_loop(flag, body)""",
}
COUNT = "n['n'] += 1\n"
CHANGES = {
    "immediate": "nisa.memset(dst=x, value=n['n'])",
    "toggled tile": "nisa.memset(dst=kept[n['n'] % 2], value=1)",
    "pattern": "nisa.memset(dst=x[:, 0 : n['n']], value=1)",
    "offset": "nisa.memset(dst=x[:, n['n'] : n['n'] + 1], value=1)",
    "offset of ap": "nisa.memset(dst=x.ap([[4, 4], [1, 1]], offset=n['n']), value=1)",
    "dtype": "own = nl.ndarray((4, 4), [nl.int8, nl.uint8][n['n'] % 2])\nnisa.memset(own, value=1)",
    "opcode": "if n['n'] == 1:\n    nisa.memset(x, value=1)\nelse:\n    nisa.tensor_copy(x, y)",
    "operator": "nisa.tensor_tensor(x, x, y, op=[nl.add, nl.multiply][n['n'] % 2])",
    "scalar operand": "nisa.tensor_scalar(x, x, op0=nl.add, operand0=float(n['n']))",
    "pattern of iota": "nisa.iota(dst=x, pattern=[[1, 4]], offset=n['n'])",
    "engine": "nisa.memset(x, value=1, engine=(nisa.engine.vector, nisa.engine.gpsimd)[n['n'] % 2]"
    ")",
    "more": "for _ in range(n['n']):\n    nisa.memset(x, value=1)",
    "less": "for _ in range(4 - n['n']):\n    nisa.memset(x, value=1)",
    "a store": "nisa.dma_copy(dst=result[n['n'] : n['n'] + 1], src=x[0:1])",
    "new register": "q = nisa.register_alloc(n['n'])\nnisa.register_move(r, q)",
    "moved register": "nisa.register_move(r, n['n'])",
    "sum with a register": "nisa.dma_copy(dst=result.ap([[4, 1], [1, 4]], scalar_offset=r + n['n'])"
    ", src=x[0:1])",
    "slice by a sum": "nisa.memset(dst=x[:, nl.ds(r - n['n'], 1)], value=1)",
    "bound of an inner loop": "nl.fori_loop(0, n['n'], lambda j: nisa.memset(x, value=1) and None)",
    "body of an inner loop": "nl.fori_loop(0, 2, lambda j: nisa.memset(x, value=n['n']) and None)",
    "tile of the turn before": "made.append(nl.zeros((4, 4), nl.float32))\n"
    "nisa.tensor_copy(x, made[max(n['n'] - 2, 0)])",
    "constant": "nisa.dma_copy(x, nl.shared_constant(np.full((4, 4), n['n'], np.float32)))",
    "printed text": "nl.device_print(f\"turn {n['n']}\", x)",
}
MODES = ("functional", "timing")
PLACES = [
    (loop, mode) for loop, mode in itertools.product(LOOPS, MODES)
    if (loop, mode) != ("while_loop", "timing")  # the condition would need data
]  # fmt: skip


def in_turns(loop, body, after="", mode="functional", **options):
    text = BEFORE + LOOPS[loop].format(textwrap.indent(body, "    ")) + f"\n{after}\nreturn result"
    return run(text, mode=mode, **options)


@pytest.mark.parametrize(("loop", "mode"), PLACES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_from_turn_to_turn_is_refused(change, loop, mode):
    with pytest.raises(errors.HazardError, match="traces the body once") as caught:
        in_turns(loop, COUNT + CHANGES[change], mode=mode)
    with open(caught.value.file) as file:
        line = file.readlines()[caught.value.line - 1].strip()
    assert line in CHANGES[change] or change == "less", line


def test_without_strict_rules_it_is_a_warning():
    done = in_turns("fori_loop", COUNT + CHANGES["immediate"], strict=False)
    assert "traces the body once" in "".join(done.warnings)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_product_that_adds_to_that_of_the_turn_before(loop):
    """The compiler decides once which product overwrites PSUM."""
    product = "nisa.nc_matmul(bank, x, y{})"
    with pytest.raises(errors.HazardError, match="overwrites"):
        in_turns(loop, product.format(""))
    first = "nisa.nc_matmul(bank, x, y, accumulate=False)\n"
    in_turns(loop, first + product.format(", accumulate=True"))
    in_turns(loop, "bank = nl.ndarray((4, 4), nl.float32, nl.psum)\n" + product.format(""))


@pytest.mark.parametrize(("loop", "mode"), PLACES)
@pytest.mark.parametrize("use", ["nisa.tensor_copy(x, made[0])", "result = made[-1]"])
def test_a_tensor_of_a_turn_ends_with_it(use, loop, mode):
    """On the device all turns have one such tile, here each has its own."""
    where = "nl.sbuf" if "copy" in use else "nl.shared_hbm"
    body = f"t = nl.zeros((4, 4), nl.float32, {where})\nmade.append(t)"
    with pytest.raises(errors.HazardError, match="made in a turn"):
        in_turns(loop, body, use, mode=mode)
    in_turns(loop, body, mode=mode)


def test_a_tile_of_an_inner_turn_ends_with_that():
    body = "made.clear()\nnl.fori_loop(0, 2, lambda j: made.append(nl.zeros((4, 4), nl.float32)))" \
           "\nnisa.tensor_copy(x, made[0])"  # fmt: skip
    with pytest.raises(errors.HazardError):
        in_turns("fori_loop", body)


@pytest.mark.parametrize("leave", ["break", "return result"])
def test_python_does_not_leave_a_loop_on_the_device(leave):
    body = f"{COUNT}nisa.memset(x, value=1)\nif n['n'] == 2:\n    {leave}"
    with pytest.raises(errors.SimulationError, match="runs to its bound"):
        in_turns("dynamic_range", body)


SAME = {
    "nothing": "pass",
    "own tiles": "t = nl.zeros((4, 4), nl.float32)\nnisa.tensor_tensor(x, x, t, op=nl.add)",
    "NaN": "nisa.memset(x, value=float('nan'))",
    "index": "nisa.dma_copy(dst=result.ap([[4, 1], [1, 4]], scalar_offset=i), src=x[0:1])",
    "select": "nisa.dma_copy(dst=result.select(0, i), src=x[0:1])",
    "slice of HBM": "nisa.dma_copy(dst=result[i], src=x[0:1])",
    "sum": "nisa.dma_copy(dst=result[nl.ds(i + 0, 1)], src=x[0:1])",
    "sums with the numbers of tensors": "t = nl.zeros((1, 1), nl.int32)\n"
    "for k in range(40):\n    nisa.register_store(t, i + k)",
    "free slice": "nisa.memset(dst=x[:, nl.ds(i, 1)], value=1)",
    "part of a slice": "nisa.memset(dst=x[:, nl.ds(i, 1)][0:2], value=1)",
    "stored register": "t = nl.zeros((1, 1), nl.int32)\nnisa.register_store(t, i)\n"
    "nisa.dma_copy(dst=result.select(0, t), src=x[0:1])",
    "identity": "nisa.tensor_copy(x, nl.shared_identity_matrix(4, nl.float32))",
    "inner identity": "nl.fori_loop(0, 2, lambda j: nisa.tensor_copy(x, "
    "nl.shared_identity_matrix(4, nl.float32)) and None)",
    "broadcast": "nisa.tensor_copy(x, nl.broadcast_to(y[0:1], (4, 4)))",
    "constant": "nisa.dma_copy(x, nl.shared_constant(np.ones((4, 4), np.float32)))",
    "inner loop over a register": "nl.fori_loop(0, i, lambda j: nisa.memset(x, value=1) and None)\n"
    "t = nl.zeros((4, 4), nl.float32)\nnisa.tensor_copy(x, t)",
    "inner loop over a sum": "nl.fori_loop(i, i + 1, lambda j: nisa.memset(x[:, nl.ds(j, 1)], "
    "value=1) and None)",
    "unrolled": "for j in range(3):\n    nisa.memset(x, value=j)",
    "moved register": "nisa.register_move(r, 3)\nnisa.memset(x[:, nl.ds(r, 1)], value=1)",
    "kept list": "for t in kept:\n    nisa.memset(t, value=1)",
}


@pytest.mark.parametrize(("loop", "mode"), PLACES)
@pytest.mark.parametrize("body", SAME)
def test_what_is_the_same_in_every_turn_runs(body, loop, mode):
    text = SAME[body]
    if loop == "while_loop":
        text = "i = i - 1\n" + text
    in_turns(loop, text, mode=mode)


def test_turns_compute_what_registers_say():
    body = "nisa.memset(dst=x[:, nl.ds(i, 1)], value=2)\nnisa.dma_copy(dst=result[i], src=x[0:1])"
    wanted = [[2, 0, 0, 0], [2, 2, 0, 0], [2, 2, 2, 0], [0, 0, 0, 0]]
    assert np.array_equal(in_turns("fori_loop", body).output, wanted)


REGISTERS = {
    **LOOPS,
    "register_alloc": "i = nisa.register_alloc(1)\nif True:\n{}",
    "arithmetic": "i = nisa.register_alloc(1) + 1\nif True:\n{}",
}
ASKED = (
    "i == 0", "0 == i", "i == r", "i != 0", "0 != i", "i < 2", "i <= 2", "i > 2", "2 >= i",
    "bool(i)", "not i", "i and 1", "1 if i else 2", "int(i)", "float(i)", "range(i)",
    "list(range(0, 4, i))", "kept[i]", "i in (0, 1)", "min(i, 2)", "max([0, i])", "'%d' % i",
    "nl.ndarray((i, 4), nl.float32)", "nl.ndarray((4, i), nl.float32)", "x.reshape((4, i))",
    "nisa.iota(dst=x, pattern=[[1, 4]], offset=i)", "nisa.memset(x, value=i)",
    "x[:, nl.ds(0, i)]", "x.ap([[4, 4], [1, i]])", "x.ap([[4, 4], [1, 1]], offset=i)",
)  # fmt: skip


@pytest.mark.parametrize("source", REGISTERS)
@pytest.mark.parametrize("asked", ASKED)
def test_python_does_not_know_what_a_register_holds(asked, source):
    text = BEFORE + REGISTERS[source].format(f"    {asked}\n") + "\nreturn result"
    with pytest.raises((errors.SimulationError, TypeError)) as caught:
        run(text)
    with open(caught.value.file) as file:
        assert file.readlines()[caught.value.line - 1].strip() == asked


@pytest.mark.parametrize("memory", ["nl.sbuf", "nl.psum", "nl.hbm"])
@pytest.mark.parametrize("source", REGISTERS)
@pytest.mark.parametrize(
    "view",
    ["t[i]", "t[i, 0:4]", "t[nl.ds(i, 1)]", "t[i : i + 1]", "t.slice(0, i, i + 1)",
     "t.select(0, i)", "t.ap([[4, 1], [1, 4]], scalar_offset=i, indirect_dim=0)"],
)  # fmt: skip
def test_a_register_does_not_choose_partitions(view, source, memory):
    body = f"    t = nl.ndarray((8, 4), nl.float32, {memory})\n    {view}\n"
    text = BEFORE + REGISTERS[source].format(body) + "\nreturn result"
    with refused(errors.OperandError, "of the partition dimension", unless=memory == "nl.hbm"):
        run(text)


def test_two_programs_each_compare_their_own_turns():
    body = """
        r = nl.ndarray((8, 64), a.dtype, nl.shared_hbm)
        me = nl.program_id(0)

        def body(i):
            t = nl.ndarray((4, 64), a.dtype, nl.sbuf)
            nisa.dma_copy(dst=t, src=a[4 * me : 4 * me + 4])
            nisa.dma_copy(dst=r[4 * me : 4 * me + 4], src=t)

        nl.fori_loop(0, 2, body)
        return r
    """
    a = np.arange(512).reshape(8, 64).astype(ml_dtypes.bfloat16)
    assert np.array_equal(run(body, a, grid=2).output, a)
    run(body, ArraySpec(a.shape, "bfloat16"), grid=2, mode="timing")
