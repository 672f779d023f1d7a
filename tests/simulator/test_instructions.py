"""Elementwise and ScalarE instructions against float64 formulas, over dtypes and edge shapes."""

import math

import ml_dtypes
import numpy as np
import pytest
from scipy import special
from simulator_kernels import run, values

FLOATS = [np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2]


def check(actual, wanted, roundings=1):
    """Within half an ulp of the output dtype, plus float32 arithmetic, of the exact value."""
    unit = float(ml_dtypes.finfo(actual.dtype).eps)
    tiny = float(ml_dtypes.finfo(actual.dtype).smallest_subnormal)
    bound = 0.5 * unit * np.abs(wanted) + roundings * 2.0**-23 * np.abs(wanted) + tiny
    assert actual.shape == wanted.shape
    assert (np.abs(actual.astype(np.float64) - wanted) <= bound).all()


def wide(x):
    return x.astype(np.float64)


BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}


@pytest.mark.parametrize("name", BINARY)
def test_tensor_tensor_operators(name):
    """In place too, in float32 rounded once."""
    a, b = values((64, 40)), values((64, 40), seed=1)
    a[:, ::3] = b[:, ::3]
    a[:, 1::7] = 0
    body = f"""
        x, y = load(a), load(b)
        r = nl.ndarray(a.shape, nl.bfloat16, nl.sbuf)
        nisa.tensor_tensor(dst=r, data1=x, data2=y, op=nl.{name})
        nisa.tensor_tensor(dst=x, data1=x, data2=y, op=nl.{name})
        return out(r), out(x)
    """
    narrow, exact = run(body, a, b).outputs
    check(narrow, BINARY[name](wide(a), wide(b)).astype(np.float64))
    assert np.array_equal(exact, BINARY[name](a, b))


def test_tensor_tensor_power_and_magnitudes():
    a, b = np.abs(values((8, 16))) + 0.5, values((8, 16), seed=1)
    body = """
        x, y = load(a), load(b)
        r = nl.ndarray((8, 3, 16), nl.float32, nl.sbuf)
        nisa.tensor_tensor(dst=r[:, 0, :], data1=x, data2=y, op=nl.power)
        nisa.tensor_tensor(dst=r[:, 1, :], data1=x, data2=y, op=nl.abs_max)
        nisa.tensor_tensor(dst=r[:, 2, :], data1=x, data2=y, op=nl.abs_min)
        return out(r)
    """
    result = run(body, a, b, target="trn3").output
    check(result[:, 0], wide(a) ** wide(b), 16)
    assert np.array_equal(result[:, 1], np.where(np.abs(a) > np.abs(b), a, b))
    assert np.array_equal(result[:, 2], np.where(np.abs(a) < np.abs(b), a, b))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor"])
def test_bit_operators(dtype, name):
    a, b = values((16, 9), dtype), values((16, 9), dtype, 1)
    body = f"""
        x, y = load(a), load(b)
        r = nl.ndarray(a.shape, a.dtype, nl.sbuf)
        nisa.tensor_tensor(dst=r, data1=x, data2=y, op=nl.{name})
        return out(r)
    """
    assert np.array_equal(run(body, a, b).output, getattr(np, name)(a, b))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint16])
def test_shifts_are_logical(dtype):
    a = values((16, 9), dtype)
    bits = np.dtype(dtype).itemsize * 8
    unsigned = a.view(f"u{bits // 8}")
    body = """
        x = load(a)
        r = nl.ndarray((16, 3, 9), a.dtype, nl.sbuf)
        nisa.tensor_scalar(dst=r[:, 0, :], data=x, op0=nl.left_shift, operand0=3)
        nisa.tensor_scalar(dst=r[:, 1, :], data=x, op0=nl.right_shift, operand0=2)
        nisa.tensor_scalar(dst=r[:, 2, :], data=x, op0=nl.right_shift, operand0=40)
        return out(r)
    """
    result = run(body, a).output
    assert np.array_equal(result[:, 0].view(unsigned.dtype), unsigned << 3)
    assert np.array_equal(result[:, 1].view(unsigned.dtype), unsigned >> 2)
    assert (result[:, 2] == 0).all()


def test_int32_is_exact_on_gpsimd_and_float32_on_vector():
    a = np.full((4, 4), 2**24 + 1, np.int32)
    b = np.full((4, 4), 2, np.int32)
    body = """
        x, y = load(a), load(b)
        r = nl.ndarray((4, 2, 4), nl.int32, nl.sbuf)
        nisa.tensor_tensor(dst=r[:, 0, :], data1=x, data2=y, op=nl.add)
        nisa.tensor_tensor(dst=r[:, 1, :], data1=x, data2=y, op=nl.add, engine=nisa.engine.vector)
        return out(r)
    """
    result = run(body, a, b)
    assert (result.output[:, 0] == 2**24 + 3).all()
    assert (result.output[:, 1] == 2**24 + 2).all()
    engines = [i.engine for i in result.trace.instructions if i.op == "tensor_tensor"]
    assert engines == ["gpsimd", "vector"]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("vector", [False, True])
