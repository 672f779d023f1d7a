"""NKI Beta 1: indices, masks, block dimensions, assignment and accumulation, against float64."""

import ml_dtypes
import numpy as np
import pytest
from beta1_helpers import ops, run, values
from simulator_kernels import refusals

from nmm_compiler import errors

A = values(128, 256)
B = values(128, 512, seed=1)
EXACT = 2.0**-23  # one rounding of float32


def product_bound(a, b):
    """Return the error that float32 sums of a.T @ b may have."""
    return (len(a) + 1) * 2.0**-24 * (np.abs(a).T.astype(np.float64) @ np.abs(b))


SUMS = {
    "one accumulation each": (
        """
        i_p, i_m, i_n = nl.arange(128)[:, None], nl.arange(64)[None, :], nl.arange(256)[None, :]
        total = nl.zeros((64, 256), dtype=nl.float32, buffer=nl.psum)
        for k in nl.affine_range(3):
            left = nl.load(a[k * 128 + i_p, i_m])
            right = nl.load(b[k * 128 + i_p, i_n])
            total[nl.arange(64)[:, None], i_n] += nisa.nc_matmul(left, right)
        return out(total)
        """,
        # no memset of the zeros, no sum on another engine; the store of PSUM copies to SBUF first
        384, 256, ["dma_copy", "dma_copy", "nc_matmul"] * 3 + ["tensor_copy", "dma_copy"],
    ),
    "a sum on another engine": (
        """
        total = nl.zeros((64, 256), dtype=nl.float32, buffer=nl.sbuf)
        total[...] = total + nisa.nc_matmul(nl.load(a), nl.load(b))
        return out(total)
        """,
        128, 256, ["memset", "dma_copy", "dma_copy", "nc_matmul", "tensor_tensor", "dma_copy"],
    ),
    "zeros that nothing was multiplied into": (
        """
        total = nl.zeros((64, 256), dtype=nl.float32, buffer=nl.psum)
        total[:, 0:128] += nisa.nc_matmul(nl.load(a), nl.load(b[:, 0:128]))
        return out(total)
        """,
        128, 128, ["dma_copy", "dma_copy", "nc_matmul", "tensor_copy", "dma_copy"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SUMS)
def test_a_product_onto_a_tile(case):
    body, rows, columns, issued = SUMS[case]
    a, b = values(rows, 64), values(rows, 256, seed=1)
    result = run(body, a, b)
    b[:, columns:] = 0
    wanted = a.T.astype(np.float64) @ b.astype(np.float64)
    assert (np.abs(result.output - wanted) <= product_bound(a, b)).all()
    assert ops(result) == issued


def test_an_assignment_takes_the_instruction_and_copies_nothing():
    result = run(
        """
        t = nl.ndarray((128, 256), dtype=nl.bfloat16, buffer=nl.sbuf)
        t[...] = nl.exp(nl.load(a))
        return out(t)
        """, A,
    )  # fmt: skip
    assert ops(result) == ["dma_copy", "activation", "dma_copy"]
    wanted = np.exp(A.astype(np.float64))
    assert (np.abs(result.output.astype(np.float64) - wanted) <= 2.0**-8 * wanted).all()


COMPARED = """
    x = nl.load(a)
    y = nl.all(nl.logical_or(x, nl.greater(x, 0)), axis=1)
    assert y.dtype == nl.equal(x, x).dtype == nl.logical_not(x).dtype == nl.bool_
    assert nl.all(x, axis=1, dtype=nl.float32).dtype == nl.float32
    return out(y, dtype=nl.float32)
    """
MASKED = values(200, 100)
CUBE = values(64, 3, 20, 5)
WHOLE = np.round(4 * A)
LARGE = np.arange(2**24 + 1, 2**24 + 9, dtype=np.int32)[None]
EXACTLY = {
    "a result that the kernel holds outlives the tile that it was assigned to": (
        """
        t = nl.ndarray((128, 256), dtype=nl.float32, buffer=nl.sbuf)
        x = nl.negative(nl.load(a))
        t[...] = x
        t[...] = nl.add(t, 1.0)
        return out(x), out(t)
        """, (A,), (-A, 1 - A),
    ),
    "a result is written, and the tile that it was assigned to is not": (
        """
        t = nl.ndarray((128, 256), dtype=nl.float32, buffer=nl.sbuf)
        u = nl.ndarray((128, 256), dtype=nl.float32, buffer=nl.sbuf)
        x = nl.negative(nl.load(a))
        t[...] = x
        x[:, 0:128] = 0.0
        x[:, 0:64] += 3.0
        y = nl.negative(nl.load(a))
        u[...] = y
        y[:, 0:256] += 1.0
        z = y[:, 0:4]
        return out(x[:, 60:68]), out(t), out(y), out(u), out(z)
        """, (A,), (np.repeat([[3.0] * 4 + [0.0] * 4], 128, 0), -A, 1 - A, -A, 1 - A[:, :4]),
    ),
    "a view of a result outlives the tile that the result was assigned to": (
        """
        t = nl.ndarray((128, 256), dtype=nl.float32, buffer=nl.sbuf)
        x = nl.negative(nl.load(a))
        t[...] = x
        y = x.reshape((128, 2, 128))
        t[...] = 0.0
        return out(y.reshape((128, 256)))
        """, (A,), (-A,),
    ),
    "a tile shifted into itself goes through another": (
        """
        t = nl.load(a)
        t[:, 1:256] = nl.copy(t[:, 0:255])
        return out(t[:, 1:256])
        """, (A,), (A[:, :-1],),
    ),
    "a result rounds to its own dtype before a wider tile takes it": (
        """
        t = nl.ndarray((128, 256), dtype=nl.float32, buffer=nl.sbuf)
        t[...] = nl.multiply(nl.load(a), 1.0, dtype=nl.bfloat16)
        return out(t)
        """, (A,), (A.astype(ml_dtypes.bfloat16).astype(np.float32),),
    ),
    "a masked load leaves old values": (
        """
        i = nl.mgrid[0:128, 0:128]
        t = nl.full((128, 128), 7.0, dtype=nl.float32, buffer=nl.sbuf)
        t[i.p, i.x] = nl.load(a[128 + i.p, i.x], mask=(128 + i.p < 200) & (i.x < 100))
        return out(t)
        """, (MASKED,), (np.pad(MASKED[128:], ((0, 56), (0, 28)), constant_values=7),),
    ),
    "a mask that begins above row 0 gathers by the indices of its own rows": (
        """
        i_p, i_f = nl.arange(128)[:, None], nl.arange(256)[None, :]
        t = nl.zeros((128, 256), dtype=nl.float32)
        t[i_p, i_f] = nl.load(a[nl.load(b[i_p]), i_f], mask=(i_p >= 32))
        return out(t)
        """, (A, np.arange(128, dtype=np.int32)[::-1].copy()),
        (A[::-1] * (np.arange(128)[:, None] >= 32),),
    ),
    "slices that leave their tensor are cut by a mask": (
        """
        i_p = nl.arange(128)[:, None]
        t = nl.full((128, 100), 7.0, dtype=nl.float32, buffer=nl.sbuf)
        t[...] = nl.load(a[nl.ds(128, 128), 0:100], mask=(128 + i_p < 200))
        return out(t)
        """, (MASKED,), (np.pad(MASKED[128:], ((0, 56), (0, 0)), constant_values=7),),
    ),
    "what a mask left out is undefined and may be read": (
        """
        r = nl.ndarray((200, 100), dtype=nl.float32, buffer=nl.shared_hbm)
        i_p, i_f = nl.arange(128)[:, None], nl.arange(100)[None, :]
        for k in nl.affine_range(2):
            t = nl.load(a[k * 128 + i_p, i_f], mask=(k * 128 + i_p < 200))
            nl.store(r[k * 128 + i_p, i_f], nl.negative(t), mask=(k * 128 + i_p < 200))
        return r
        """, (MASKED,), (-MASKED,),
    ),
    "a mask of a loop variable alone runs or skips": (
        """
        t = nl.zeros((128, 256), dtype=nl.float32, buffer=nl.sbuf)
        for i in nl.sequential_range(4):
            t[...] = nl.add(t, 1.0, mask=(i < 3))
        return out(t)
        """, (A,), (np.full((128, 256), 3, np.float32),),
    ),
    "a function of several instructions is skipped by its mask": (
        """
        t = nl.load(a)
        for i in nl.sequential_range(2):
            t[...] = nl.trunc(t, mask=(i < 0))
        return out(t)
        """, (A,), (A,),
    ),
    "the quotient of a flat index of one row is one number, so that it stays affine": (
        """
        i_p, flat = nl.arange(128)[:, None], 256 + nl.arange(64)[None, :]
        row, column = flat // 256, flat % 256
        return out(nl.load(a[i_p, (row - 1) * 256 + column + 3]))
        """, (A,), (A[:, 3:67],),
    ),
    "a strided index reads and writes every third column": (
        """
        t = nl.load(a)
        r = nl.zeros((128, 256), dtype=nl.float32)
        i_p, i_f = nl.arange(128)[:, None], nl.arange(85)[None, :]
        r[i_p, 3 * i_f] = nl.copy(t[i_p, 3 * i_f + 1])
        return out(r)
        """, (A,), (np.roll(A, -1, 1) * np.resize([1, 0, 0], 256) * (np.arange(256) < 255),),
    ),
    "a row is broadcast over partitions": (
        """
        row = nl.load(a.reshape((1, 256)))
        return out(row.broadcast_to((128, 256)))
        """, (A[0],), (np.repeat(A[:1], 128, 0),),
    ),
    "a row of integers that float32 does not hold is broadcast over partitions": (
        "return out(nl.load(a).broadcast_to((4, 8)))", (LARGE,), (np.repeat(LARGE, 4, 0),),
    ),
    "reductions over free axes that are not the last": (
        "return out(nl.max(nl.load(a), axis=[1, 3]))", (CUBE,), (CUBE.max((1, 3)),),
    ),
    "a reduction over a loop begins with its first value, or with what is there": (
        """
        t = nl.ndarray((128, 256), dtype=nl.float32)
        r = nl.full((128, 128), 7.0, dtype=nl.float32)
        for i in nl.sequential_range(2):
            for j in range(2):
                half = nl.ds(128 * j, 128)
                t[:, half] = nl.loop_reduce(nl.load(a[:, half]), op=np.add, loop_indices=[i])
                r[:, nl.ds(64 * j, 64)] = nl.loop_reduce(
                    nl.load(a[:, nl.ds(64 * j, 64)]), op=np.add, loop_indices=[i]
                )
        return out(t), out(r)
        """, (WHOLE,), (2 * WHOLE, 7 + 2 * WHOLE[:, :128]),
    ),
    "comparisons and all are booleans unless told": (
        COMPARED, (np.eye(4, dtype=np.float32),), (np.zeros((4, 1)),),
    ),
    "all of ones": (COMPARED, (np.ones((4, 3), np.float32),), (np.ones((4, 1)),)),
}  # fmt: skip


@pytest.mark.parametrize("case", EXACTLY)
def test_exactly(case):
    body, given, wanted = EXACTLY[case]
    for got, want in zip(run(body, *given).outputs, wanted, strict=True):
        assert np.array_equal(got, want)


def test_block_dimensions_are_tiles_of_their_own():
    a = values(512, 100)
    result = run(
        """
        t = nl.ndarray((2, 2, par_dim(128), 100), dtype=nl.float32, buffer=nl.sbuf)
        r = nl.ndarray((2, 2, par_dim(128), 100), dtype=nl.float32, buffer=nl.shared_hbm)
        for i in nl.affine_range(2):
            for j in nl.affine_range(2):
                t[i, j] = nl.load(a[nl.ds((2 * i + j) * 128, 128), :])
        for i in range(2):
            part = t[i]
            for j in range(2):
                nl.store(r[i, j], nl.negative(part[j, :, :]))
        return r
        """, a,
    )  # fmt: skip
    assert np.array_equal(result.output.reshape(512, 100), -a)
    tiles = [x for x in result.trace.allocations.values() if x.memory == "sbuf"]
    assert {x.bytes_per_partition for x in tiles} == {400}


def test_operators_promote_and_broadcast():
    a, b = A.astype(ml_dtypes.bfloat16), values(128, 1, seed=3)
    result = run(
        """
        x, y = nl.load(a), nl.load(b)
        r = (x * 2 - y) / 4.0
        assert x.dtype == nl.bfloat16 and (x * 2).dtype == nl.bfloat16
        assert r.dtype == nl.float32 == np.float32
        return out(r)
        """, a, b,
    )  # fmt: skip
    twice = (a.astype(np.float64) * 2).astype(ml_dtypes.bfloat16).astype(np.float64)
    assert np.allclose(result.output, (twice - b) / 4, rtol=2 * EXACT, atol=EXACT)


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_load_transpose2d_of_more_rows_than_partitions(target, dtype):
    a = values(300, 100).astype(dtype)
    result = run(
        """
        i = nl.mgrid[0:384, 0:128]
        t = nl.zeros((128, 384), dtype=a.dtype)
        t[...] = nl.load_transpose2d(a[i.p, i.x], mask=(i.p < 300) & (i.x < 100))
        return out(t)
        """, a, target=target,
    )  # fmt: skip
    assert np.array_equal(result.output[:100, :300], a.T)
    assert not result.output[100:].any()
    assert not result.output[:, 300:].any()
    by_dma = target == "trn2" and dtype is not np.float32
    assert ("dma_transpose" in ops(result)) == by_dma


def test_run_time_rows_are_gathered_and_scattered():
    a, rows = values(100, 64), np.arange(0, 100, 2, dtype=np.int32)[::-1].copy()
    result = run(
        """
        r = nl.ndarray((100, 64), dtype=nl.float32, buffer=nl.shared_hbm)
        i_p, i_f = nl.arange(50)[:, None], nl.arange(64)[None, :]
        index = nl.load(b[i_p])
        nl.store(r[index[i_p, 0], i_f], nl.load(a[index, i_f]) * 2.0)
        return r
        """, a, rows,
    )  # fmt: skip
    assert np.array_equal(result.output[::2], 2 * a[::2])
    assert "never written" in result.warnings[0]  # the odd rows


def test_affine_select_and_iota_of_an_index():
    a = values(100, 100)
    result = run(
        """
        i_p, i_f = nl.mgrid[0:100, 0:100]
        t = nisa.affine_select(pred=(i_f <= i_p), on_true_tile=nl.load(a), on_false_value=0.0)
        return out(t), out(nisa.iota(3 * i_p - i_f + 5, dtype=nl.int32))
        """, a,
    )  # fmt: skip
    lower, count = result.outputs
    assert np.array_equal(lower, np.tril(a))
    for pred, shape in (("50 - i_p >= 0", r"\(100, 1\)"), ("i_f >= 2", r"\(1, 100\)")):
        with pytest.raises(errors.OperandError, match=f"pred has shape {shape}, on_true_tile"):
            run(
                f"""
                i_p, i_f = nl.arange(100)[:, None], nl.arange(100)[None, :]
                return out(nisa.affine_select(pred={pred}, on_true_tile=nl.load(a),
                                              on_false_value=0.0))
                """, a,
            )  # fmt: skip
    assert np.array_equal(count, 3 * np.arange(100)[:, None] - np.arange(100) + 5)


@pytest.mark.parametrize(
    ("product", "rows", "m", "n"),
    [
        ("nisa.nc_matmul(x[i_m < 30], y[i_n < 20])", (0, 100), 30, 20),
        ("nl.matmul(x[i_m < 30], y[i_n < 20], transpose_x=True)", (0, 100), 30, 20),
        ("nisa.nc_matmul(x[i_p < 64][i_m < 30], y[i_n < 20][True])", (0, 64), 30, 20),
        ("nisa.nc_matmul(x[i_p < 96], y[i_p >= 64])", (64, 96), 60, 50),
        ("nisa.nc_matmul(x[i_p < 200], y[i_n < 90])", (0, 100), 60, 50),
        ("nisa.nc_matmul(x[i_m < 30], y[False])", (0, 0), 0, 0),
        ("nisa.nc_matmul(x[i_m < 30], y, mask=(i_q < 40) & (i_n < 10))", (0, 100), 30, 10),
    ],
)
def test_an_operand_mask_leaves_rows_and_columns_out_of_a_product(product, rows, m, n):
    a, b = values(100, 60), values(100, 50, seed=1)
    result = run(
        f"""
        x, y = nl.load(a), nl.load(b)
        i_p, i_q = nl.arange(100)[:, None], nl.arange(60)[:, None]
        i_m, i_n = nl.arange(60)[None, :], nl.arange(50)[None, :]
        p = nl.zeros((60, 50), dtype=nl.float32, buffer=nl.psum)
        p[...] += {product}
        return out(p)
        """, a, b,
    )  # fmt: skip
    used_a, used_b = a[slice(*rows), :m], b[slice(*rows), :n]
    want = np.zeros((60, 50))
    want[:m, :n] = used_a.astype(np.float64).T @ used_b
    bound = np.zeros((60, 50))
    bound[:m, :n] = product_bound(used_a, used_b) if n else 0
    assert (np.abs(result.output - want) <= bound).all()
    assert ops(result).count("nc_matmul") == (n > 0)


def test_an_on_chip_tile_that_is_returned_is_stored_in_hbm():
    a = values(100, 60)
    result = run("x = nl.load(a)\nreturn x, nl.exp(x)", a)
    assert np.array_equal(result.outputs[0], a)
    assert ops(result).count("dma_copy") == 3  # the load and two stores
    assert "is returned from on chip" in result.warnings[0]


def test_a_language_function_of_more_dimensions_than_an_instruction_is_several():
    a = values(8, 2, 3, 2, 3, 4, 5)
    result = run(
        """
        x = nl.load(a)
        y = nl.ndarray((8, 2, 3, 2, 2, 3, 9), dtype=nl.float32, buffer=nl.sbuf)
        p, q, r, s, t, u, v = nl.mgrid[0:8, 0:2, 0:3, 0:2, 0:2, 0:3, 0:4]
        y[p, q, r, s, t, u, v * 2] = nl.multiply(x[p, q, r, s, t + 1, u, v + 1], 3)
        got = nl.ndarray((8, 2, 3, 2, 2, 3, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        nl.store(got, y[p, q, r, s, t, u, v * 2])
        return got
        """, a,
    )  # fmt: skip
    assert np.array_equal(result.output, 3 * a[:, :, :, :, 1:, :3, 1:])
    assert ops(result).count("tensor_scalar") == 2 * 3  # of its six free dimensions, two outer ones


@pytest.mark.parametrize(
    ("line", "copies"),
    [
        ("nl.subtract(x[64:128, 0:60], y)", 1),
        ("nisa.tensor_tensor(x[64:128, 0:60], y, np.subtract)", 1),
        ("nisa.scalar_tensor_tensor(x[64:128, 0:60], np.multiply, 1.0, np.subtract, y)", 1),
        ("nl.subtract(x[64:128, 0:60], x[64:128, 60:120])", 0),
    ],
)
def test_two_inputs_that_start_apart_are_brought_together(line, copies):
    a = values(128, 120)
    b = a[64:, 60:].copy()
    result = run(f"x = nl.load(a)\ny = nl.load(b)\nreturn out({line})", a, b)
    assert np.array_equal(result.output, a[64:, :60] - b)
    assert ops(result).count("tensor_copy") == copies


REFUSED = refusals(r"""
nl.exp(nl.load(a)[nl.arange(128)[:, None] < 64])  # OperandError: operand mask
nl.load(a[nl.arange(128)[:, None] < 64])  # UnsupportedInstructionError: of a matmul
nl.exp(nl.load(a)[nl.arange(64), 0])  # OperandError: err_1d_arange
nl.exp(nl.load(a)[nl.arange(64)[:, None], :])  # OperandError: mixing_basic
nl.load(a[nl.arange(128)[:, None], nl.arange(300)[None, :]])  # OutOfBoundsError: err_tensor_access
nl.zeros((256, 4), dtype=nl.float32)  # OperandError: takes partitions 0..255
nl.exp(nl.zeros((4, par_dim(8), 8), dtype=nl.float32))  # OperandError: err_failed_to_infer_tile
nl.exp(a)  # OperandError: err_unsupported_memory
nl.load(nl.load(a))  # OperandError: err_unsupported_memory
nl.store(a, nl.load(a))  # OperandError: err_cannot_update_immutable_parameter
nl.zeros((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)  # OperandError: err_hbm_tensor_with
1 if nl.load(a) else 2  # UnsupportedInstructionError: err_ambiguous_tensor
1 if nl.arange(4)[:, None] > 2 else 2  # UnsupportedInstructionError: err_control_flow_condition
nl.add(nl.load(a), nl.load(a[0:64, :]))  # OperandError: does not broadcast
nl.load(a, mask=(nl.arange(128)[:, None] < nl.arange(256)[None, :]))  # UnsupportedInstructionError: over 2 axes at once
nl.arange(8)[:, None] % 2  # UnsupportedInstructionError: % 2, which is not affine
nl.arange(8)[:, None] // 3  # UnsupportedInstructionError: // 3, which is not affine
nl.arange(8)[:, None] * nl.arange(8)  # UnsupportedInstructionError: not affine
(nl.arange(8) < 2) | (nl.arange(8) > 3)  # UnsupportedInstructionError: use `&`
nl.load(a, mask=nl.arange(128)[:, None] != 3)  # UnsupportedInstructionError: mask with `!=`
nl.arange(4)[:, None] + nl.arange(3)[:, None]  # OperandError: do not broadcast
nl.all_reduce(nl.load(a), np.add, 0)  # UnsupportedInstructionError: nl.all_reduce
nl.no_such_thing(a)  # UnsupportedInstructionError: no_such_thing
nisa.activation(op=nl.exp, data=nl.load(a), dta=a)  # KernelArgumentError: dta
nl.loop_reduce(nl.load(a), op=np.add, loop_indices=[0]) + 1  # OperandError: nl.loop_reduce
nl.zeros((4, 4), nl.float32, nl.psum).__iadd__(p := nisa.nc_matmul(t := nl.load(a[0:8, 0:4]), t)) + p  # UnsupportedInstructionError: again after `\+=`
a[nl.zeros((8, 1), nl.int32), nl.arange(4)[None, :]][nl.arange(4)[:, None] + 1, nl.arange(4)[None, :]]  # UnsupportedInstructionError: rows that run-time
""")  # noqa: E501


@pytest.mark.parametrize(("line", "kind", "shown"), REFUSED)
def test_refusals_name_the_construct(line, kind, shown):
    with pytest.raises(kind, match=shown) as caught:
        run(f"x = {line}\nreturn out(nl.load(a))", A)
    assert caught.value.line > 0
