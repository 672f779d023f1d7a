"""Random programs: whatever they do, only catalogue errors come out, and valid ones compute."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulator_kernels import HEADER, kernel_file

from nmm_compiler.errors import NmmError
from nmm_compiler.simulator.run import simulate

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3", "int8", "uint8", "int32", "uint32"]
SIZES = st.sampled_from([1, 2, 3, 31, 32, 33, 64, 100, 128])
WIDTHS = st.sampled_from([1, 2, 3, 8, 16, 31, 128, 512])

SLICE = st.one_of(
    st.just(":"),
    st.builds(lambda a, b: f"{a}:{b}", st.integers(0, 130), st.integers(0, 130)),
    st.builds(lambda a, s: f"{a}::{s}", st.integers(0, 5), st.integers(1, 4)),
    st.builds(str, st.integers(-3, 130)),
    st.builds(lambda a, n: f"nl.ds({a}, {n})", st.integers(0, 20), st.integers(0, 20)),
)
INDEX = st.one_of(
    st.just(""),
    st.builds(lambda a, b: f"[{a}, {b}]", SLICE, SLICE),
    st.builds(lambda a: f"[{a}]", SLICE),
    st.just("[..., 0:1]"),
    st.builds(lambda n: f".reshape(({n}, -1))", SIZES),
    st.just(".expand_dim(1)"),
    st.just(".permute((0, 1))"),
    st.builds(lambda d: f".view(nl.{d})", st.sampled_from(DTYPES)),
)
TENSOR = st.builds(
    lambda i, v: f"t[{i}]{v}",
    st.integers(0, 5),
    st.one_of(st.just(""), st.just(""), INDEX),
)
OPERAND = st.one_of(TENSOR, st.sampled_from(["0.5", "-2", "3", "0"]))
OPS = st.sampled_from(
    ["add", "subtract", "multiply", "maximum", "minimum", "less", "logical_and", "bitwise_and",
     "left_shift", "power", "abs", "rsqrt", "exp", "bypass", "divide", "average"]
)  # fmt: skip
FUNCTIONS = st.sampled_from(["copy", "exp", "gelu", "silu", "rsqrt", "sin", "add", "prelu", "erf"])


def text(pattern, *parts):
    return st.builds(lambda *p: pattern.format(*p), *parts)


ENGINES = st.sampled_from(["unknown", "vector", "scalar", "gpsimd", "tensor"])
STATEMENT = st.one_of(
    text("nisa.dma_copy(dst={}, src={})", TENSOR, TENSOR),
    text("nisa.tensor_copy(dst={}, src={}, engine=nisa.engine.{})", TENSOR, TENSOR, ENGINES),
    text("nisa.memset(dst={}, value={})", TENSOR, st.sampled_from(["0", "1.5", "-3", "300"])),
    text("nisa.tensor_tensor(dst={}, data1={}, data2={}, op=nl.{})", TENSOR, TENSOR, TENSOR, OPS),
    text("nisa.tensor_scalar(dst={}, data={}, op0=nl.{}, operand0={}, op1=nl.{}, operand1={})",
         TENSOR, TENSOR, OPS, OPERAND, OPS, OPERAND),
    text("nisa.activation(dst={}, op=nl.{}, data={}, bias={}, scale={})", TENSOR, FUNCTIONS, TENSOR,
         OPERAND, OPERAND),
    text("nisa.tensor_reduce(dst={}, op=nl.{}, data={}, axis={})", TENSOR, OPS, TENSOR,
         st.integers(-1, 2)),
    text("nisa.nc_matmul(dst={}, stationary={}, moving={})", TENSOR, TENSOR, TENSOR),
    text("nisa.nc_transpose(dst={}, data={})", TENSOR, TENSOR),
    text("nisa.dma_transpose(dst={}, src={})", TENSOR, TENSOR),
    text("nisa.reciprocal(dst={}, data={})", TENSOR, TENSOR),
    text("nisa.iota(dst={}, pattern=[[{}, {}]], channel_multiplier={})", TENSOR,
         st.integers(-3, 3), WIDTHS, st.integers(-2, 2)),
    text("nisa.affine_select(dst={}, pattern=[[1, {}]], channel_multiplier=-1, on_true_tile={}, "
         "on_false_value=0.0, cmp_op=nl.less)", TENSOR, WIDTHS, TENSOR),
    text("nisa.max8(dst={}, src={})", TENSOR, TENSOR),
    text("nisa.bn_stats(dst={}, data={})", TENSOR, TENSOR),
    text("nisa.nc_stream_shuffle(dst={}, src={}, shuffle_mask=list(range(32)))", TENSOR, TENSOR),
    text("nisa.tensor_copy_predicated(dst={}, src={}, predicate={})", TENSOR, OPERAND, TENSOR),
    text("nisa.nc_n_gather(dst={}, data={}, indices={})", TENSOR, TENSOR, TENSOR),
    text("nisa.select_reduce(dst={}, predicate={}, on_true={}, on_false={})", TENSOR, TENSOR,
         TENSOR, OPERAND),
    text("nisa.tensor_tensor_scan(dst={}, data0={}, data1={}, initial={}, op0=nl.{}, op1=nl.{})",
         TENSOR, TENSOR, TENSOR, OPERAND, OPS, OPS),
    text("t.__setitem__({}, nl.add({}, {}))", st.integers(0, 5), TENSOR, OPERAND),
    text("t.__setitem__({}, nl.softmax({}))", st.integers(0, 5), TENSOR),
    text("t.__setitem__({}, nl.load({}))", st.integers(0, 5), TENSOR),
)  # fmt: skip


ATTEMPT = """\
def attempt(step):
    try:
        step()
    except Exception as error:
        if type(error).__module__ != "nmm_compiler.errors":
            raise


