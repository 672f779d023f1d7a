"""What `@instruction` does for every instruction, shown on one that exists only here."""

import inspect

import numpy as np
import pytest

from nmm_compiler import errors, simulate
from nmm_compiler.simulator.isa.enums import engine
from nmm_compiler.simulator.isa.instruction import INSTRUCTIONS, attributes, instruction
from nmm_compiler.simulator.isa.operands import SBUF
from nmm_compiler.simulator.isa.values import f32, put
from nmm_compiler.simulator.loading.standins import MODULES

nl = MODULES["nki.language"]


@instruction(
    engines=("vector", "gpsimd"),
    operands="data[P F] -> dst[P F]",
    memories={"data": SBUF},
    streams=("data",),
)
def twice(call, dst, data, times=2.0, engine=None):
    """dst = data * times."""
    if times == 0:
        raise call.error(errors.OperandError, "times is 0")
    yield attributes(times=times)
    put(dst, f32(data) * np.float32(times))


INSTRUCTIONS.pop("twice")


def run(body, **options):
    """Run body(dst, data) on float32 tiles [128, 8]; data holds ones, dst is returned."""

    def kernel():
        data = nl.ones((128, 8), nl.float32)
        dst = nl.ndarray((128, 8), nl.float32, buffer=nl.sbuf)
        body(dst, data)
        result = nl.ndarray((128, 8), nl.float32, buffer=nl.shared_hbm)
        nl.store(result, dst)
        return result

    return simulate(kernel, **options)


def bank():
    return nl.ndarray((128, 8), nl.float32, buffer=nl.psum)


def test_it_computes_and_records():
    done = run(lambda dst, data: twice(dst, data, 3.0, name="t"))
    assert (done.output == 3).all()
    (record,) = [i for i in done.trace.instructions if i.op == "twice"]
    assert (record.engine, record.name, record.attributes) == ("vector", "t", {"times": 3.0})
    assert [(len(record.reads), len(record.writes)), record.file] == [(1, 1), __file__]


def test_without_data_it_records_and_computes_nothing():
    done = run(lambda dst, data: twice(dst=dst, data=data), mode="timing")
    assert done.outputs is None
    assert "twice" in [i.op for i in done.trace.instructions]


def test_its_signature_is_that_of_the_body_and_a_name():
    shown = "(dst, data, times=2.0, engine=None, name=None)"
    assert str(inspect.signature(twice)) == shown
    assert twice.__doc__ == "dst = data * times."


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (lambda d, x: twice(d, 1.0), errors.OperandError, "nisa.twice: data is float"),
        (lambda d, x: twice(d, x[:, 0:4]), errors.OperandError, "nisa.twice: shapes"),
        (lambda d, x: twice(x[:, 1:8], x[:, 0:7]), errors.HazardError, "nisa.twice writes"),
        (lambda d, x: twice(d, x, 0), errors.OperandError, "nisa.twice: times is 0"),
        (lambda d, x: twice(d[1:128], x[0:127]), errors.OperandError, "starts at partition 1"),
        (lambda d, x: twice(d), errors.KernelFailedError, "missing a required argument: 'data'"),
        (lambda d, x: twice(d, x, wide=1), errors.KernelFailedError, "unexpected keyword"),
        (lambda d, x: twice(x, bank()), errors.OperandError, "in PSUM, it must be in SBUF"),
        (
            lambda d, x: twice(bank(), x, engine=engine.gpsimd),
            errors.OperandError, "GpSimd cannot access PSUM",
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_the_instruction_and_the_kernels_line(body, kind, said):
    with pytest.raises(kind, match=said) as caught:
        run(body)
    assert __file__ in str(caught.value)
