"""DMA instructions, indirect access, and tensor views against NumPy."""

import ml_dtypes
import numpy as np
import pytest
from simulator_kernels import check, refusals, run, values

from nmm_compiler.errors import OutOfBoundsError


@pytest.mark.parametrize("source", [np.float32, ml_dtypes.bfloat16, np.int32, np.uint8])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float8_e5m2", "int16"])
def test_dma_converts_through_float32(source, target):
    a = (values((9, 7)) * 30).astype(source)
    body = f"""
        t = nl.ndarray(a.shape, nl.{target}, nl.sbuf)
        nisa.dma_copy(dst=t, src=a)
        return out(t)
    """
    middle = a.astype(np.float32)
    wanted = np.rint(middle).astype(target) if target == "int16" else middle.astype(
        getattr(ml_dtypes, target, target))  # fmt: skip
    assert run(body, a).output.tobytes() == wanted.tobytes()


def test_dma_between_all_memories_and_shapes():
    a = values((4, 6))
    body = """
        r = nl.ndarray((2, 12), a.dtype, nl.shared_hbm)
        nisa.dma_copy(dst=r, src=a)
        s = nl.ndarray((3, 8), a.dtype, nl.sbuf)
        nisa.dma_copy(dst=s, src=r)
        t = nl.ndarray((8, 3), a.dtype, nl.sbuf)
        nisa.dma_copy(dst=t, src=s)
        return r, out(t)
    """
    check(body, [a], a.reshape(2, 12), a.reshape(8, 3))


