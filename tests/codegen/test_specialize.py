"""Specialization: parameters become constants, dead branches go, comments and meaning stay."""

import ast
import dataclasses
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmm_compiler.codegen import known_values as values
from nmm_compiler.codegen.known_values import known
from nmm_compiler.codegen.specialize import specialize
from nmm_compiler.records import Record
from nmm_compiler.simulator.run import simulate

TEMPLATE = '''
import nki
import nki.isa as nisa
import nki.language as nl

from .pieces import copy_in


@nki.jit
def double(x, spec, **others):
    """Return x + x."""
    m = spec.m  # rows
    n = spec.n  # columns
    block = spec.block
    how = spec.how
    out = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
    unused = m * n
    for m0 in range(0, m, block):
        rows = min(block, m - m0)
        # rows of x, one block at a time
        x_sb = nl.ndarray((rows, n), dtype=x.dtype, buffer=nl.sbuf)
        copy_in(x_sb, x, m0, rows, how, 7)
        if how == "plain":
            # doubled on VectorE
            nisa.tensor_tensor(dst=x_sb, data1=x_sb, data2=x_sb, op=nl.add)
        elif how == "scaled":
            nisa.tensor_scalar(dst=x_sb, data=x_sb, op0=nl.multiply, operand0=2.0)
        else:
            nisa.activation(dst=x_sb, op=nl.copy, data=x_sb, scale=2.0)
        if spec.has_bias:
            copy_in(x_sb, others.get("bias"), m0, rows, how, 7)
        nisa.dma_copy(dst=out[m0 : m0 + rows, 0:n], src=x_sb)
    return out
'''

PIECES = '''
import nki.isa as nisa


def copy_in(dst, src, row, rows, how, never_read):
    """Load rows."""
    if how == "plain":
        # the plain way
        nisa.dma_copy(dst=dst, src=src[row : row + rows])
    else:
        nisa.dma_copy(dst=dst, src=src[row : row + rows])


def other(dst):
    """Nobody calls this."""
    return dst
'''


@pytest.fixture
def template(tmp_path):
    (tmp_path / "pieces.py").write_text(PIECES)
    path = tmp_path / "double.py"
    path.write_text(TEMPLATE)
    return path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec(Record):
    """What a test kernel computes."""

    m: int
    n: int
    block: int
    how: str = "plain"
    has_bias: bool = False


def emit(template, operands=("x",), **fields):
    given = {"spec": Spec(**fields)}
    header = ["What it is."]
    return specialize(template, "double", given, name="kernel", header=header, operands=operands)


def test_even_blocks_need_no_edge(template):
    source = emit(template, m=256, n=8, block=128)
    assert "min(" not in source
    assert "unused" not in source
    assert "other" not in source
    assert "never_read" not in source
    assert "scaled" not in source
    assert "bias" not in source
    assert "def kernel(x):" in source
    assert "for m0 in range(0, m, 128):" in source or "for m0 in range(0, m, block):" in source
    assert "m = 256  # rows" in source
    assert "# doubled on VectorE" in source
    assert "# the plain way" in source
    assert "# rows of x, one block at a time" in source


def test_one_block_is_no_loop(template):
    source = emit(template, m=100, n=8, block=128)
    assert "for " not in source
    assert "def copy_in(dst, src):" in source


def test_ragged_blocks_keep_their_edge(template):
    assert "min(" in emit(template, m=200, n=8, block=128)


def test_an_absent_tensor_leaves_the_signature(template):
    assert "def kernel(x):" in emit(template, m=4, n=4, block=4)
    with_bias = emit(template, ("x", "bias"), m=4, n=4, block=4, has_bias=True)
    assert "def kernel(x, bias):" in with_bias


@pytest.mark.parametrize("how", ["plain", "scaled", "other"])
@pytest.mark.parametrize(("m", "block"), [(5, 8), (130, 64), (200, 128)])
def test_meaning_is_kept(template, tmp_path, how, m, block):
    fields = {"m": m, "n": 12, "block": block, "how": how}
    path = tmp_path / "emitted.py"
    path.write_text(emit(template, **fields))
    x = np.random.default_rng(0).standard_normal((m, 12)).astype(np.float32)
    emitted = simulate(f"{path}:kernel", x, mode="functional").output
    original = simulate(f"{template}:double", x, mode="functional", spec=Spec(**fields)).output
    np.testing.assert_array_equal(emitted, original)
    np.testing.assert_array_equal(emitted, 2 * x)


def test_emitted_file_stands_alone(template):
    tree = ast.parse(emit(template, m=200, n=8, block=128))
    imported = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert imported == ["nki", "nki.isa", "nki.language"]
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]


def test_unknown_parameters(template):
    with pytest.raises(TypeError, match=r"double has no parameters \['rows'\]"):
        specialize(template, "double", {"rows": 3}, name="k", header=["x"], operands=["x"])


