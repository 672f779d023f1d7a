"""Specialization: parameters become constants, dead branches go, comments and meaning stay."""

import ast
import dataclasses
import itertools
import operator
import textwrap

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from nmm_compiler.codegen import known_values as values
from nmm_compiler.codegen.fold_constants import Folder
from nmm_compiler.codegen.known_values import known
from nmm_compiler.codegen.printed import printed
from nmm_compiler.codegen.specialize import specialize
from nmm_compiler.codegen.templates import template as read_template
from nmm_compiler.codegen.tidy import without_aliases
from nmm_compiler.codegen.trees import bound_names, called, parsed, read
from nmm_compiler.errors import CodegenError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.linear.layer import Weight
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


DEAD = ("unused", "other", "never_read", "scaled", "bias")
COMMENTS = ("# doubled on VectorE", "# the plain way", "# rows of x, one block at a time")


@pytest.mark.parametrize(
    ("fields", "operands", "kept", "gone"),
    [
        ({"m": 256}, ("x",), ("def kernel(x):", "in range(0, 256, 128)", *COMMENTS),
         ("min(", *DEAD)),
        ({"m": 100}, ("x",), ("def copy_in(dst, src):",), ("for ",)),
        ({"m": 200}, ("x",), ("min(",), ()),
        ({"m": 4, "has_bias": True}, ("x", "bias"), ("def kernel(x, bias):",), ()),
    ],
    ids=["even blocks need no edge", "one block is no loop", "ragged blocks keep their edge",
         "a tensor that is there"],
)  # fmt: skip
def test_what_is_emitted(template, fields, operands, kept, gone):
    source = emit(template, operands, n=8, block=128, **fields)
    assert [text for text in kept if text not in source] == []
    assert [text for text in gone if text in source] == []


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


LAID_OUT = '''"""A file.

Data flow:
- none
"""
import nki
import nki.language as nl

@nki.jit
def kernel(x):
    """Return x."""
    # of x
    tile = nl.ndarray((128, 4), dtype=x.dtype, buffer=nl.sbuf)

    def body(i):
        load(tile[0:128, i], x[128 * i:128 * i + 128:2])
    # a loop on the device
    nl.fori_loop(0, 4, body)
    for i in range(4):
        if i == 0:
            load(
                first_of_many_arguments=tile[0:128, i],
                second_of_many_arguments=x[128 * i:128 * i + 128],
                third=(i + 1) * 2,
            )
        elif i == 1:
            load(tile[0:128, i], x[128 * i:128 * i + 128], [j for j in range(4)], 'a word', -1.5)
        else:
            # the arguments have a line of their own
            load(
                tile[0:128, i].reshape_dim(1, (2, 2)).permute((1, 0)), x[128 * i:128 * i + 128], 10
            )
            # what the last brackets hold does not fit on a line of its own
            tile = load(tile[0:128, i].reshape_dim(1, (2, 2)).permute((1, 0)), 0, 1).reshape(
                (128, 4, 1)
            )
    return tile
'''


def test_a_file_that_is_read_and_printed_stays_as_it_is():
    assert printed(read(LAID_OUT)) == LAID_OUT


SET_ANEW = {
    "one branch": ["if i > 1:", "    first = 3"],
    "both branches": ["if i > 1:", "    first = 3", "else:", "    first = 1"],
    "an inner loop": ["for j in range(x.shape[0]):", "    print(first)", "    first = j"],
}


def looped(path, lines):
    """Return the emitted text of a loop in which `first` begins as 0."""
    head = ["import nki", "", "", "@nki.jit", "def t(x):", "    for i in range(x.shape[0]):"]
    body = [f"        {line}" for line in ("first = 0", *lines, "print(first)")]
    path.write_text("\n".join([*head, *body, ""]))
    return specialize(path, "t", {}, name="t", header=["x"], operands=["x"])


def said(source):
    """Return what a template prints for three rows."""
    lines: list[object] = []
    names = {"print": lines.append}
    exec(source.replace("import nki", "").replace("@nki.jit", ""), names)
    names["t"](np.zeros(3))
    return lines


@pytest.mark.parametrize("how", SET_ANEW)
def test_a_constant_that_is_set_anew_keeps_its_name(tmp_path, how):
    path = tmp_path / "t.py"
    assert said(looped(path, SET_ANEW[how])) == said(path.read_text())


def test_the_variable_of_a_loop_on_the_device_is_no_constant():
    source = "i = 4\n\ndef body(i):\n    print(i)\nloop(i, body)\n"
    assert printed(ast.Module(without_aliases(read(source).body), [])) == source


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


def joined(*parts):
    return f"({' '.join(parts)})"


