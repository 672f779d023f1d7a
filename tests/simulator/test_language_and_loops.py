"""nki.language functions, registers, LNC=2 programs, and loops on the device.

The device traces a loop's body once: what differs from turn to turn in Python is refused.
"""

import itertools
import signal
import textwrap
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from scipy import special
from simulator_kernels import kernel_file, refused, run, values

from nmm_compiler import errors
from nmm_compiler.simulator.run import ArraySpec, simulate

BINARY = ["add", "subtract", "multiply", "maximum", "minimum", "less", "greater_equal", "divide"]
SIDES = {"x, y": (0, 1), "x, 2.0": (0, 2), "3.0, x": (3, 0), "x, y[:, 0:1]": (0, 4)}


@pytest.mark.parametrize("sides", SIDES)
def test_binary_functions(sides):
    a, b = values((16, 12)), values((16, 12), seed=1)
    made = ", ".join(f"out(nl.{name}({sides}))" for name in BINARY)
    results = run(f"x, y = nl.load(a), nl.load(b)\nreturn {made}", a, b).outputs
    left, right = ((a, b, np.float32(2), np.float32(3), b[:, :1])[side] for side in SIDES[sides])
    for name, result in zip(BINARY, results, strict=True):
        assert np.array_equal(result, getattr(np, name)(left, right).astype(np.float32)), name


# "exp" stands for the activations, "square" for what the ALU does; test_instructions.py has each.
UNARY = [
    "exp", "square", "negative", "abs", "floor", "ceil", "trunc", "sin", "cos", "tan", "reciprocal",
    "copy",
]  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_unary_functions(name):
    a = values((16, 12)) * 3
    result = run(f"return out(nl.{name}(nl.load(a)))", a).output
    wanted = getattr(np, name)(a.astype(np.float64))
    slack = {"sin": 1e-5, "cos": 1e-5, "tan": 2e-3}.get(name, 4e-7)
    assert (np.abs(result - wanted) <= slack * np.maximum(np.abs(wanted), 1) ** 2).all()


