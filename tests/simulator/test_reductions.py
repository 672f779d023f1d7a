"""Reductions, scans, statistics, top-8, selection, gathers and shuffles against NumPy."""

import ml_dtypes
import numpy as np
import pytest
from simulator_kernels import check, run, values

from nmm_compiler.errors import OutOfBoundsError, SimulationError

REDUCTIONS = {"add": np.sum, "maximum": np.max, "minimum": np.min, "multiply": np.prod}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int16])
def test_tensor_reduce(name, dtype):
    """Over one axis and over two."""
    a = (values((16, 4, 5)) * 3).astype(dtype)
    body = f"""
        x = load(a)
        r, s = (nl.ndarray((16, n), nl.float32, nl.sbuf) for n in (4, 1))
        nisa.tensor_reduce(dst=r, op=nl.{name}, data=x, axis=(2,))
        nisa.tensor_reduce(dst=s, op=nl.{name}, data=x, axis=(1, 2))
        return out(r), out(s)
    """
    wide = a.astype(np.float64)
    for result, axis in zip(run(body, a).outputs, ((2,), (1, 2)), strict=True):
        exact = REDUCTIONS[name](wide, axis=axis).reshape(result.shape)
        total = (np.prod if name == "multiply" else np.sum)(np.abs(wide), axis=axis)
        error = np.abs(result - exact)
        assert (error <= 20 * 2.0**-23 * total.reshape(result.shape) + 1e-30).all()


A, B, SQUARE = values((32, 20)), values((32, 20), seed=1), values((16, 16))
WIDE, START = A.astype(np.float64), values((32, 1), seed=2)
LOW, HIGH = np.full((32, 1), 3.0, np.float32), np.full((32, 1), 11.0, np.float32)
INSIDE = (np.arange(20) >= 3) & (np.arange(20) < 11)
RANGED = np.where(INSIDE, A, np.finfo(np.float32).min)
CHOSEN = np.where(A > 0, np.float32(-5), A)
PLACE = np.indices((16, 2, 8))
TIES = np.tile(np.array([1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8], np.float32), (3, 1))
FOUND = np.tile(np.array([3, 8, 8, 8, 8, 8, 8, 8], np.float32), (3, 1))


def scanned(factors, summands, state):
    """Return the states of state = factor * state + summand along a row."""
    for factor, summand in zip(factors.T, summands.T, strict=True):
        state = factor * state + summand
        yield state