"""


@st.composite
def programs(draw):
    """Six tensors of mostly equal shapes and up to 12 steps; a refused step is skipped."""
    lines = ["t = []"]
    rows, columns = draw(SIZES), draw(WIDTHS)
    kind = draw(st.sampled_from(DTYPES))
    for _ in range(6):
        buffer = draw(st.sampled_from(["sbuf", "sbuf", "sbuf", "psum", "shared_hbm"]))
        odd = draw(st.integers(0, 3)) == 0
        shape = (draw(SIZES), draw(WIDTHS)) if odd else (rows, columns)
        if not odd and draw(st.booleans()):
            shape = (rows, 1)
        dtype = draw(st.sampled_from([kind, kind, *DTYPES]))
        lines.append(f"t.append(nl.ndarray({shape}, nl.{dtype}, nl.{buffer}))")
        if draw(st.integers(0, 4)):
            lines.append("attempt(lambda: nisa.memset(dst=t[-1], value=1))")
    steps = draw(st.lists(STATEMENT, min_size=1, max_size=12))
    lines += [f"attempt(lambda: {step})" for step in steps]
    lines.append("return a")
    body = "\n".join("    " + line for line in lines)
    return f"{HEADER}{ATTEMPT}@nki.jit\ndef kernel(a):\n{body}\n"


def execute(source, **options):
    """Run; return the outcome: the Simulation, or the catalogue error."""
    try:
        return simulate(f"{kernel_file(source)}:kernel", np.ones((4, 4), np.float32), **options)
    except NmmError as error:
        outcome = error
    # a syntax error may come from the text made here; any other cause is the simulator's
    cause = type(outcome.__cause__).__name__
    assert cause in ("NoneType", "SyntaxError"), f"{cause}: {outcome}\n{source}"
    return outcome


COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=150, **COMMON)
@given(programs(), st.sampled_from(["trn1", "trn2", "trn3"]), st.booleans())
def test_random_programs_raise_only_catalogue_errors(source, target, strict):
    execute(source, target=target, strict=strict, mode="functional")


@pytest.mark.long
@settings(max_examples=5000, **COMMON)
@given(programs(), st.sampled_from(["trn1", "trn2", "trn3"]), st.booleans())
def test_many_random_programs_raise_only_catalogue_errors(source, target, strict):
    execute(source, target=target, strict=strict, mode="functional")


@settings(max_examples=100, **COMMON)
@given(programs())
def test_timing_mode_sees_the_same_instructions(source):
    """What runs with data runs without, with an equal trace."""
    full = execute(source, mode="functional", strict=False)
    timed = execute(source, mode="timing", strict=False)
    if isinstance(full, NmmError):
        return
    assert not isinstance(timed, NmmError), timed
    assert timed.trace.instructions == full.trace.instructions


@st.composite
def chains(draw):
    """A valid chain of float32 elementwise steps, as kernel text and as a NumPy function."""
    rows, columns = draw(SIZES), draw(WIDTHS)
    steps = draw(st.lists(st.tuples(
        st.sampled_from(["add", "subtract", "multiply", "maximum", "minimum"]),
        st.floats(-4, 4, width=32), st.booleans()), min_size=1, max_size=8))  # fmt: skip
    return rows, columns, steps


@settings(max_examples=60, **COMMON)
@given(chains())
def test_valid_chains_compute(chain):
    rows, columns, steps = chain
    lines = ["x = load(a)"]
    value = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    wanted = value.copy()
    for name, number, tensor in steps:
        function = getattr(np, name)
        if tensor:
            lines.append(f"nisa.tensor_tensor(dst=x, data1=x, data2=x, op=nl.{name})")
            wanted = function(wanted, wanted)
        else:
            lines.append(f"nisa.tensor_scalar(dst=x, data=x, op0=nl.{name}, operand0={number!r})")
            wanted = function(wanted, np.float32(number))
    body = "\n".join("    " + line for line in [*lines, "return out(x)"])
    source = f"{HEADER}@nki.jit\ndef kernel(a):\n{body}\n"
    result = simulate(f"{kernel_file(source)}:kernel", value, mode="functional").output
    assert np.array_equal(result, wanted, equal_nan=True)