FUNCTIONS = {
    "nl.sum(x, axis=1, keepdims=True)": (lambda x, y: x.sum(1), 1e-5),
    "nl.max(x, axis=[1])": (lambda x, y: x.max(1), 0),
    "nl.min(x, axis=-1)": (lambda x, y: x.min(1), 0),
    "nl.mean(x, axis=1)": (lambda x, y: x.mean(1), 1e-5),
    "nl.var(x, axis=1)": (lambda x, y: x.var(1), 1e-5),
    "nl.prod(x, axis=1)": (lambda x, y: x.prod(1), 1e-5),
    "nl.all(x, axis=1)": (lambda x, y: np.ones(16), 0),
    "nl.softmax(x)": (lambda x, y: special.softmax(x, axis=1), 1e-6),
    "nl.rms_norm(x, nl.full((16, 24), 2.0, nl.float32), axis=1, n=24)": (
        lambda x, y: 2 * x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6), 1e-5,
    ),
    "nl.where(nl.greater(x, y), x, y)": (lambda x, y: np.where(x > y, x, y), 0),
    "nl.zeros_like(x)": (lambda x, y: 0 * x, 0),
    "nl.copy(nl.transpose(x))": (lambda x, y: x.T, 0),
    "nl.load_transpose2d(a)": (lambda x, y: x.T, 0),
    "nl.matmul(nl.load_transpose2d(a), y)": (lambda x, y: x.T @ y, 1e-5),
    "nl.matmul(x, y, transpose_x=True)": (lambda x, y: x.T @ y, 1e-5),
    "nl.broadcast_to(y[0:1], (4, 24))": (lambda x, y: np.repeat(y[0:1], 4, 0), 0),
    "nl.load(nl.shared_constant(np.arange(12, dtype=np.float32).reshape(3, 4)))": (
        lambda x, y: np.arange(12).reshape(3, 4), 0,
    ),
    "nl.shared_identity_matrix(8, dtype=nl.float32)": (lambda x, y: np.eye(8), 0),
    "load(nl.ones((300, 5000), nl.float32, buffer=nl.shared_hbm)[172:300])": (
        lambda x, y: np.ones((128, 5000)), 0,
    ),
    "nl.gather_flattened(x, nl.full((16, 4), 7, nl.int32))": (
        lambda x, y: np.repeat(x[:, 7:8], 4, 1), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", FUNCTIONS)
def test_functions(call):
    wanted, bound = FUNCTIONS[call]
    a, b = values((16, 24)), values((16, 24), seed=1)
    result = run(f"x, y = nl.load(a), nl.load(b)\nreturn out({call})", a, b).output
    want = wanted(a.astype(np.float64), b.astype(np.float64))
    assert np.abs(result.reshape(want.shape) - want).max() <= bound


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "float8_e5m2"])
@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_broadcast_over_partitions_is_exact(dtype, target):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    row = (values((1, 3 * 700)) * 50).astype(kind)
    if dtype in ("float32", "bfloat16", "float16"):
        tiny = ml_dtypes.finfo(kind).smallest_subnormal
        row[0, :5] = np.array([-0.0, np.inf, -np.inf, tiny, -tiny], kind)
    body = """
        rows = nl.ndarray((2, 2100), x.dtype, nl.sbuf)
        nisa.dma_copy(dst=rows[0:1], src=x)
        nisa.dma_copy(dst=rows[1:2], src=x)
        cube = rows[0:1].reshape((1, 3, 700))
        return (out(nl.broadcast_to(rows[0:1], (128, 2100))),
                out(nl.broadcast_to(cube[:, :, 1:650], (128, 3, 649))),
                out(nl.broadcast_to(rows[0:1, 3:4], (64, 600))),
                out(nl.broadcast_to(rows[1:2], (5, 2100))))
    """.replace("x", "a")
    result = run(body, row, target=target)
    cube = row.reshape(1, 3, 700)[:, :, 1:650]
    wanted = [(row, (128, 2100)), (cube, (128, 3, 649)), (row[:, 3:4], (64, 600)), (row, (5, 2100))]
    for output, (source, shape) in zip(result.outputs, wanted, strict=True):
        assert output.dtype == kind
        assert output.tobytes() == np.broadcast_to(source, shape).tobytes()
    products = [i for i in result.trace.instructions if i.op == "nc_matmul"]
    exact = dtype in ("float32", "bfloat16", "float16")
    assert len(products) == (5 + 4 + 1 if exact else 0)
    assert result.trace.psum_peak_banks == exact  # each bank is free again before the next


def test_tile_size_and_versions_follow_the_target():
    body = """
        t = nl.tile_size
        values = [t.pmax, t.psum_bank_fmax, t.gemm_stationary_fmax, t.gemm_moving_fmax,
                  t.psum_num_banks, t.sbuf_fmax_bytes, int(nisa.get_nc_version().value),
                  int(nisa.get_nc_version() >= nisa.nc_version.gen3)]
        r = nl.ndarray((1, 8), nl.int32, nl.sbuf)
        for i, v in enumerate(values):
            nisa.memset(dst=r[:, i], value=v)
        return out(r)
    """
    from nmm_compiler import targets

    for name, generation in (("trn1", 2), ("trn2", 3), ("trn3", 4)):
        usable = targets.get(name).sbuf_usable_bytes_per_partition
        wanted = [128, 512, 128, 512, 8, usable, generation, int(generation >= 3)]
        assert run(body, target=name).output[0].tolist() == wanted


