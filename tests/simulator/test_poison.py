"""Unwritten memory may be read, but reaches no output, index, predicate or branch."""

import random
from pathlib import Path

import numpy as np
import pytest
from simulator_kernels import run

from nmm_compiler import errors
from nmm_compiler.simulator.tensors import elements

HALF = """
t = nl.ndarray((8, 8), nl.{dtype}, nl.sbuf, name="half")
nisa.memset(dst=t[:, 0:4], value=1)
r = nl.zeros((8, 8), nl.{dtype})
"""


def half(body, dtype="float32", **options):
    """Run body over t, of which columns 4..7 are unwritten, and r."""
    return run(HALF.format(dtype=dtype) + body, np.ones((8, 8), np.float32), **options)


def line_of(error, text):
    """Return the number of the line of the refused kernel's file that holds the text."""
    lines = Path(error.file).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_it_spreads_element_by_element_in_every_dtype(dtype):
    copy = "nisa.tensor_copy(dst=r, src=t)\n"
    assert (half(copy + "return out(r[:, 0:4])", dtype).output == 1).all()
    with pytest.raises(errors.HazardError) as caught:
        half(copy + "return out(r)", dtype)
    text = str(caught.value)
    assert "32 of 64 elements of output 'result'" in text
    assert "tensor 'half'" in text
    assert f"are read on line {line_of(caught.value, 'dst=r, src=t')} " in text


def test_the_first_read_is_named_after_many_steps():
    steps = "nisa.tensor_scalar(dst=r, data=t, op0=nl.add, operand0=1)\n" + (
        "nisa.tensor_tensor(dst=r, data1=r, data2=r, op=nl.multiply)\n" * 5
    )
    with pytest.raises(errors.HazardError, match="tensor 'half'") as caught:
        half(steps + "return out(r)")
    assert f"line {line_of(caught.value, 'op0=nl.add')} " in str(caught.value)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("nisa.sequence_bounds(dst=nl.ndarray((1, 2, 8), nl.float32), segment_ids=t[0:1])",
         "a comparison, nisa.sequence_bounds"),
        ("p = nl.ndarray((8, 8), nl.uint8)\n"
         "nisa.tensor_copy_predicated(dst=r, src=0.0, predicate=p)", "predicate"),
        ("i = nl.ndarray((8, 8), nl.uint32)\nnisa.nc_n_gather(dst=r, data=load(a), indices=i)",
         "indices"),
        ("i = nl.ndarray((8, 1), nl.uint32)\n"
         "nisa.dma_copy(dst=r, src=a.ap(pattern=[[8, 8], [1, 8]], vector_offset=i))",
         "a row index"),
        ("i = nl.ndarray((1, 1), nl.int32)\nx = nisa.register_alloc()\nnisa.register_load(x, i)",
         "a register"),
        ("i = nl.ndarray((1, 1), nl.int32)\n"
         "nisa.dma_copy(dst=r[0:4], src=a.ap(pattern=[[8, 4], [1, 8]], scalar_offset=i))",
         "a runtime address"),
    ],
)  # fmt: skip
def test_an_index_a_predicate_and_a_branch_are_refused(body, what):
    with pytest.raises(errors.HazardError, match=what):
        half(body + "\nreturn a")


@pytest.mark.parametrize(
    "compare",
    [
        "nisa.tensor_tensor(dst=r, data1=t, data2=r, op=nl.less)",
        "nisa.tensor_scalar(dst=r, data=t, op0=nl.add, operand0=1.0, op1=nl.equal, operand1=0)",
        "nisa.tensor_scalar(dst=r, data=t, op0=nl.logical_and, operand0=0.0)",
    ],
)
def test_a_comparison_is_known_where_its_inputs_are(compare):
    assert (half(compare + "\nreturn out(r[:, 0:4])").output == 0).all()
    with pytest.raises(errors.HazardError, match="32 of 64 elements of output"):
        half(compare + "\nreturn out(r)")
    predicate = "\np = nl.zeros((8, 8), nl.uint8)\nnisa.tensor_copy(dst=p, src=r)\n"
    predicate += (
        "nisa.tensor_copy_predicated(dst=r[:, {0}], src=1.0, predicate=p[:, {0}])\nreturn a"
    )
    half(compare + predicate.format("0:4"))
    with pytest.raises(errors.HazardError, match="predicate"):
        half(compare + predicate.format("3:5"))