LEAVES = st.sampled_from(["i", "j", "0", "1", "3", "128", "-2"])
OPERATORS = st.sampled_from(
    ["+", "-", "*", "//", "%", "<", "<=", ">", ">=", "==", "!=", "and", "or"]
)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(joined, inner, OPERATORS, inner),
        st.builds("(not {})".format, inner),
        st.builds("min({}, {})".format, inner, inner),
        st.builds("max({}, {})".format, inner, inner),
        st.builds("({} < {} < {})".format, inner, inner, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("(2, 5, 8)[{}]".format, inner),
    ),
    max_leaves=5,
)
STEPS = st.sets(st.integers(-40, 40), min_size=1, max_size=6)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EXPRESSIONS, STEPS, STEPS)
def test_a_known_value_holds_every_result(text, several, others):
    """Where `and` and `or` are known, they are known as a bool."""
    environment = {
        name: values.join(list(map(known, given)))
        for name, given in (("i", several), ("j", others))
    }
    known_value = Folder(environment).value(parsed(text))
    for i, j in itertools.product(several, others):
        try:
            result = eval(text, {"i": i, "j": j})
        except (ZeroDivisionError, IndexError):
            continue
        assert known_value is None or result in known_value or bool(result) in known_value


@pytest.mark.parametrize("size", [-3, 0, 3])
@pytest.mark.parametrize("sign", ["//", "%"])
def test_division_is_known_by_a_positive_constant_alone(sign, size):
    node = parsed(f"i {sign} size")
    found = Folder({"i": frozenset(range(8)), "size": known(size)}).value(node)
    assert found == (None if size < 1 else frozenset(range(3)))


@given(st.integers(0, 20), st.integers(0, 60), st.integers(1, 20))
def test_loop_values(start, stop, step):
    taken = range(start, stop, step)
    if taken:
        expected = frozenset(taken), len(taken)
        assert values.loop_values(*map(known, (start, stop, step))) == expected
    assert values.loop_values(known(start), None) == (None, None)
    assert values.loop_values(known(start), known(start)) == (None, 0)
    either = values.loop_values(frozenset([0, 8]), known(16), known(4))
    assert either == (frozenset([0, 4, 8, 12]), None)


def test_what_is_not_known():
    assert values.join([known(1), known(True)]) is None
    many = frozenset(range(1000))
    assert values.computed(operator.add, many, many) is None


def test_text_that_differs_between_calls():
    either = values.join([known("p"), known("t")])
    assert either == frozenset("pt")
    compared = [Folder({"how": either}).value(parsed(f'how == "{text}"'))
                for text in "xp"]  # fmt: skip
    assert compared == [known(False), frozenset([True, False])]


# Records and helpers in templates: emitted files have fields, and statements in their place.

CLASSES = """
class Part:
    src: object
    row: int
    rows: int  # how many


class Factor:
    strip: object
    part: Part
"""


TAKERS = """
def f(part: Part):
    return part.row

"""


def folded(folder, text, function):
    """Return the lines of a function of a template, folded."""
    path = folder / "template.py"
    path.write_text(text)
    made = read_template(path)
    body = Folder({}, made, function).fold(made.functions[function].body)
    return [line.strip() for line in printed(ast.Module(body, [])).splitlines()]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            """
            def outer(factor: Factor, schedule):
                # comes first
                new = Part(factor.strip, rows=3)
                f(new)
                f(factor.part)
                f(None)
                f(schedule.u)
            """,
            [
                "# comes first",
                "f(strip, None, 3)",
                "f(src, row, rows)",
                "f(None, None, None)",
                "f(schedule.u.src, schedule.u.row, schedule.u.rows)",
            ],
        ),
        (
            """
            def outer(x, wide):
                if wide:
                    part = Part(x, 1, 2)
                    f(part)
                else:
                    part = Part(x, 3, 4)
                    f(part)
            """,
            ["if wide:", "f(x, 1, 2)", "else:", "f(x, 3, 4)"],
        ),
        (
            """
            def outer(x, wide):
                if wide:
                    part = Part(x, 1, 2)
                    f(part)
                part = Part(x, 5, 6)
                f(part)
            """,
            ["if wide:", "f(x, 1, 2)", "f(x, 5, 6)"],
        ),
        (
            """
            def outer(left: Part, right: Factor):
                f(Part(left.src, left.row, right.part.rows))
            """,
            ["f(left_src, left_row, right_rows)"],
        ),
    ],
    ids=["what stands for a record", "of each branch", "set again", "two of a kind"],
)
def test_a_record_becomes_its_fields(tmp_path, text, lines):
    text = CLASSES + TAKERS + textwrap.dedent(text)
    assert folded(tmp_path, text, "outer") == lines
    parameters = read_template(tmp_path / "template.py").parameters["f"]
    assert list(parameters.values()) == ["src", "row", "rows"]
    assert folded(tmp_path, text, "f") == ["return row"]