def test_registers_and_device_loops():
    a, n = values((6, 4)), np.array([[5]], np.int32)
    body = """
        reg = nisa.register_alloc()
        nisa.register_load(reg, load(b))
        r = nl.zeros((6, 4), nl.float32, buffer=nl.shared_hbm)
        t = nl.ndarray((1, 4), nl.float32, nl.sbuf)
        seen = nl.zeros((1, 8), nl.int32)

        def body(i):
            nisa.dma_copy(dst=t, src=a.ap([[4, 1], [1, 4]], scalar_offset=i, indirect_dim=0))
            nisa.dma_copy(dst=r.ap([[4, 1], [1, 4]], scalar_offset=i, indirect_dim=0), src=t)

        nl.fori_loop(1, reg, body, step=2)
        for i in nl.dynamic_range(2):
            nisa.dma_copy(dst=r[i * 2 + 2], src=a[i * 2 + 2])
        count = nl.full((1, 1), 3, nl.int32)
        one = nl.full((1, 1), 1, nl.int32)
        total = nl.zeros((1, 1), nl.int32)

        def again(c):
            nisa.tensor_tensor(dst=total, data1=total, data2=count, op=nl.add)
            nisa.tensor_tensor(dst=count, data1=count, data2=one, op=nl.subtract)
            nisa.register_load(c, count)
            return c

        flag = nisa.register_alloc()
        nisa.register_load(flag, count)
        nl.while_loop(flag, again)
        copy = nisa.register_alloc(0)
        nisa.register_move(copy, 7)
        kept = nl.ndarray((1, 1), nl.int32, nl.sbuf)
        nisa.register_store(kept, copy)
        return r, out(total), out(kept)
    """
    r, total, kept = run(body, a, n).outputs
    assert np.array_equal(r[1:5], a[1:5])
    assert (r[[0, 5]] == 0).all()
    assert total[0, 0] == 3 + 2 + 1
    assert kept[0, 0] == 7


def test_a_register_without_a_value_is_not_read():
    body = "r = nisa.register_alloc()\na.ap([[2, 1], [1, 2]], offset=0)[r]\nreturn a"
    with pytest.raises(errors.SimulationError, match="before it has a value"):
        run(body, values((2, 2)))


def test_no_reorder_is_recorded_and_device_print_prints(capsys):
    body = """
        x = load(a)
        with nl.no_reorder():
            nisa.tensor_copy(dst=x, src=x)
            first = nisa.tensor_copy(dst=x, src=x, name="second")
        third = nisa.tensor_copy(dst=x, src=x).depends_on(first)
        nl.device_print("here", x)
        return out(x)
    """
    trace = run(body, values((2, 2))).trace
    assert trace.ordered == [(1, 3)]
    assert trace.instructions[2].name == "second"
    assert trace.instructions[3].after == (trace.instructions[2],)
    assert "here" in capsys.readouterr().out


TWO = """
    me = nl.program_id(0)
    assert nl.num_programs() == 2
    r = nl.ndarray(a.shape, a.dtype, nl.shared_hbm)
    total = nl.ndarray((2, 4), a.dtype, nl.shared_hbm)
    rows = a.shape[0] // 2
    x = load(a[me * rows:(me + 1) * rows])
    y = nl.ndarray(x.shape, x.dtype, nl.sbuf)
    nisa.sendrecv(src=x, dst=y, send_to_rank=1 - me, recv_from_rank=1 - me, pipe_id=0)
    nisa.dma_copy(dst=r[me * rows:(me + 1) * rows], src=y)
    {barrier}
    z = load(r[(1 - me) * rows:(1 - me) * rows + 1])
    nisa.dma_copy(dst=total[me:me + 1], src=z)
    return r, total
"""


def test_two_programs_exchange_and_wait():
    a = values((8, 4))
    body = TWO.format(barrier="nisa.core_barrier(data=r, cores=(0, 1))")
    result = run(body, a, grid=2)
    r, total = result.outputs
    assert np.array_equal(r, np.concatenate([a[4:], a[:4]]))
    assert np.array_equal(total, np.stack([a[0], a[4]]))
    assert len(result.traces) == 2
    assert any(i.op == "core_barrier" for i in result.traces[1].instructions)


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        # it reads what is not there
        (TWO.format(barrier="pass"), errors.HazardError, "never written"),
        ("if nl.program_id(0) == 0:\n    nisa.core_barrier(data=a, cores=(0, 1))\nreturn a",
         errors.SimulationError, "same"),
        ("r = nl.ndarray((2 + nl.program_id(0), 4), a.dtype, nl.shared_hbm)\nreturn a",
         errors.SimulationError, "same"),
        ("assert nl.program_id(0) == 0, 'second fails'\n"
         "nisa.core_barrier(data=a, cores=(0, 1))\nreturn a",
         errors.KernelFailedError, "second fails"),
    ],
)  # fmt: skip
def test_programs_that_part_are_refused(body, kind, said):
    with pytest.raises(kind, match=said):
        run(body, values((8, 4)), grid=2)