def test_parentheses_survive(tmp_path):
    path = tmp_path / "t.py"
    path.write_text(
        textwrap.dedent(
            """
            import nki
            import nki.language as nl


            @nki.jit
            def t(x, a, zero):
                for i in range(0, x.shape[0]):
                    print((i + a + 60) // 2, (i + zero) * 2, (i * a) % 5)
            """
        )
    )
    source = specialize(path, "t", {"a": 67, "zero": 0}, name="t", header=["x"], operands=["x"])
    line = next(line for line in source.splitlines() if "print" in line)
    printed = line.strip().removeprefix("print")
    for i in range(7):
        assert eval(printed, {"i": i, "a": 67}) == ((i + 127) // 2, i * 2, (i * 67) % 5)


BRANCHES = {
    "one branch": ["if i > 4:", "    first = 3"],
    "an inner loop": ["for j in range(x.shape[0]):", "    print(first)", "    first = j"],
}
BOTH = ["if i > 4:", "    first = 3", "else:", "    first = 1"]


def looped(path, lines):
    """Return the emitted text of a loop in which `first` begins as 0."""
    head = ["import nki", "", "", "@nki.jit", "def t(x):", "    for i in range(x.shape[0]):"]
    body = [f"        {line}" for line in ("first = 0", *lines, "print(first)")]
    path.write_text("\n".join([*head, *body, ""]))
    return specialize(path, "t", {}, name="t", header=["x"], operands=["x"])


@pytest.mark.parametrize("how", BRANCHES)
def test_a_constant_that_a_branch_sets_anew_is_refused(tmp_path, how):
    """Its assignment has been written out, so one way to the last line has no value."""
    with pytest.raises(TypeError, match="'first' is a constant in a loop"):
        looped(tmp_path / "t.py", BRANCHES[how])


def test_a_constant_that_both_branches_set_anew(tmp_path):
    source = looped(tmp_path / "t.py", BOTH)
    assert "first = 1" in source
    assert "first = 0" not in source


def test_a_helper_that_passes_on_stays_where_its_callee_has_a_readers_name(tmp_path):
    """`move` has an argument `load`: written out in it, `begin` would call that."""
    path = tmp_path / "t.py"
    path.write_text(
        textwrap.dedent(
            """
            import nki


            @nki.jit
            def t(x, y):
                for i in range(2):
                    move(x, y, i)


            def move(dst, load, i):
                print(i)
                begin(dst, load)


            def begin(dst, src):
                load(dst, src)


            def load(dst, src):
                print(dst, src)
                print(src, dst)
            """
        )
    )
    source = specialize(path, "t", {}, name="t", header=["x"], operands=["x", "y"])
    defined = {node.name: node for node in ast.walk(ast.parse(source))
               if isinstance(node, ast.FunctionDef)}  # fmt: skip
    called = {node.func.id for node in ast.walk(defined["move"]) if isinstance(node, ast.Call)}
    assert called == {"print", "begin"}
    assert set(defined) == {"t", "move", "begin", "load"}


spans = st.builds(
    lambda lo, count, step: range(lo, lo + count * step, step),
    st.integers(-40, 40),
    st.integers(1, 6),
    st.integers(1, 16),
)


def holds(value, item):
    return value is None or item in value


@given(spans, spans, st.sampled_from(["Add", "Subtract", "Multiply", "FloorDivide", "Modulo"]))
def test_arithmetic_of_spans_is_sound(a, b, name):
    apply = {
        "Add": lambda x, y: x + y,
        "Subtract": lambda x, y: x - y,
        "Multiply": lambda x, y: x * y,
        "FloorDivide": lambda x, y: x // y,
        "Modulo": lambda x, y: x % y,
    }[name]
    result = values.ARITHMETIC[name](a, b)
    for x in a:
        for y in b:
            if y or name in ("Add", "Subtract", "Multiply"):
                assert holds(result, apply(x, y))


@given(st.lists(spans, min_size=1, max_size=3))
def test_join_and_extremes_are_sound(several):
    joined = values.join(several)
    for span in several:
        assert all(holds(joined, item) for item in span)
    least, most = values.smallest(several), values.largest(several)
    for first in several[0]:
        rest = [span[0] for span in several[1:]]
        assert holds(least, min([first, *rest]))
        assert holds(most, max([first, *rest]))


@given(spans, spans, st.sampled_from(["LessThan", "LessThanEqual", "GreaterThan", "Equal"]))
def test_comparisons_are_sound(a, b, name):
    apply = {
        "LessThan": lambda x, y: x < y,
        "LessThanEqual": lambda x, y: x <= y,
        "GreaterThan": lambda x, y: x > y,
        "Equal": lambda x, y: x == y,
    }[name]
    result = values.compare(name, a, b)
    if result is not None:
        assert all(apply(x, y) is next(iter(result)) for x in a for y in b)


@given(st.integers(0, 20), st.integers(0, 60), st.integers(1, 20))
def test_loop_values_are_sound(start, stop, step):
    variable, count = values.loop_values(known(start), known(stop), known(step))
    taken = list(range(start, stop, step))
    assert count == len(taken)
    assert all(holds(variable, item) for item in taken)


def test_text_that_differs_between_calls():
    either = values.join([known("p"), known("t")])
    assert either == frozenset("pt")
    assert values.compare("Equal", either, known("x")) == known(False)
    assert values.compare("Equal", either, known("p")) is None
    assert values.without(either, "p") == known("t")