@pytest.mark.parametrize("use", ["f(part)", "f(Part(part.src, 0, 0))", "f(None) or part.row"])
@pytest.mark.parametrize(
    "setting",
    [
        "if wide:\n        part = Part(x, 1, 2)\n    else:\n        part = Part(x, 3, 4)",
        "part = Part(x, 1, 2)\n    if wide:\n        part = Part(x, 3, 4)",
        "if wide:\n        if wide > 2:\n            part = Part(x, 1, 2)",
        "for i in range(4):\n        part = Part(x, i, 2)",
    ],
)
def test_a_record_that_a_branch_sets_is_refused_behind_it(tmp_path, setting, use):
    """Of two assignments the last would win, whichever branch runs."""
    source = f"{CLASSES}{TAKERS}def outer(x, wide):\n    {setting}\n    {use}"
    with pytest.raises(CodegenError, match="part is set in a branch or a loop"):
        folded(tmp_path, source, "outer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """How a test kernel runs."""

    block: int
    how: str
    inner: Weight

    @property
    def doubled(self):
        """Twice the block."""
        return 2 * self.block


PLANNED = '''
import nki
import nki.language as nl


@nki.jit
def kernel(x, plan, **others):
    """Return x."""
    n = plan.doubled  # rows
    bias = others.get("bias")
    if plan.how == "biased":
        add(x, bias, plan.inner)
    dtype = getattr(nl, plan.how)
    for i in range(0, n, plan.block):
        add(x[i], others.get("scale"), plan.inner)
    return x, dtype


def add(x, y, operand):
    """Add."""
    if operand.load == "rows":
        # as it lies
        x.add(y, operand.chunk)
    else:
        x.turn(y)
'''


def test_fields_of_constant_records_fold(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text(PLANNED)
    plan = Plan(block=4, how="float32", inner=Weight(chunk=256))
    source = specialize(
        path, "kernel", {"plan": plan}, name="k", header=["x"], operands=["x", "scale"]
    )
    assert "def k(x, scale):" in source
    assert "for i in range(0, 8, 4):" in source
    assert "add(x[i], scale)" in source
    assert "x.add(y, 256)" in source
    assert "# as it lies" in source
    assert "nl.float32" in source
    assert not any(word in source for word in ("plan", "operand", ".turn", "bias", "others"))


# Helpers that return a record or take the operands: written out where they are called.

HELPERS = '''
class Norm:
    kind: str
    gain: object

def norm_of_x(gain, size) -> Norm:
    """Return the norm."""
    gain_sb = None
    if size > 0:
        # as it lies
        gain_sb = columns(gain, size)
    return Norm("rms", gain_sb)

def twice(x, size, others):
    """Compute both."""
    inner = norm_of_x(x, size)
    take(inner, others.get("gain"))

def take(norm: Norm, size):
    """Stay as it is."""
    return size

def assigns(x, others):
    """Give x another value."""
    x = half(x)

def columns(gain, size):
    """Stay as it is."""
    return gain
'''


def clashes(read):
    """Return what helpers assign of the names of their parameters, or of the functions that they
    are written out in."""
    found = []

    def inside(node):
        for helper in filter(None, (read.written_out.get(called(one)) for one in ast.walk(node))):
            yield helper
            yield from inside(helper)

    for caller, node in read.functions.items():
        taken = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        for helper in inside(node) if caller not in read.written_out else ():
            names = taken.union(read.kinds[caller], read.kinds[helper.name])
            found += sorted({*bound_names(helper.body)} & names)
    return found


@pytest.mark.parametrize("path", sorted({family.path for family in FAMILIES.values()}))
def test_names_of_helpers_that_are_written_out_are_their_own(path):
    assert clashes(read_template(path)) == []


@pytest.mark.parametrize(
    ("call", "names"),
    [("gain_sb = x\n    norm = norm_of_x(x, 1)", ["gain_sb"]), ("assigns(x, others)", ["x"])],
)
def test_a_clash_of_names_is_seen(tmp_path, call, names):
    (tmp_path / "template.py").write_text(f"{HELPERS}def outer(x, **others):\n    {call}\n")
    assert clashes(read_template(tmp_path / "template.py")) == names


def test_a_helper_stands_where_it_is_called(tmp_path):
    text = HELPERS + "def outer(x, size, **others):\n    twice(x.part, size, others)\n"
    assert folded(tmp_path, text, "outer") == [
        "gain_sb = None", "if size > 0:", "# as it lies", "gain_sb = columns(x.part, size)",
        "take('rms', gain_sb, None)",
    ]  # fmt: skip