def test_a_limit_of_time_ends_a_grid():
    """The signal reaches whichever thread runs; the one that waits for the programs raises."""

    class Over(BaseException):
        pass

    def stop(*_):
        raise Over

    body = """
        for i in range(100000):
            nisa.core_barrier(data=a, cores=(0, 1))
        return a
    """
    start, before = time.process_time(), signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, 0.3)
    try:
        with pytest.raises(Over):
            run(body, values((8, 4)), grid=2)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert time.process_time() - start < 4  # seconds of CPU; all barriers take about 8
    for thread in threading.enumerate():
        if thread.name.startswith("nki-program"):
            thread.join(60)
            assert not thread.is_alive()


def test_timing_mode_needs_no_data():
    """test_rules.py compares its traces with those of data."""
    timed = run("return out(load(a))", ArraySpec((64, 256), "bfloat16"), mode="timing")
    assert timed.outputs is None
    assert timed.output_specs[0].shape == (64, 256)
    assert timed.profile.latency_us > 0
    with pytest.raises(errors.SimulationError, match="no outputs"):
        _ = timed.output


def test_timing_mode_refuses_registers_from_data():
    body = "r = nisa.register_alloc()\nnisa.register_load(r, load(a))\n" \
           "nl.fori_loop(0, r, lambda i: None)\nreturn a"  # fmt: skip
    with pytest.raises(errors.SimulationError, match='mode="full"'):
        run(body, ArraySpec((1, 1), "int32"), mode="timing")


def test_gather_flattened_and_indexed_assignment():
    a = values((8, 10))
    b = np.random.default_rng(0).integers(0, 10, (8, 4)).astype(np.int32)
    body = """
        x, i = nl.load(a), nl.load(b)
        r = nl.zeros((8, 6), nl.float32)
        r[:, 1:5] = nl.gather_flattened(x, i)
        return out(r)
    """
    wanted = np.zeros((8, 6), np.float32)
    wanted[:, 1:5] = np.take_along_axis(a, b.astype(int), 1)
    assert np.array_equal(run(body, a, b).output, wanted)


def test_each_program_may_write_its_part_of_an_input():
    a = np.zeros((4, 3), np.float32)
    body = """
        me = nl.program_id(0)
        t = nl.full((2, 3), 1.0 + me, nl.float32)
        nisa.dma_copy(dst=a[2 * me:2 * me + 2], src=t)
        return a
    """
    run(body, a, grid=2)
    assert np.array_equal(a[:, 0], [1, 1, 2, 2])


LOOP = textwrap.dedent(
    '''
    import nki
    import nki.isa as nisa
    import nki.language as nl

    @nki.jit
    def double(a, on_device):
        """Return 2 a for a [blocks * 128, 512]."""
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        blocks = a.shape[0] // 128
        a_blocks = a.reshape_dim(0, (blocks, 128))
        out_blocks = out.reshape_dim(0, (blocks, 128))

        def body(i):
            at = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
            nisa.register_store(at, i)
            turn(out_blocks.select(0, at), a_blocks.select(0, at))

        if on_device:
            nl.fori_loop(0, blocks, body)
        else:
            for i in range(blocks):
                turn(out_blocks.select(0, i), a_blocks.select(0, i))
        return out

    def turn(out, a):
        held = nl.ndarray((128, 512), dtype=a.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=held, src=a[0:128, 0:512])
        nisa.tensor_scalar(dst=held, data=held, op0=nl.multiply, operand0=2.0)
        nisa.dma_copy(dst=out[0:128, 0:512], src=held)
    '''
)


