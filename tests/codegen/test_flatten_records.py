"""Records in templates: written out before a kernel is folded, and read as constants."""

import ast
import dataclasses
import textwrap
from pathlib import Path

import pytest

from nmm_compiler import kernels
from nmm_compiler.codegen.flatten_records import flatten_records, record_classes, write_out_helpers
from nmm_compiler.codegen.printed import printed
from nmm_compiler.codegen.specialize import specialize
from nmm_compiler.codegen.trees import read
from nmm_compiler.errors import CodegenError
from nmm_compiler.kernels.linear.layer import Weight
from nmm_compiler.records import Record

NKI_PIECES = Path(kernels.__file__).parent / "pieces"
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


def flat(text):
    """Return the functions of a template, flattened, as text."""
    module = read(CLASSES + textwrap.dedent(text))
    functions = {f.name: f for f in module.body if isinstance(f, ast.FunctionDef)}
    made = flatten_records(functions, record_classes(module))
    return {name: printed(ast.Module([node], [])).strip() for name, node in made.items()}


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
def test_a_record_becomes_its_fields(text, lines):
    made = flat(TAKERS + textwrap.dedent(text))
    assert made["f"] == "def f(src, row, rows):\n    return row"
    assert [line.strip() for line in made["outer"].splitlines()[1:]] == lines


def test_what_is_no_field_is_an_error():
    with pytest.raises(CodegenError, match="Part has no fields"):
        flat("def f(p: Part):\n    f(Part(1, 2, 3, depth=4))")


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
def test_a_record_that_a_branch_sets_is_refused_behind_it(setting, use):
    """Of two assignments the last would win, whichever branch runs."""
    source = f"def f(p: Part):\n    return p.row\n\ndef outer(x, wide):\n    {setting}\n    {use}"
    with pytest.raises(CodegenError, match="part is set in a branch or a loop"):
        flat(source)


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
    x = half(x)
    inner = norm_of_x(x, size)
    columns(inner, others.get("gain"))

def columns(gain, size):
    """Stay as it is."""
    return gain
'''


def written_out(text):
    """Return the functions of a template as text, without the helpers that are written out."""
    module = read(HELPERS + textwrap.dedent(text))
    functions = {f.name: f for f in module.body if isinstance(f, ast.FunctionDef)}
    made = write_out_helpers(functions, record_classes(module))
    return {name: printed(ast.Module([node], [])).strip() for name, node in made.items()}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("gain_sb = x\n    norm = norm_of_x(x, 1)", "has names that norm_of_x assigns.*gain_sb"),
        ("norm = norm_of_x(x, size=1)", "calls norm_of_x with 2 arguments; pass all 2 by"),
        ("norm = norm_of_x(x)", "calls norm_of_x with 1 arguments; pass all 2 by position"),
        ("twice(x.part, 1, operands)", "twice assigns x; pass it a name from outer"),
    ],
)
def test_calls_that_cannot_be_written_out(call, message):
    with pytest.raises(CodegenError, match=message):
        written_out(f"def outer(x):\n    {call}\n")