def test_tensor_scalar_two_operators(reverse, vector):
    a, b = values((128, 33), ml_dtypes.bfloat16), values((128, 1), seed=2)
    operand = "load(b)" if vector else "1.75"
    body = f"""
        x, s = load(a), {operand}
        r = nl.ndarray(a.shape, nl.float32, nl.sbuf)
        nisa.tensor_scalar(dst=r, data=x, op0=nl.subtract, operand0=s, reverse0={reverse},
                           op1=nl.multiply, operand1=0.5)
        return out(r)
    """
    scalar = wide(b) if vector else 1.75
    wanted = (scalar - wide(a) if reverse else wide(a) - scalar) * 0.5
    result = run(body, a, b).output
    assert np.abs(result - wanted).max() <= 2.0**-23 * 4


def test_scalar_tensor_tensor_and_reciprocal():
    a, b, c = values((7, 12)), values((7, 1), seed=1), values((7, 12), seed=2)
    body = """
        x, s, y = load(a), load(b), load(c)
        r = nl.ndarray((7, 2, 12), nl.float32, nl.sbuf)
        nisa.scalar_tensor_tensor(dst=r[:, 0, :], data=x, op0=nl.multiply, operand0=s,
                                  op1=nl.subtract, operand1=y, reverse1=True)
        nisa.reciprocal(dst=r[:, 1, :], data=x)
        return out(r)
    """
    result = run(body, a, b, c).output
    assert np.abs(result[:, 0] - (wide(c) - wide(a) * wide(b))).max() < 1e-6
    check(result[:, 1], 1.0 / wide(a))


