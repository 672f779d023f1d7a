"""nki.language functions, registers and loops on the device, LNC=2 programs."""

import signal
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from scipy import special
from simulator_kernels import run, values

from nmm_compiler import errors
from nmm_compiler.simulator.run import ArraySpec

BINARY = ["add", "subtract", "multiply", "maximum", "minimum", "less", "greater_equal", "divide"]
SIDES = {"x, y": (0, 1), "x, 2.0": (0, 2), "3.0, x": (3, 0), "x, y[:, 0:1]": (0, 4)}


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("sides", SIDES)
def test_binary_functions(name, sides):
    a, b = values((16, 12)), values((16, 12), seed=1)
    body = f"x, y = nl.load(a), nl.load(b)\nreturn out(nl.{name}({sides}))"
    left, right = ((a, b, np.float32(2), np.float32(3), b[:, :1])[side] for side in SIDES[sides])
    wanted = getattr(np, name)(left, right).astype(np.float32)
    assert np.array_equal(run(body, a, b).output, wanted)


UNARY = {
    "exp": np.exp, "tanh": np.tanh, "square": np.square, "negative": np.negative,
    "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "sin": np.sin,
    "cos": np.cos, "tan": np.tan, "reciprocal": np.reciprocal, "sigmoid": special.expit,
    "erf": special.erf, "sign": np.sign, "copy": np.copy,
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_unary_functions(name):
    a = values((16, 12)) * 3
    result = run(f"return out(nl.{name}(nl.load(a)))", a).output
    wanted = UNARY[name](a.astype(np.float64))
    slack = 1e-5 if name in ("sin", "cos") else 2e-3 if name == "tan" else 4e-7
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
    assert len(products) == (5 + 3 * 2 + 1 if exact else 0)
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
    assert [t.program_id for t in result.traces] == [0, 1]
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
    """test_instruction_fuzz.py compares its traces with those of data."""
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
