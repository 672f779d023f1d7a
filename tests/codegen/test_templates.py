"""Records and helpers in templates: emitted files have fields, and statements in their place."""

import ast
import dataclasses
import textwrap

import pytest

from nmm_compiler.codegen.fold_constants import Folder
from nmm_compiler.codegen.printed import printed
from nmm_compiler.codegen.specialize import specialize
from nmm_compiler.codegen.templates import template
from nmm_compiler.errors import CodegenError
from nmm_compiler.kernels.linear.layer import Weight
from nmm_compiler.records import Record

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
    made = template(path)
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
    parameters = template(tmp_path / "template.py").parameters["f"]
    assert list(parameters.values()) == ["src", "row", "rows"]
    assert folded(tmp_path, text, "f") == ["return row"]


def test_what_is_no_field_is_an_error(tmp_path):
    text = "def outer():\n    f(Part(1, 2, 3, depth=4))"
    with pytest.raises(CodegenError, match="Part has no fields"):
        folded(tmp_path, CLASSES + TAKERS + text, "outer")


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


TEMPLATE = '''
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
    path.write_text(TEMPLATE)
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("gain_sb = x\n    norm = norm_of_x(x, 1)", r"its caller outer: \['gain_sb'\]"),
        ("norm = norm_of_x(x, size=1)", "a call of norm_of_x: pass all 2 by position"),
        ("norm = norm_of_x(x)", "a call of norm_of_x: pass all 2 by position"),
        ("assigns(x, others)", r"assigns assigns names of its parameters .*\['x'\]"),
    ],
)
def test_calls_that_cannot_be_written_out(tmp_path, call, message):
    with pytest.raises(CodegenError, match=message):
        folded(tmp_path, f"{HELPERS}def outer(x, **others):\n    {call}\n", "outer")


def test_a_helper_stands_where_it_is_called(tmp_path):
    text = HELPERS + "def outer(x, size, **others):\n    twice(x.part, size, others)\n"
    assert folded(tmp_path, text, "outer") == [
        "gain_sb = None", "if size > 0:", "# as it lies", "gain_sb = columns(x.part, size)",
        "take('rms', gain_sb, None)",
    ]  # fmt: skip