ACTIVATIONS = {
    "copy": lambda x: x,
    "square": np.square,
    "sigmoid": special.expit,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * special.ndtr(x),
    "gelu_apprx_tanh": lambda x: (
        0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "gelu_apprx_sigmoid": lambda x: x * special.expit(1.702 * x),
    "gelu_dx": lambda x: special.ndtr(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi),
    "silu": lambda x: x * special.expit(x),
    "silu_dx": lambda x: special.expit(x) * (1 + x * (1 - special.expit(x))),
    "tanh": np.tanh,
    "softplus": lambda x: np.logaddexp(0, x),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "erf": special.erf,
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x),
    "exp": np.exp,
    "sign": np.sign,
    "abs": np.abs,
    "log": lambda x: np.log(np.abs(x)),
    "sqrt": lambda x: np.sqrt(np.abs(x)),
    "rsqrt": lambda x: 1 / np.sqrt(np.abs(x)),
    "reciprocal": lambda x: 1 / x,
    "sin": np.sin,
    "arctan": np.arctan,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_functions(name):
    a = values((128, 64))
    if name in ("log", "sqrt", "rsqrt"):
        a = np.abs(a)
    if name == "sin":
        a = np.clip(a, -3.14, 3.14)
    body = f"""
        x = load(a)
        r = nl.ndarray(a.shape, nl.float32, nl.sbuf)
        nisa.activation(dst=r, op=nl.{name}, data=x)
        return out(r)
    """
    wanted = ACTIVATIONS[name](wide(a))
    result = run(body, a).output
    assert (np.abs(result - wanted) <= 4 * 2.0**-23 * np.abs(wanted) + 1e-7 * 2).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_activation_scale_bias_and_sum(dtype):
    a, b, c = values((128, 40), dtype), values((128, 1), seed=1), values((128, 1), seed=2)
    body = """
        x, s, t = load(a), load(b), load(c)
        r = nl.ndarray(a.shape, nl.float32, nl.sbuf)
        total = nl.ndarray((128, 1), nl.float32, nl.sbuf)
        nisa.activation(dst=r, op=nl.tanh, data=x, scale=s, bias=t, reduce_op=nl.add,
                        reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce)
        nisa.activation(dst=r, op=nl.tanh, data=x, scale=s, bias=t, reduce_op=nl.add,
                        reduce_res=total, reduce_cmd=nisa.reduce_cmd.reduce)
        return out(r), out(total)
    """
    result, total = run(body, a, b, c).outputs
    wanted = np.tanh(wide(a) * wide(b) + wide(c))
    slack = 2.0**-22 * (np.abs(wide(a) * wide(b)) + np.abs(wide(c)) + 1)
    assert (np.abs(result - wanted) <= slack).all()
    assert np.abs(total[:, 0] - 2 * wanted.sum(1)).max() <= 80 * 2.0**-21


def test_sine_beyond_pi_is_the_documented_cubic():
    a = np.array([[9.0, -9.0, 3.0]], np.float32)
    body = """
        x = load(a)
        r = nl.ndarray(a.shape, nl.float32, nl.sbuf)
        nisa.activation(dst=r, op=nl.sin, data=x)
        return out(r), nl_out(x)
    """.replace(", nl_out(x)", ", out(nl.sin(x))")
    result = run(body, a)
    assert abs(result.outputs[0][0, 0] - 27.65) < 0.02  # AWS: "sin(9.0) returns ~27.65"
    assert np.abs(result.outputs[1] - np.sin(wide(a))).max() < 2e-6
    assert any("outside the documented range" in w for w in result.warnings)


@pytest.mark.parametrize("source", [*FLOATS, np.int32, np.uint8])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16", "int8", "uint8", "int32"])
def test_tensor_copy_converts_through_float32(source, target):
    a = values((5, 31), source, scale=50.0)
    body = f"""
        x = load(a)
        r = nl.ndarray(a.shape, nl.{target}, nl.sbuf)
        nisa.tensor_copy(dst=r, src=x)
        return out(r)
    """
    through = wide(a).astype(np.float32)
    result = run(body, a).output
    if target.startswith(("int", "uint")):
        info = np.iinfo(target)
        finite = np.where(np.isnan(through), 0, through)
        wanted = np.clip(np.rint(finite.astype(np.float64)), info.min, info.max).astype(target)
    else:
        wanted = through.astype(getattr(ml_dtypes, target, target))
    assert result.tobytes() == wanted.tobytes()


def test_same_dtype_copy_keeps_every_bit():
    a = np.array([[np.nan, np.inf, -np.inf, -0.0]], np.float32)
    a.view(np.uint32)[0, 0] = 0x7FC12345
    r = run("x = load(a)\nr = nl.ndarray(a.shape, a.dtype, nl.sbuf)\n"
            "nisa.tensor_copy(dst=r, src=x)\nreturn out(r)", a).output  # fmt: skip
    assert r.tobytes() == a.tobytes()


@pytest.mark.parametrize(
    ("dtype", "value"), [("float32", 1.5), ("bfloat16", -2.0), ("int8", -7), ("uint32", 2**32 - 1)]
)
def test_memset(dtype, value):
    body = f"""
        r = nl.ndarray((128, 3), nl.{dtype}, nl.sbuf)
        nisa.memset(dst=r, value={value})
        return out(r)
    """
    assert (run(body).output.astype(np.float64) == value).all()


@pytest.mark.parametrize("reverse", [False, True])
def test_tensor_copy_predicated(reverse):
    a, b = values((16, 10)), values((16, 10), seed=1)
    c = (values((16, 10), seed=2) > 0).astype(np.uint8)
    body = f"""
        x, y, p = load(a), load(b), load(c)
        nisa.tensor_copy_predicated(dst=x, src=y, predicate=p, reverse_pred={reverse})
        return out(x)
    """
    chosen = (c == 0) if reverse else (c != 0)
    assert np.array_equal(run(body, a, b, c).output, np.where(chosen, b, a))


def test_activate2_and_exponential_on_trn3():
    a, b = values((32, 20)), values((32, 1), seed=3)
    body = """
        x, s = load(a), load(b)
        r = nl.ndarray((32, 3, 20), nl.float32, nl.sbuf)
        total = nl.ndarray((32, 1), nl.float32, nl.sbuf)
        nisa.activate2(dst=r[:, 0, :], op=nl.tanh, data=x, imm0=2.0, imm1=s, op0=nl.multiply,
                       op1=nl.subtract)
        nisa.activate2(dst=r[:, 1, :], op=nl.prelu, data=x, imm0=0.0, imm1=0.0, op0=nl.bypass,
                       op1=nl.bypass, relu_param=0.25)
        nisa.exponential(dst=r[:, 2, :], src=x, max_value=s, reduce_res=total,
                         reduce_cmd=nisa.reduce_cmd.reset_reduce)
        return out(r), out(total)
    """
    r, total = run(body, a, b, target="trn3").outputs
    assert np.abs(r[:, 0] - np.tanh(2 * wide(a) - wide(b))).max() < 1e-6
    check(r[:, 1], np.where(a >= 0, wide(a), 0.25 * wide(a)))
    power = np.exp(wide(a) - wide(b))
    assert (np.abs(r[:, 2] - power) <= 2.0**-20 * power).all()
    assert (np.abs(total[:, 0] - power.sum(1)) <= 2.0**-19 * power.sum(1)).all()


def test_tfloat32_keeps_ten_mantissa_bits():
    a = np.array([[1 + 2.0**-10, 1 + 2.0**-11, 1 + 3 * 2.0**-11, np.inf]], np.float32)
    body = """
        r = nl.ndarray((1, 4), nl.tfloat32, nl.sbuf)
        nisa.dma_copy(dst=r, src=a)
        s = nl.ndarray((1, 1), nl.tfloat32, nl.sbuf)
        nisa.memset(dst=s, value=1.0 + 2.0**-12)
        return out(r, nl.float32), out(s, nl.float32)
    """
    r, s = run(body, a).outputs
    assert r[0].tolist() == [1 + 2.0**-10, 1.0, 1 + 2.0**-9, np.inf]  # ties to even
    assert s[0, 0] == 1.0
