"""Each strict rule, by a kernel that breaks it; and what strict=False makes of it."""

import inspect
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from simulator_kernels import HEADER, kernel_file, refusals, run

from nmm_compiler import errors
from nmm_compiler.simulator.isa.names import INSTRUCTIONS
from nmm_compiler.simulator.run import ArraySpec, simulate

F = np.float32


def ones(*shape, dtype=F):
    return np.ones(shape, dtype)


# What documented_rules.toml does not hold.
REFUSED = refusals("""
nl.ndarray((1, 70000), nl.float32)  # OnChipCapacityError: 280,000 B
nl.ndarray((4, 4), nl.float32, 'sbuf')  # KernelArgumentError: nl.sbuf
nl.ndarray((4, 4), 'float33')  # OperandError: float33
nl.ndarray((4, 0), nl.float32)  # OperandError: at least 1
x = load(a); t = nl.ndarray((8, 4), nl.float32, nl.sbuf); nisa.tensor_copy(dst=t[5:8], src=x[0:3])  # OperandError: partition 5
nisa.tensor_copy(dst=a, src=load(a))  # OperandError: HBM
x = load(a); p = nl.ndarray((4, 8), nl.bfloat16, nl.psum); nisa.nc_transpose(dst=p, data=x)  # OperandError: must be the same
nisa.no_such_instruction(dst=a)  # UnsupportedInstructionError: nki.isa.no_such
nl.par_dim(128)  # UnsupportedInstructionError: nki.language.par_dim
x = load(a); nisa.tensor_tensor(dst=x, data1=x, data2=x, op=len)  # UnsupportedInstructionError: operator 'len'
nisa.register_move(a, 1)  # OperandError: pass a register
x = load(a); nl.add(x, x[:, 0:3])  # OperandError: do not broadcast
nisa.tensor_copy(dst=load(a), sauce=a)  # KernelFailedError: sauce
nisa.core_barrier(data=a, cores=(0, 1))  # SimulationError: grid=2
raise ValueError('no')  # KernelFailedError: ValueError: no
undefined_name  # KernelFailedError: NameError
assert a.shape == (1,), 'wrong shape'  # KernelFailedError: wrong shape
""")  # noqa: E501


@pytest.mark.parametrize(("body", "kind", "text"), REFUSED)
def test_rule(body, kind, text):
    with pytest.raises(kind) as caught:
        run(body + "\nreturn a", ones(8, 4))
    assert text in str(caught.value)
    lines = Path(caught.value.file).read_text().splitlines()
    last = body.splitlines()[-1].strip()
    assert lines[caught.value.line - 1].strip() == last  # the kernel's own line


def test_shift_left_in_place_is_no_hazard():
    a = np.arange(32, dtype=F).reshape(8, 4)
    body = "x = load(a)\nnisa.tensor_copy(dst=x[:, 0:3], src=x[:, 1:4])\nreturn out(x)"
    assert np.array_equal(run(body, a).output[:, :3], a[:, 1:])


UNINITIALIZED = """
    t = nl.ndarray((8, 4), nl.float32, nl.sbuf, name="half")
    nisa.dma_copy(dst=t[:, 0:2], src=a[:, 0:2])
    r = nl.ndarray((8, 4), nl.float32, nl.sbuf)
    nisa.tensor_scalar(dst=r, data=t, op0=nl.add, operand0=1.0)
    return out(r)
"""


HALF_AN_OUTPUT = """
    r = nl.ndarray((8, 4), nl.float32, nl.shared_hbm)
    nisa.dma_copy(dst=r[:, 0:2], src=a[:, 0:2])
    return r
"""