CASES = {
    "tensor_reduce negates and runs in place": (
        """
        x = load(a)
        nisa.tensor_reduce(dst=x[:, 0:1], op=nl.maximum, data=x, axis=1, negate=True)
        return out(x[:, 0:1])
        """, [A], [-A.max(1, keepdims=True)], 0,
    ),
    "tensor_partition_reduce": (
        """
        x = load(a)
        r = nl.ndarray((1, 20), nl.float32, nl.sbuf)
        nisa.tensor_partition_reduce(dst=r, op=nl.add, data=x)
        return out(r)
        """, [A], [WIDE.sum(0, keepdims=True)], 1e-4,
    ),
    "tensor_scalar_reduce continues over tiles": (
        """
        x = load(a)
        r = nl.ndarray((32, 20), nl.float32, nl.sbuf)
        first = nl.ndarray((32, 1), nl.float32, nl.sbuf)
        second = nl.ndarray((32, 1), nl.float32, nl.sbuf)
        nisa.tensor_scalar_reduce(dst=r[:, 0:9], data=x[:, 0:9], op0=nl.multiply, operand0=2.0,
                                  reduce_op=nl.add, reduce_res=first)
        nisa.tensor_scalar_reduce(dst=r[:, 9:20], data=x[:, 9:20], op0=nl.multiply,
                                  operand0=2.0, reduce_op=nl.add, reduce_res=second,
                                  reduce_cmd=nisa.reduce_cmd.reduce, reduce_res_negate=True)
        return out(r), out(first), out(second)
        """, [A],
        [2 * A, 2 * WIDE[:, :9].sum(1, keepdims=True), -2 * WIDE.sum(1, keepdims=True)],
        [0, 1e-4, 1e-4],
    ),
    "tensor_scalar_cumulative from nothing and from a number": (
        """
        x = load(a)
        r, s = nl.ndarray((32, 20), nl.float32, nl.sbuf), nl.ndarray((32, 20), nl.float32, nl.sbuf)
        nisa.tensor_scalar_cumulative(dst=r, src=x, op0=nl.multiply, op1=nl.add, imm0=0.5)
        nisa.tensor_scalar_cumulative(dst=s, src=x, op0=nl.multiply, op1=nl.add, imm0=0.5,
                                      imm1=3.0, reduce_cmd=nisa.reduce_cmd.load_reduce)
        return out(r), out(s)
        """, [A], [np.cumsum(WIDE / 2, axis=1), np.cumsum(WIDE / 2, axis=1) + 3], 1e-5,
    ),
    "tensor_tensor_scan": (
        """
        x, y, s = load(a), load(b), load(c)
        r = nl.ndarray((32, 20), nl.float32, nl.sbuf)
        nisa.tensor_tensor_scan(dst=r, data0=x, data1=y, initial=s, op0=nl.multiply, op1=nl.add)
        return out(r)
        """, [np.tanh(A), B, START], [np.stack([*scanned(np.tanh(A), B, START[:, 0])], axis=1)],
        1e-4,
    ),
    "max8, find and replace with ties": (
        """
        x, v = load(a), load(b)
        top = nl.ndarray((3, 8), nl.float32, nl.sbuf)
        found = nl.ndarray((3, 8), nl.uint32, nl.sbuf)
        back = nl.ndarray((3, 8), nl.uint32, nl.sbuf)
        gone = nl.ndarray((3, 11), nl.float32, nl.sbuf)
        none = nl.ndarray((3, 8), nl.uint32, nl.sbuf)
        nisa.max8(dst=top, src=x)
        nisa.nc_find_index8(dst=found, data=x, vals=v)
        nisa.nc_match_replace8(dst=gone, data=x, vals=v, imm=-1.0, dst_idx=back)
        nisa.nc_find_index8(dst=none, data=gone, vals=v)
        return out(top), out(found), out(gone), out(back), out(none)
        """, [TIES, FOUND], [np.tile(row, (3, 1)) for row in (
            [8, 8, 8, 8, 8, 8, 8, 4],
            [2, 4, 5, 6, 7, 8, 9, 10],
            [1, 2, -1, 4, -1, -1, -1, -1, -1, -1, -1],
            [2, 10, 9, 8, 7, 6, 5, 4],  # the documented tie-break
            [0xFFFFFFFF] * 8,
        )], 0,
    ),
    "iota and affine_select make a causal mask": (
        """
        x = load(a)
        index = nl.ndarray((16, 2, 8), nl.int32, nl.sbuf)
        nisa.iota(dst=index, pattern=[[100, 2], [1, 8]], offset=5, channel_multiplier=1000)
        r = nl.ndarray((16, 16), nl.float32, nl.sbuf)
        nisa.affine_select(dst=r, pattern=[[-1, 16]], channel_multiplier=1, on_true_tile=x,
                           on_false_value=-9.0, cmp_op=nl.greater_equal)
        return out(index), out(r)
        """, [SQUARE],
        [5 + 1000 * PLACE[0] + 100 * PLACE[1] + PLACE[2],
         np.where(np.tri(16, dtype=bool), SQUARE, -9.0)], 0,
    ),
    "range_select and select_reduce": (
        """
        x, low, high = load(a), load(b), load(c)
        r = nl.ndarray((32, 20), nl.float32, nl.sbuf)
        top = nl.ndarray((32, 1), nl.float32, nl.sbuf)
        nisa.range_select(dst=r, on_true_tile=x, comp_op0=nl.greater_equal, comp_op1=nl.less,
                          bound0=low, bound1=high, reduce_res=top)
        mask = nl.ndarray((32, 20), nl.uint8, nl.sbuf)
        nisa.tensor_scalar(dst=mask, data=x, op0=nl.greater, operand0=0.0)
        s = nl.ndarray((32, 20), nl.float32, nl.sbuf)
        best = nl.ndarray((32, 1), nl.float32, nl.sbuf)
        nisa.select_reduce(dst=s, predicate=mask, on_true=x, on_false=-5.0, reduce_res=best,
                           reduce_cmd=nisa.reduce_cmd.reset_reduce, reverse_pred=True)
        return out(r), out(top), out(s), out(best)
        """, [A, LOW, HIGH],
        [RANGED, RANGED.max(1, keepdims=True), CHOSEN, CHOSEN.max(1, keepdims=True)], 0,
    ),
    "select_reduce without a reduction reads no accumulator": (
        """
        x, p = load(a), load(b)
        r = nl.ndarray((32, 20), nl.float32, nl.sbuf)
        nisa.select_reduce(dst=r, predicate=p, on_true=x, on_false=-2.0)
        return out(r)
        """, [A, (B > 0).astype(np.uint8)], [np.where(B > 0, A, np.float32(-2))], 0,
    ),
    "nc_stream_shuffle": (  # the first partition stays
        """
        x, y = load(a), load(b)
        nisa.nc_stream_shuffle(dst=y, src=x, shuffle_mask=[255] + [31 - i for i in range(1, 32)])
        return out(y)
        """, [A, B], [np.concatenate([B[:1], A[30::-1]])], 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_instruction_computes_what_numpy_does(case):
    body, given, wanted, within = CASES[case]
    check(body, given, *wanted, within=within)


@pytest.mark.parametrize("width", [1, 2, 7, 512])
def test_bn_stats_and_aggr(width):
    a = values((64, 2 * width))
    body = f"""
        x = load(a)
        s = nl.ndarray((64, 2, 6), nl.float32, nl.sbuf)
        nisa.bn_stats(dst=s[:, 0, :], data=x[:, 0:{width}])
        nisa.bn_stats(dst=s[:, 1, :], data=x[:, {width}:{2 * width}])
        r = nl.ndarray((64, 2), nl.float32, nl.sbuf)
        nisa.bn_aggr(dst=r, data=s)
        return out(r), out(s)
    """
    r, s = run(body, a).outputs
    x = a.astype(np.float64)
    assert np.abs(r[:, 0] - x.mean(1)).max() < 1e-6
    assert np.abs(r[:, 1] - x.var(1)).max() < 1e-5
    assert np.array_equal(s[:, 0, 0], np.full(64, (width + 1) // 2))


def test_gathers():
    a = values((32, 40))
    b = np.random.default_rng(1).integers(0, 40, (32, 9)).astype(np.uint32)
    c = np.random.default_rng(2).integers(0, 20, (32, 2)).astype(np.uint16)
    body = """
        x, i, j = load(a), load(b), load(c)
        r = nl.ndarray((32, 9), nl.float32, nl.sbuf)
        nisa.nc_n_gather(dst=r, data=x, indices=i)
        s = nl.ndarray((32, 64), nl.float32, nl.sbuf)
        nisa.local_gather(dst=s, src_buffer=x, index=j, num_elem_per_idx=2)
        return out(r), out(s)
    """
    r, s = run(body, a, b, c).outputs
    assert np.array_equal(r, np.take_along_axis(a, b.astype(int), 1))
    for group in (0, 1):
        flat = c[16 * group : 16 * group + 16].T.reshape(-1).astype(int)
        places = (flat[:, None] + np.arange(2)).reshape(-1)
        rows = slice(16 * group, 16 * group + 16)
        assert np.array_equal(s[rows], a[rows][:, places])
    with pytest.raises(OutOfBoundsError, match="index 99"):
        run(body, a, np.full((32, 9), 99, np.uint32), c)


def test_nonzero_with_count_topk_and_sequence_bounds():
    a = np.zeros((16, 8), np.float32)
    a[0] = [0, 1, 1, 0, 0, 1, 0, 0]
    b = np.arange(48, dtype=np.float32).reshape(16, 3).astype(ml_dtypes.bfloat16)
    c = np.array([[1, 1, 0, 2, 2, 2]], np.int32)
    body = """
        x, y, z = load(a), load(b), load(c)
        r = nl.ndarray((16, 9), nl.int32, nl.sbuf)
        nisa.memset(dst=r, value=0)
        nisa.nonzero_with_count(dst=r, src=x, index_offset=16)
        best = nl.ndarray((16, 4), nl.bfloat16, nl.sbuf)
        where = nl.ndarray((16, 4), nl.uint32, nl.sbuf)
        nisa.topk(val_dst=best, idx_dst=where, src=y, n=42)
        bounds = nl.ndarray((1, 2, 6), nl.int32, nl.sbuf)
        nisa.sequence_bounds(dst=bounds, segment_ids=z)
        return out(r), out(best), out(where), out(bounds)
    """
    r, best, where, bounds = run(body, a, b, c).outputs
    assert np.array_equal(r[0], [17, 18, 21, -1, -1, -1, -1, -1, 3])  # the documented example
    snake = b.astype(np.float32).T.reshape(-1)[:42]
    order = np.argsort(snake, kind="stable")[-4:]
    assert np.array_equal(where[3], order)
    assert np.array_equal(best[7].astype(np.float32), snake[order])
    assert np.array_equal(bounds[0], [[0, 0, 6, 3, 3, 3], [2, 2, -1, 6, 6, 6]])


def test_random_numbers_repeat_and_dropout_drops():
    body = """
        seed = nl.full((1, 1), 42, nl.int32)
        nl.random_seed(seed)
        x = nl.rand((128, 64), dtype=nl.float32)
        nl.random_seed(seed)
        y = nl.rand((128, 64), dtype=nl.float32)
        z = nl.dropout(nl.full((128, 64), 1.0, nl.float32), 0.25)
        bits = nl.ndarray((4, 4), nl.uint8, nl.sbuf)
        nisa.rng(dst=bits)
        return out(x), out(y), out(z), out(bits)
    """
    x, y, z, _ = run(body).outputs
    assert np.array_equal(x, y)
    assert x.min() >= 0
    assert x.max() < 1
    assert set(np.unique(z)) == {0.0, 1.0}
    assert abs(z.mean() - 0.75) < 0.03


def test_reading_accumulators_that_nothing_set_is_refused():
    a = values((32, 4))
    body = """
        x = load(a)
        t = nl.ndarray((32, 1), nl.float32, nl.sbuf)
        nisa.activation(dst=x, op=nl.exp, data=x, reduce_op=nl.add, reduce_res=t)
        return out(t)
    """
    with pytest.raises(SimulationError, match="reset_reduce"):
        run(body, a)
    assert np.isnan(run(body, a, strict=False).output).all()
