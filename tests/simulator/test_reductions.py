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


def test_tensor_reduce_negates_and_runs_in_place():
    a = values((8, 6))
    body = """
        x = load(a)
        nisa.tensor_reduce(dst=x[:, 0:1], op=nl.maximum, data=x, axis=1, negate=True)
        return out(x[:, 0:1])
    """
    check(body, [a], -a.max(1, keepdims=True))


def test_tensor_partition_reduce():
    a = values((100, 7))
    body = """
        x = load(a)
        r = nl.ndarray((1, 7), nl.float32, nl.sbuf)
        nisa.tensor_partition_reduce(dst=r, op=nl.add, data=x)
        return out(r)
    """
    check(body, [a], a.astype(np.float64).sum(0, keepdims=True), within=1e-4)


def test_tensor_scalar_reduce_continues_over_tiles():
    a = values((32, 50))
    body = """
        x = load(a)
        r = nl.ndarray((32, 50), nl.float32, nl.sbuf)
        first = nl.ndarray((32, 1), nl.float32, nl.sbuf)
        second = nl.ndarray((32, 1), nl.float32, nl.sbuf)
        nisa.tensor_scalar_reduce(dst=r[:, 0:25], data=x[:, 0:25], op0=nl.multiply, operand0=2.0,
                                  reduce_op=nl.add, reduce_res=first)
        nisa.tensor_scalar_reduce(dst=r[:, 25:50], data=x[:, 25:50], op0=nl.multiply,
                                  operand0=2.0, reduce_op=nl.add, reduce_res=second,
                                  reduce_cmd=nisa.reduce_cmd.reduce, reduce_res_negate=True)
        return out(r), out(first), out(second)
    """
    first, both = (2 * a[:, :n].astype(np.float64).sum(1, keepdims=True) for n in (25, 50))
    check(body, [a], 2 * a, first, -both, within=(0, 1e-4, 1e-4))


@pytest.mark.parametrize(
    ("more", "first"), [("", 0.0), (", imm1=3.0, reduce_cmd=nisa.reduce_cmd.load_reduce", 3.0)]
)
def test_tensor_scalar_cumulative(more, first):
    a = values((5, 12))
    body = f"""
        x = load(a)
        r = nl.ndarray((5, 12), nl.float32, nl.sbuf)
        nisa.tensor_scalar_cumulative(dst=r, src=x, op0=nl.multiply, op1=nl.add, imm0=0.5{more})
        return out(r)
    """
    check(body, [a], np.cumsum(a.astype(np.float64) * 0.5, axis=1) + first, within=1e-5)


def test_tensor_tensor_scan():
    a, b, c = np.abs(values((4, 9))), values((4, 9), seed=1), values((4, 1), seed=2)
    body = """
        x, y, s = load(a), load(b), load(c)
        r = nl.ndarray((4, 9), nl.float32, nl.sbuf)
        nisa.tensor_tensor_scan(dst=r, data0=x, data1=y, initial=s, op0=nl.multiply, op1=nl.add)
        return out(r)
    """
    states = [c[:, 0].astype(np.float64)]
    for factor, summand in zip(a.T, b.T, strict=True):
        states.append(factor * states[-1] + summand)
    check(body, [a, b, c], np.stack(states[1:], axis=1), within=1e-4)


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


def test_max8_find_and_replace_with_ties():
    a = np.tile(np.array([1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8], np.float32), (3, 1))
    b = np.tile(np.array([3, 8, 8, 8, 8, 8, 8, 8], np.float32), (3, 1))
    body = """
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
    """
    wanted = (
        [8, 8, 8, 8, 8, 8, 8, 4],
        [2, 4, 5, 6, 7, 8, 9, 10],
        [1, 2, -1, 4, -1, -1, -1, -1, -1, -1, -1],
        [2, 10, 9, 8, 7, 6, 5, 4],  # the documented tie-break
        [0xFFFFFFFF] * 8,
    )
    check(body, [a, b], *(np.tile(row, (3, 1)) for row in wanted))


def test_iota_and_affine_select_make_a_causal_mask():
    a = values((16, 16))
    body = """
        x = load(a)
        index = nl.ndarray((16, 2, 8), nl.int32, nl.sbuf)
        nisa.iota(dst=index, pattern=[[100, 2], [1, 8]], offset=5, channel_multiplier=1000)
        r = nl.ndarray((16, 16), nl.float32, nl.sbuf)
        nisa.affine_select(dst=r, pattern=[[-1, 16]], channel_multiplier=1, on_true_tile=x,
                           on_false_value=-9.0, cmp_op=nl.greater_equal)
        return out(index), out(r)
    """
    p, i, j = np.indices((16, 2, 8))
    masked = np.where(np.tri(16, dtype=bool), a, -9.0)
    check(body, [a], 5 + 1000 * p + 100 * i + j, masked)


def test_range_select_and_select_reduce():
    a, b, c = values((8, 20)), np.full((8, 1), 3.0, np.float32), np.full((8, 1), 11.0, np.float32)
    body = """
        x, low, high = load(a), load(b), load(c)
        r = nl.ndarray((8, 20), nl.float32, nl.sbuf)
        top = nl.ndarray((8, 1), nl.float32, nl.sbuf)
        nisa.range_select(dst=r, on_true_tile=x, comp_op0=nl.greater_equal, comp_op1=nl.less,
                          bound0=low, bound1=high, reduce_res=top)
        mask = nl.ndarray((8, 20), nl.uint8, nl.sbuf)
        nisa.tensor_scalar(dst=mask, data=x, op0=nl.greater, operand0=0.0)
        s = nl.ndarray((8, 20), nl.float32, nl.sbuf)
        best = nl.ndarray((8, 1), nl.float32, nl.sbuf)
        nisa.select_reduce(dst=s, predicate=mask, on_true=x, on_false=-5.0, reduce_res=best,
                           reduce_cmd=nisa.reduce_cmd.reset_reduce, reverse_pred=True)
        return out(r), out(top), out(s), out(best)
    """
    inside = (np.arange(20) >= 3) & (np.arange(20) < 11)
    ranged = np.where(inside, a, np.finfo(np.float32).min)
    chosen = np.where(a > 0, np.float32(-5), a)
    top, best = (array.max(1, keepdims=True) for array in (ranged, chosen))
    check(body, [a, b, c], ranged, top, chosen, best)


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


def test_stream_shuffle():
    a, b = values((64, 3)), values((64, 3), seed=1)
    body = """
        x, y = load(a), load(b)
        nisa.nc_stream_shuffle(dst=y, src=x, shuffle_mask=[255] + [31 - i for i in range(1, 32)])
        return out(y)
    """
    turned = a.reshape(2, 32, 3)[:, ::-1]  # each quadrant, but for its first partition
    wanted = np.concatenate([b.reshape(2, 32, 3)[:, :1], turned[:, 1:]], axis=1)
    check(body, [a, b], wanted.reshape(64, 3))


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


def test_select_reduce_without_a_reduction_reads_no_accumulator():
    a, b = values((32, 16)), (values((32, 16), seed=3) > 0).astype(np.uint8)
    body = """
        x, p = load(a), load(b)
        r = nl.ndarray((32, 16), nl.float32, nl.sbuf)
        nisa.select_reduce(dst=r, predicate=p, on_true=x, on_false=-2.0)
        return out(r)
    """
    check(body, [a, b], np.where(b != 0, a, np.float32(-2)))