@pytest.mark.parametrize(
    ("body", "said", "written", "poison"),
    [
        (UNINITIALIZED, "16 of 32 elements of tensor 'half'", 2, np.nan),
        ("t = nl.ndarray((2, 2), nl.int32, nl.sbuf)\nreturn out(t)", "never written", 4, 4),
        (HALF_AN_OUTPUT, "16 of 32 elements of output", 1, np.nan),
    ],
)
def test_an_unwritten_read_is_refused_and_poison_without_strict_rules(body, said, written, poison):
    with pytest.raises(errors.HazardError, match=said):
        run(body, ones(8, 4))
    result = run(body, ones(8, 4), strict=False)
    half = result.output.shape[1] // 2
    assert (result.output[:, :half] == written).all()
    assert np.array_equal(np.unique(result.output[:, half:]), [poison], equal_nan=True)
    assert any("never written" in w for w in result.warnings)


def test_tracking_follows_reinterpreted_bytes():
    body = """
        t = nl.ndarray((4, 4), nl.float32, nl.sbuf)
        nisa.memset(dst=t.view(nl.uint8)[:, 0:{}], value=0)
        return out(t)
    """
    assert (run(body.format(16)).output == 0).all()
    with pytest.raises(errors.HazardError):
        run(body.format(15))


LIVE = """
    tiles = []
    for i in range({count}):
        t = nl.ndarray((128, 16384), nl.float32, nl.sbuf, name=f"tile{{i}}")
        nisa.memset(dst=t, value=0.0)
        {keep}
    for t in tiles:
        nisa.dma_copy(dst=a, src=t[0:8, 0:4])
    return a
"""


@pytest.mark.parametrize(
    ("partitions", "count", "kept", "fits"),
    [(128, 8, False, True), (128, 3, True, True), (128, 4, True, False), (65, 3, True, True),
     (65, 4, True, False), (64, 6, True, True), (64, 7, True, False), (32, 12, True, True),
     (32, 13, True, False)],
)  # fmt: skip
def test_sbuf_counts_live_tensors_only(partitions, count, kept, fits):
    """Those of few partitions start at any quarter or half of them, and may lie side by side."""
    body = LIVE.format(count=count, keep="tiles.append(t)" if kept else "pass")
    body = body.replace("(128,", f"({partitions},")
    if not fits:
        with pytest.raises(errors.OnChipCapacityError, match=r"(?s) tile0 .*65,536 B.* tile3 "):
            run(body, ones(8, 4))
    ran = run(body, ones(8, 4), strict=fits)
    live = count if kept else 1
    assert ran.trace.sbuf_peak_bytes == live * 65536
    said = "".join(ran.warnings)
    assert (f"{live * 65536:,}" in said) is (live > 3)
    assert ("beside each other" in said) is (fits and live > 3)


def test_psum_tiles_take_whole_banks():
    body = """
        x = load(a)
        tiles = []
        for i in range({}):
            t = nl.ndarray((4, 4), nl.float32, nl.psum)
            nisa.nc_matmul(dst=t, stationary=x, moving=x)
            tiles.append(t)
        r = nl.ndarray((4, 4), nl.float32, nl.sbuf)
        for t in tiles:
            nisa.tensor_copy(dst=r, src=t)
        return out(r)
    """
    assert run(body.format(8), ones(8, 4)).trace.psum_peak_banks == 8
    with pytest.raises(errors.OnChipCapacityError, match="9 PSUM banks"):
        run(body.format(9), ones(8, 4))


FULL = """
    r = nl.ndarray((8, 4), nl.float32, nl.sbuf)
    nisa.dma_copy(dst=r, src=a)
    early = nl.ndarray((128, {early}), nl.float32, nl.{memory})
    fill(early)
    use(early)
    first = nl.ndarray((128, {size}), nl.float32, nl.{memory}, {first})
    second = nl.ndarray((128, {size}), nl.float32, nl.{memory}, {second})
    fill(first)
    fill(second)
    use(second)
    use(first)
    return out(r)
"""
USES = """
def fill(tile):
    tile = tile[0:4, 0:4]
    if tile.buffer is nl.sbuf:
        nisa.memset(dst=tile, value=0.0)
    else:
        ones = nl.ndarray((4, 4), nl.float32, nl.sbuf)
        nisa.memset(dst=ones, value=1.0)
        nisa.nc_matmul(dst=tile, stationary=ones, moving=ones)


def use(tile):
    seen = nl.ndarray((4, 4), nl.float32, nl.sbuf)
    nisa.tensor_copy(dst=seen, src=tile[0:4, 0:4])


"""


