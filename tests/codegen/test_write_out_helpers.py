"""Helpers that return a record or take the operands: written out where they are called."""

import textwrap

import libcst as cst
import pytest

from nmm_compiler.codegen.flatten_records import record_classes, write_out_helpers
from nmm_compiler.errors import CodegenError

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
    module = cst.parse_module(HELPERS + textwrap.dedent(text))
    functions = {f.name.value: f for f in module.body if isinstance(f, cst.FunctionDef)}
    made = write_out_helpers(functions, record_classes(module))
    return {name: cst.Module([node]).code.strip() for name, node in made.items()}


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