def profile(blocks, on_device):
    array = ArraySpec((128 * blocks, 512), "bfloat16")
    return simulate(
        f"{kernel_file(LOOP)}:double", array, on_device=on_device, target="trn2", mode="timing"
    ).profile


def test_what_a_loop_on_the_device_costs():
    """Turns do not overlap, so that their times add up; the program holds the body once.

    A runtime index costs a copy nothing but its wait: its bytes are no data.
    """
    one, looped = profile(1, True), profile(8, True)
    once, unrolled = profile(1, False), profile(8, False)
    assert looped.latency_us == pytest.approx(8 * one.latency_us, rel=0.02)
    assert unrolled.latency_us < 0.6 * looped.latency_us
    assert looped.program_instructions == 4
    assert sum(sum(ops.values()) for ops in looped.instructions.values()) == 8 * 4
    assert unrolled.program_instructions == 8 * 3
    assert one.latency_us < once.latency_us + 2
    assert one.hbm_read_bytes == once.hbm_read_bytes


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
PLACES = [
    (loop, mode) for loop, mode in itertools.product(LOOPS, ("functional", "timing"))
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


# Every write goes where a register says: the view of a selected part, and nothing beside it.

BODY = """
t = nl.full((32, 2, 8), 7.0, nl.float32, nl.{memory})
one = nl.full((32, 8), 1.0, nl.float32)
d = t.select(1, nisa.register_alloc(1))
{call}
return out(t)
"""
CALLS = {
    "memset": ("sbuf", "nisa.memset(dst=d, value=3.0)", 3.0),
    "memset in PSUM": ("psum", "nisa.memset(dst=d, value=3.0)", 3.0),
    "tensor_copy": ("sbuf", "nisa.tensor_copy(dst=d, src=one)", 1.0),
    "nc_stream_shuffle": ("sbuf", "nisa.nc_stream_shuffle(d, one, list(range(32)))", 1.0),
    "nc_matmul": ("psum", "nisa.nc_matmul(d, one[:, 0:1].broadcast(1, 32), one, accumulate=False)",
                  32.0),
    "nc_matmul that adds": (
        "psum",
        "for turn in range(2):\n"
        "    nisa.nc_matmul(d, one[:, 0:1].broadcast(1, 32), one, accumulate=turn > 0)",
        64.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_write_by_a_register(name):
    memory, call, value = CALLS[name]
    output = run(BODY.format(memory=memory, call=call)).output
    assert (output[:, 0] == 7).all()
    assert (output[:, 1] == value).all()


@pytest.mark.parametrize("memory", ["sbuf", "shared_hbm"])
def test_a_register_is_stored_by_a_register(memory):
    body = f"""
    t = nl.full((1, 3, 1), 7, nl.int32, nl.{memory})
    nisa.register_store(t.select(1, nisa.register_alloc(2)), nisa.register_alloc(5))
    return out(t) if t.buffer is nl.sbuf else t
    """
    assert run(body).output.reshape(-1).tolist() == [7, 7, 5]


def test_a_received_tile_is_put_by_a_register():
    body = """
    me = nl.program_id(0)
    r = nl.ndarray((2, 32, 2, 8), nl.float32, nl.shared_hbm)
    t = nl.full((32, 2, 8), 7.0, nl.float32)
    mine = nl.full((32, 8), float(me), nl.float32)
    d = t.select(1, nisa.register_alloc(1))
    nisa.sendrecv(src=mine, dst=d, send_to_rank=1 - me, recv_from_rank=1 - me, pipe_id=0)
    nisa.dma_copy(dst=r[me], src=t)
    return r
    """
    output = run(body, grid=2).output
    assert (output[:, :, 0] == 7).all()
    assert [np.unique(part).tolist() for part in output[:, :, 1]] == [[1.0], [0.0]]