@pytest.mark.parametrize("placed", [(), ("first",), ("second",)])
@pytest.mark.parametrize(
    ("memory", "early", "size", "unit"),
    [("sbuf", 33_000, 30_000, "B"), ("psum", 512, 2560, "bank")],
)
def test_a_capacity_error_names_the_tensors_that_make_up_its_figure(
    memory, early, size, unit, placed
):
    """At an instruction at which all of them live; wherever some were placed by hand."""
    at = {name: "address=(0, 0)" if name in placed else "" for name in ("first", "second")}
    body = FULL.format(memory=memory, early=early, size=size, **at)
    with pytest.raises(errors.OnChipCapacityError) as caught:
        run(body, ones(8, 4), header=HEADER + USES, mode="timing")
    text = str(caught.value).replace(",", "")
    total, at = map(int, re.search(r"(\d+) \w+ .*at instruction (\d+)", text).groups())
    shown = re.findall(rf": (\d+) {unit}.*live in instructions (\d+)\.\.(\d+)", text)
    assert len(shown) >= 2
    assert sum(int(size) for size, *_ in shown) == total
    assert all(int(first) <= at <= int(last) for _, first, last in shown)


ADDRESSES = """
    x = nl.ndarray((8, 4), nl.float32, nl.sbuf, name="first", address=(0, 0))
    nisa.dma_copy(dst=x, src=a)
    y = nl.ndarray((8, 4), nl.float32, nl.sbuf, name="second", address=(0, {}))
    nisa.dma_copy(dst=y, src=a)
    {}
    return out(y)
"""


def test_manual_addresses_may_not_overlap_while_live():
    use = "nisa.tensor_tensor(dst=y, data1=x, data2=y, op=nl.add)"
    assert (run(ADDRESSES.format(16, use), ones(8, 4)).output == 2).all()
    assert (run(ADDRESSES.format(0, "pass"), ones(8, 4)).output == 1).all()  # one after the other
    with pytest.raises(errors.HazardError, match=r"'second'.*overlap while both are live"):
        run(ADDRESSES.format(8, use), ones(8, 4))
    with pytest.raises(errors.OnChipCapacityError, match="at address"):
        run(ADDRESSES.format(300_000, use), ones(8, 4))


@pytest.mark.parametrize(
    ("target", "body"),
    [
        ("trn1", "x = load(a)\nnisa.activation(dst=x, op=nl.exp, data=x, bias=1.0)"),
        ("trn1", "x = load(a)\nnisa.tensor_copy(dst=x, src=x, engine=nisa.engine.scalar)"),
        ("trn2", "x = load(a)\nnisa.exponential(dst=x, src=x)"),
        (
            "trn2",
            "x = load(a)\nnisa.tensor_scalar(dst=x, data=x, op0=nl.subtract, operand0=1.0, "
            "engine=nisa.engine.scalar)",
        ),
    ],
)
def test_target_rules_become_warnings(target, body):
    body += "\nreturn out(x)"
    with pytest.raises((errors.OperandError, errors.OperandError), match="trn"):
        run(body, ones(8, 4), target=target)
    result = run(body, ones(8, 4), target=target, strict=False)
    assert len(result.warnings) == 1
    assert not run(body.replace("subtract", "add"), ones(8, 4), target="trn3").warnings


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("return 3", errors.SimulationError, "returned int"),
        ("return load(a)", errors.SimulationError, "SBUF"),
        ("return a, 3", errors.SimulationError, "int"),
    ],
)
def test_what_a_kernel_may_not_return(body, kind, text):
    with pytest.raises(kind) as caught:
        run(body, ones(8, 4))
    assert text in str(caught.value)
    assert caught.value.line > 0
    assert ".py" in caught.value.file