@pytest.mark.parametrize("shape", [(5, 3), (4, 6, 8), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
def test_dma_transpose(shape, dtype):
    a = (values(shape) * 50).astype(dtype)
    axes = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]
    body = f"""
        t = nl.ndarray({tuple(shape[i] for i in axes)}, a.dtype, nl.sbuf)
        nisa.dma_transpose(dst=t, src=a)
        return out(t)
    """
    result = run(body, a)
    assert result.output.tobytes() == np.ascontiguousarray(a.transpose(axes)).tobytes()
    transposes = [i for i in result.trace.instructions if i.attributes.get("transpose")]
    assert len(transposes) == 1


def test_dma_compute_adds_in_float32():
    a, b = values((4, 6), ml_dtypes.bfloat16), values((4, 6))
    body = """
        r = nl.ndarray((4, 6), nl.float32, nl.shared_hbm)
        nisa.dma_compute(dst=r, srcs=[a, b, b], reduce_op=nl.add)
        return r
    """
    check(body, [a, b], a.astype(np.float32) + b + b)


GATHER = """
    i = load(b)
    t = nl.ndarray((b.shape[0], 6), a.dtype, nl.sbuf)
    nisa.memset(dst=t, value=-1.0)
    nisa.dma_copy(dst=t, src=a.ap(pattern=[[6, b.shape[0]], [1, 6]], vector_offset=i,
                                  indirect_dim=0){})
    return out(t)
"""


def test_gather_and_out_of_bounds_modes():
    a = values((10, 6))
    b = np.array([[3], [0], [9], [3]], np.uint32)
    assert np.array_equal(run(GATHER.format(""), a, b).output, a[b[:, 0]])
    b[1] = 10
    with pytest.raises(OutOfBoundsError, match="runtime index 10 of row 1"):
        run(GATHER.format(""), a, b)
    skipped = run(GATHER.format(", oob_mode=nisa.oob_mode.skip"), a, b).output
    assert (skipped[1] == -1).all()
    assert np.array_equal(skipped[2], a[9])


def test_scatter_into_an_input():
    a, b = values((10, 6)), np.array([[7], [2]], np.uint32)
    body = """
        i, x = load(b), load(c)
        nisa.dma_copy(dst=a.ap(pattern=[[6, 2], [1, 6]], vector_offset=i, indirect_dim=0), src=x)
        return a
    """
    wanted, new = a.copy(), values((2, 6), seed=1)
    wanted[b[:, 0]] = new
    assert np.array_equal(run(body, a, b, new).output, wanted)
    assert np.array_equal(a, wanted)  # inputs are updated in place


def test_scalar_offsets_by_tensor_and_register():
    a, b = values((4, 8, 5)), np.array([[2]], np.int32)
    body = """
        i = load(b)
        t = nl.ndarray((8, 5), a.dtype, nl.sbuf)
        nisa.dma_copy(dst=t, src=a.select(0, i))
        reg = nisa.register_alloc()
        nisa.register_load(reg, i)
        u = nl.ndarray((8, 3), a.dtype, nl.sbuf)
        nisa.dma_copy(dst=u, src=a.ap(pattern=[[5, 8], [1, 3]], offset=1, scalar_offset=reg,
                                      indirect_dim=0))
        return out(t), out(u)
    """
    check(body, [a, b], a[2], a[2, :, 1:4])


def test_indirect_transpose():
    a = values((64, 32), ml_dtypes.bfloat16)
    b = np.random.default_rng(0).integers(0, 64, (16, 1)).astype(np.uint32)
    body = """
        i = load(b)
        t = nl.ndarray((32, 16), a.dtype, nl.sbuf)
        nisa.dma_transpose(dst=t, src=a.ap(pattern=[[32, 16], [1, 32]], vector_offset=i,
                                           indirect_dim=0), axes=(1, 0))
        return out(t)
    """
    wanted = np.ascontiguousarray(a[b[:, 0]].T)
    assert run(body, a, b).output.tobytes() == wanted.tobytes()


VIEWS = {
    "x[:, 1:3, ::2]": lambda x: x[:, 1:3, ::2],
    "x[4:8]": lambda x: x[4:8],
    "x[5]": lambda x: x[5:6],
    "x[:, 2]": lambda x: x[:, 2],
    "x[:, 2, 3]": lambda x: x[:, 2, 3:4],
    "x[..., -1]": lambda x: x[..., -1],
    "x[:, nl.ds(1, 2), nl.ds(3, 4)]": lambda x: x[:, 1:3, 3:7],
    "x.permute((0, 2, 1))": lambda x: x.transpose(0, 2, 1),
    "x.reshape((8, 32))": lambda x: x.reshape(8, 32),
    "x.reshape((8, 2, 2, 8))": lambda x: x.reshape(8, 2, 2, 8),
    "x[:, 0:1].broadcast(1, 3)": lambda x: np.repeat(x[:, 0:1], 3, 1),
    "x.expand_dim(2).squeeze_dim(2)": lambda x: x,
    "x.reshape_dim(2, (2, -1))": lambda x: x.reshape(8, 4, 2, 4),
    "x.flatten_dims(1, 2)": lambda x: x.reshape(8, 32),
    "x.slice(2, 1, 7, 3)": lambda x: x[:, :, 1:7:3],
    "x.select(1, 3)": lambda x: x[:, 3],
    # a permuted view cannot be flattened: copy it first
    "load(out(x.reshape((8, 4, 2, 4)).permute((0, 3, 2, 1)))).flatten_dims(2, 3)": lambda x: (
        x.reshape(8, 4, 2, 4).transpose(0, 3, 2, 1).reshape(8, 4, 8)
    ),
    "x.rearrange(('b', 'i', ('h', 'w')), ('b', 'w', 'h', 'i'), {'h': 4})": lambda x: x.reshape(
        8, 4, 4, 2
    ).transpose(0, 3, 2, 1),
    "x.ap([[32, 8], [2, 5]], offset=3)": lambda x: x.reshape(8, 32)[:, 3:13:2],
    "x.view(nl.uint16)": lambda x: x.view(np.uint16),
    "x.view(nl.uint8).view(nl.float32)": lambda x: x,
}


@pytest.mark.parametrize("text", VIEWS)
def test_views(text):
    a = values((8, 4, 8))
    body = f"x = load(a)\nreturn out({text})"
    wanted = VIEWS[text](a)
    result = run(body, a).output
    assert result.shape == wanted.shape
    assert result.tobytes() == np.ascontiguousarray(wanted).tobytes()


def test_rearrange_without_merge_and_hbm_views():
    a = values((8, 24))
    body = """
        x = load(a)
        part = x[1:3, 2:4].view(nl.uint8)
        assert part.base_tensor.shape == a.shape and part.base_tensor.dtype == a.dtype
        v = x.rearrange(('b', ('h', 'w')), ('b', 'w', 'h'), {'h': 4})
        assert v.shape == (8, 6, 4)
        assert v.get_pattern() == [[24, 8], [1, 6], [6, 4]]
        assert not v.is_contiguous() and x.is_contiguous()
        t = nl.ndarray((24,), a.dtype, nl.shared_hbm)
        nisa.dma_copy(dst=t, src=a[2])
        assert a[2].shape == (24,) and a[2, 3:5].offset == 51
        return out(v), t
    """
    check(body, [a], a.reshape(8, 4, 6).transpose(0, 2, 1), a[2])


BAD = refusals("""
x[:, 0:5]  # OutOfBoundsError
x[:, 4]  # OutOfBoundsError
x[:, :, :, 0]  # OperandError
x[:, 1.5]  # OperandError
x.permute((0, 0, 1))  # OperandError
x.reshape((8, 33))  # OperandError
x.reshape((3, -1))  # OperandError
x.permute((0, 2, 1)).reshape((8, 32))  # OperandError
x.broadcast(1, 2)  # OperandError
x.squeeze_dim(1)  # OperandError
x.flatten_dims(0, 1)  # OperandError
x.ap([[32, 8], [1, 33]]).shape  # OutOfBoundsError
x.view(nl.float32)[:, :, 0:9]  # OutOfBoundsError
x[:, :, 0:3].view(nl.uint8)[:, :, 0:1].view(nl.float32)  # OperandError
""")


@pytest.mark.parametrize(("text", "kind", "_"), BAD)
def test_bad_views_are_refused(text, kind, _):
    with pytest.raises(kind) as caught:
        run(f"x = load(a)\nv = {text}\nreturn out(x)", values((8, 4, 8)))
    assert caught.value.line > 0
    assert caught.value.file.endswith(".py")


@pytest.mark.parametrize("key", ["0:0", "nl.ds(8, 0)", "3:3, 0:4", "2, 4:4"])
def test_a_part_of_hbm_without_elements_may_be_made_but_not_used(key):
    """As the share of a core that has no rows to do."""
    body = f"part = a[{key}]\nx = load(a)\n{{}}\nreturn out(x)"
    run(body.format(""), values((8, 8)))
    for use in (
        "nisa.dma_copy(dst=x[0:1], src=part)", "nisa.dma_copy(dst=part, src=x[0:1])",
        "part.shape", "part[0:1]", "part.reshape((1, 1))", "part.ap([[1, 1], [1, 1]])",
        "repr(part)", "len(part)", "nl.load(part)", "return part",
    ):  # fmt: skip
        with pytest.raises(OutOfBoundsError, match="is empty or leaves it") as caught:
            run(body.format(use), values((8, 8)))
        assert caught.value.line > 0 or use == "return part"


@pytest.mark.parametrize("memory", ["a", "x"])
def test_a_pattern_that_leaves_its_tensor_may_be_made_but_not_used(memory):
    """As one for a tile behind the last, which the kernel then leaves out."""
    body = f"x = load(a)\npart = {memory}.ap([[8, 8], [1, 8]], offset=1)\n{{}}\nreturn out(x)"
    run(body.format(""), values((8, 8)))
    for use in ("nisa.tensor_copy(dst=nl.zeros((8, 8), nl.float32), src=part)", "part[0:1]",
                "nisa.dma_copy(dst=nl.zeros((8, 8), nl.float32), src=part)"):  # fmt: skip
        for mode in ("functional", "timing"):
            with pytest.raises(OutOfBoundsError, match=r"at offset 1 leaves tensor") as caught:
                run(body.format(use), values((8, 8)), mode=mode)
            assert caught.value.line > 0


@pytest.mark.parametrize(
    "text",
    ["a[3:2]", "a[9:9]", "a[nl.ds(0, -1)]", "a[nl.ds(-2, 1)]", "a.slice(0, 3, 3)",
     "a[nl.ds(nisa.register_alloc(-2), 1)]", "a[nisa.register_alloc(-2) : 8]"],
)  # fmt: skip
def test_a_part_that_leaves_its_tensor_may_not_be_made(text):
    with pytest.raises(OutOfBoundsError, match="is empty or leaves it"):
        run(f"part = {text}\nreturn out(load(a))", values((8, 8)))
