"""Records in templates: written out before a kernel is folded, and read as constants."""

import dataclasses
import textwrap
from pathlib import Path

import libcst as cst
import pytest

from nmm_compiler import kernels
from nmm_compiler.codegen.flatten_records import flatten_records, record_classes
from nmm_compiler.codegen.specialize import specialize
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


def flat(text):
    """Return the functions of a template, flattened, as text."""
    module = cst.parse_module(CLASSES + textwrap.dedent(text))
    functions = {f.name.value: f for f in module.body if isinstance(f, cst.FunctionDef)}
    made = flatten_records(functions, record_classes(module))
    return {name: cst.Module([node]).code.strip() for name, node in made.items()}


def test_fields_become_arguments_with_their_own_names():
    made = flat(
        """
        def load(dst, part: Part, how):
            return dst, part.src.dtype, part.row + part.rows, how

        def outer(x, k):
            load(x, Part(x, 0, k), "rows")
        """
    )
    assert made["load"].startswith("def load(dst, src, row, rows, how):")
    assert "return dst, src.dtype, row + rows, how" in made["load"]
    assert 'load(x, x, 0, k, "rows")' in made["outer"]


def test_two_of_a_kind_keep_their_parameters_names():
    made = flat(
        """
        def multiply(left: Part, right: Factor, rows):
            return left.row, right.strip, right.part.row, rows

        def outer(left: Part, right: Factor):
            multiply(left, right, right.part.rows)
        """
    )
    fields = "left_src, left_row, left_rows, strip, right_src, right_row, right_rows"
    assert made["multiply"].startswith(f"def multiply({fields}, rows)")
    assert "return left_row, strip, right_row, rows" in made["multiply"]
    assert f"multiply({fields}, right_rows)" in made["outer"]


def test_what_stands_for_a_record():
    made = flat(
        """
        def load(part: Part):
            return part.src

        def outer(factor: Factor, schedule):
            # comes first
            new = Part(factor.strip, rows=3)
            load(new)
            load(factor.part)
            load(None)
            load(schedule.u)
        """
    )
    lines = [line.strip() for line in made["outer"].splitlines()[1:]]
    assert lines == [
        "# comes first",
        "load(strip, None, 3)",
        "load(src, row, rows)",
        "load(None, None, None)",
        "load(schedule.u.src, schedule.u.row, schedule.u.rows)",
    ]


def test_what_is_no_field_is_an_error():
    with pytest.raises(CodegenError, match="Part has no fields"):
        flat("def f(p: Part):\n    f(Part(1, 2, 3, depth=4))")


def test_each_branch_has_its_own_record():
    made = flat(
        """
        def f(p: Part):
            return p.row

        def outer(x, wide):
            if wide:
                part = Part(x, 1, 2)
                f(part)
            else:
                part = Part(x, 3, 4)
                f(part)
        """
    )
    assert [line.strip() for line in made["outer"].splitlines()[1:]] == [
        "if wide:", "f(x, 1, 2)", "else:", "f(x, 3, 4)"
    ]  # fmt: skip


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


def test_a_record_set_again_behind_a_branch_is_sure():
    made = flat(
        """
        def f(p: Part):
            return p.row

        def outer(x, wide):
            if wide:
                part = Part(x, 1, 2)
                f(part)
            part = Part(x, 3, 4)
            f(part)
        """
    )
    assert made["outer"].endswith("f(x, 3, 4)")


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
    assert "n = 8  # rows" in source
    assert "for i in range(0, n, 4):" in source
    assert "add(x[i], scale)" in source
    assert "x.add(y, 256)" in source
    assert "# as it lies" in source
    assert "nl.float32" in source
    assert not any(word in source for word in ("plan", "operand", ".turn", "bias", "others"))


def test_templates_and_schedules_mean_the_same_by_a_weight():
    classes = record_classes(cst.parse_module((NKI_PIECES / "records.py").read_text("utf-8")))
    assert {name for name, _ in classes["Plan"]} < set(dir(Weight))