@pytest.mark.parametrize(
    "loop",
    [
        "while True:\n    nisa.memset(dst=t, value=0.0)",
        "nl.while_loop(nisa.register_alloc(1), lambda r: r)",
        "nl.fori_loop(0, 10**9, lambda i: None)",
        "for i in nl.dynamic_range(10**9):\n    pass",
    ],
)
def test_endless_loops_end(loop):
    body = "t = nl.ndarray((4, 4), nl.float32, nl.sbuf)\n" + loop + "\nreturn a"
    with pytest.raises(errors.SimulationError, match="max_instructions=500"):
        run(body, ones(8, 4), max_instructions=500)


@pytest.mark.parametrize(
    ("given", "options", "kind", "text"),
    [
        ((np.ones((2, 2)),), {}, errors.KernelArgumentError, "float64"),
        ((np.ones((2, 2), np.complex64),), {}, errors.KernelArgumentError, "complex64"),
        ((np.ones((0, 2), F),), {}, errors.KernelArgumentError, "empty"),
        ((ArraySpec((2, 2), "float32"),), {}, errors.KernelArgumentError, "ArraySpec"),
        ((ones(2, 2),), {"grid": 3}, errors.KernelArgumentError, "grid 3"),
        ((ones(2, 2),), {"mode": "fast"}, errors.UnknownNameError, "mode"),
        ((ones(2, 2),), {"target": "trn9"}, errors.UnknownNameError, "trn9"),
    ],
)
def test_arguments_that_do_not_fit(given, options, kind, text):
    with pytest.raises(kind, match=text):
        run("return a", *given, **options)


def test_a_missing_argument():
    with pytest.raises(errors.KernelArgumentError, match="missing a required argument"):
        simulate(kernel_file(HEADER + "@nki.jit\ndef kernel(a):\n    return a\n"))


def test_a_bfloat16_vector_operand_without_strict_rules():
    body = "x, s = load(a), load(b)\nnisa.tensor_scalar(dst=x, data=x, op0=nl.add, operand0=s)\n" \
           "return out(x)"  # fmt: skip
    scale = ones(8, 1, dtype=ml_dtypes.bfloat16)
    assert (run(body, ones(8, 4), scale, strict=False).output == 2).all()


# A kernel that leaves the engine open may say so with None or with nisa.engine.unknown.

ENGINES = {
    "core_barrier": "seen, (0, 1)",
    "dma_copy": "dst=t, src=a",
    "memset": "dst=t, value=1.0",
    "nc_transpose": "dst=p, data=t",
    "rand_get_state": "dst=s",
    "rand_set_state": "s",
    "rng": "dst=s",
    "tensor_copy": "dst=t, src=t",
    "tensor_scalar": "dst=t, data=t, op0=nl.add, operand0=1.0",
    "tensor_tensor": "dst=t, data1=t, data2=t, op=nl.add",
}
ASKED = """
seen = nl.ndarray(a.shape, a.dtype, nl.shared_hbm)
t = load(a)
p = nl.ndarray(a.shape, a.dtype, nl.psum)
s = nl.ndarray((a.shape[0], 6), nl.uint32, nl.sbuf)
nisa.memset(dst=s, value=0)
for engine in (None, nisa.engine.unknown, nisa.engine.unknown.value):
    nisa.{}({}, engine=engine, name="asked")
nisa.dma_copy(dst=seen, src=t)
return seen
"""


def test_the_calls_above_are_all_that_take_an_engine():
    parameters = {name: inspect.signature(made).parameters for name, made in INSTRUCTIONS.items()}
    assert {name for name, known in parameters.items() if "engine" in known} == set(ENGINES)


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("op", ENGINES)
def test_no_engine_and_an_unknown_one_are_the_same(op, size):
    """A member's number only warns, too."""
    given, grid = ArraySpec((size, size), "float32"), 2 if op == "core_barrier" else 1
    ran = run(ASKED.format(op, ENGINES[op]), given, mode="timing", target="trn3", grid=grid)
    none, *others = [i for i in ran.trace.instructions if i.name == "asked"]
    assert len(others) == 2
    for other in others:
        assert (none.engine, none.attributes) == (other.engine, other.attributes)
    assert any("newer take nisa.engine.unknown" in text for text in ran.warnings)