PRODUCT = """x = nl.zeros((8, 16), nl.float32)
p = nl.ndarray((8, 16), nl.float32, nl.psum)
nisa.nc_matmul(dst=p, stationary=t, moving=x)
s = nl.ndarray((8, 16), nl.float32)
nisa.tensor_copy(dst=s, src=p)
return out(s[0:{}])"""
SQUARE = """p = nl.ndarray((8, 8), nl.float32, nl.psum)
nisa.nc_matmul(dst=p, stationary=t, moving=t)
s = nl.ndarray((8, 8), nl.float32)
nisa.tensor_copy(dst=s, src=p)
return out(s[0:4, 0:{}])"""
OVERWRITTEN = """nisa.tensor_copy(dst=r, src=t)
nisa.memset(dst=r[:, 4:{}], value=2)
return out(r)"""
SELECTED = """nisa.affine_select(dst=r, pattern=[[-1, 8]], offset={}, channel_multiplier=0,
    on_true_tile=t, on_false_value=5.0, cmp_op=nl.greater_equal)
return out(r)"""
SUMMED = """s = nl.ndarray((8, 1), nl.float32)
c = nisa.reduce_cmd
nisa.activation(dst=r, op=nl.copy, data=t, reduce_op=nl.add, reduce_cmd=c.reset_reduce)
nisa.activation(dst=r[:, 0:4], op=nl.copy, data=t[:, 0:4], reduce_op=nl.add, reduce_cmd=c.{},
    reduce_res=s)
return out(s)"""


@pytest.mark.parametrize(
    ("body", "clean", "row", "spoilt"),
    [
        (PRODUCT, 4, [0] * 16, 5),  # rows and columns only
        (SQUARE, 4, [8] * 4, 5),  # of one tensor as both operands, rows and columns
        (OVERWRITTEN, 8, [1] * 4 + [2] * 4, 7),
        (SELECTED, 3, [1] * 4 + [5] * 4, 4),  # a mask leaves it out
        (SUMMED, "reset_reduce", [4], "reduce"),  # until it is reset
    ],
)
def test_how_far_it_spreads(body, clean, row, spoilt):
    assert (half(body.format(clean)).output == row).all()
    with pytest.raises(errors.HazardError):
        half(body.format(spoilt))


def test_a_local_gather_keeps_it_in_its_partitions():
    """nki.isa.local_gather: each partition gathers from its own row, only indices are shared."""
    body = """
        x = nl.ndarray((32, 8), nl.float32, nl.sbuf)
        nisa.memset(dst=x[0:8], value=1)
        i = nl.zeros((32, 1), nl.uint16)
        r = nl.ndarray((32, 16), nl.float32, nl.sbuf)
        nisa.local_gather(dst=r, src_buffer=x, index=i)
        return out(r[0:{rows}])
    """
    assert (run(body.format(rows=8), np.ones((8, 8), np.float32)).output == 1).all()
    with pytest.raises(errors.HazardError, match="16 of 144 elements"):
        run(body.format(rows=9), np.ones((8, 8), np.float32))


STEPS = [
    "nisa.tensor_copy(dst={0}, src={1})",
    "nisa.tensor_tensor(dst={0}, data1={1}, data2={2}, op=nl.add)",
    "nisa.tensor_tensor(dst={0}, data1={1}, data2={2}, op=nl.maximum)",
    "nisa.tensor_scalar(dst={0}, data={1}, op0=nl.multiply, operand0={2}[:, 3:4])",
    "nisa.activation(dst={0}, op=nl.square, data={1}, bias={2}[:, 5:6])",
    "nisa.tensor_reduce(dst=s, op=nl.add, data={1}, axis=1)\n"
    "nisa.tensor_copy(dst={0}[:, 2:3], src=s)",
    "nisa.tensor_reduce(dst=w, op=nl.maximum, data={1}.reshape((8, 4, 2)), axis=2)\n"
    "nisa.tensor_copy(dst={0}[:, 2:6], src=w)",
    "nisa.tensor_tensor_scan(dst=v, data0={1}, data1={2}, initial=0.0, op0=nl.multiply, "
    "op1=nl.add)\nnisa.tensor_copy(dst={0}, src=v)",
    "nisa.nc_transpose(dst=v, data={1}, engine=nisa.engine.vector)\n"
    "nisa.tensor_copy(dst={0}, src=v)",
    "nisa.max8(dst=v, src={1})\nnisa.tensor_copy(dst={0}, src=v)",
    "nisa.nc_stream_shuffle(dst={0}, src={1}, shuffle_mask=[7, 6, 5, 4, 3, 2, 1, 255] + [0] * 24)",
    "nisa.tensor_copy(dst=v, src={1})\nnisa.dma_copy(dst={0}[:, 2:6], src=v[:, 3:7])",
    "nisa.memset(dst={0}[:, 1:3], value=0.5)",
    "nisa.bn_stats(dst=v[:, 0:6], data={1})\nnisa.tensor_copy(dst={0}[:, 0:6], src=v[:, 0:6])",
    "nisa.select_reduce(dst={0}, predicate=m, on_true={1}, on_false=0.25)",
    "nisa.tensor_copy_predicated(dst={0}, src={1}, predicate=m)",
    "nisa.scalar_tensor_tensor(dst={0}, data={1}, op0=nl.subtract, operand0={2}[:, 0:1], "
    "op1=nl.minimum, operand1={2})",
    "nisa.activation(dst={0}, op=nl.copy, data={1}, reduce_op=nl.add, reduce_res=s, "
    "reduce_cmd=nisa.reduce_cmd.reset_reduce)\nnisa.tensor_copy(dst={0}[:, 0:1], src=s)",
    "p = nl.ndarray((8, 8), nl.float32, nl.psum)\n"
    "nisa.nc_matmul(dst=p, stationary={1}, moving={2})\nnisa.tensor_copy(dst={0}, src=p)",
]


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(s, marks=pytest.mark.long) for s in range(20, 60))]
)
def test_what_is_not_marked_does_not_depend_on_it(seed, monkeypatch):
    """Whatever unwritten memory holds, the elements that are not marked come out the same."""
    r = random.Random(seed)
    lines = [
        "m = load(b)",
        "s, w, v = (nl.ndarray((8, n), nl.float32) for n in (1, 4, 8))",
        "t = [nl.ndarray((8, 8), nl.float32) for _ in range(4)]",
    ]
    for k in range(4):
        width = r.choice([3, 6, 8])
        lines.append(f"nisa.dma_copy(dst=t[{k}][:, 0:{width}], src=a[:, 0:{width}])")
    for _ in range(r.randint(2, 7)):
        lines.append(r.choice(STEPS).format(*(f"t[{k}]" for k in r.sample(range(4), 3))))
    lines.append("return tuple(out(x) for x in t)")
    rng = np.random.default_rng(seed)
    a = rng.uniform(0.5, 2, (8, 8)).astype(np.float32)
    mask = rng.integers(0, 2, (8, 8)).astype(np.uint8)
    results = []
    for value in (np.nan, 1e3, -0.5):
        monkeypatch.setitem(elements.FILL, "float", value)
        results.append(run("\n".join(lines), a, mask, strict=False))
    marked = [np.isnan(output) for output in results[0].outputs]
    for other in results[1:]:
        for known, first, second in zip(marked, results[0].outputs, other.outputs, strict=True):
            assert np.array_equal(first[~known], second[~known]), "\n".join(lines)
    assert not results[0].warnings or any(known.any() for known in marked)
