"""A kernel that leaves the engine open may say so with None or with nisa.engine.unknown."""

import inspect

import pytest
from simulator_kernels import run

from nmm_compiler.simulator.isa.instruction import INSTRUCTIONS
from nmm_compiler.simulator.run import ArraySpec

CALLS = {
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
BODY = """
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
    assert {name for name, known in parameters.items() if "engine" in known} == set(CALLS)


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("op", CALLS)
def test_no_engine_and_an_unknown_one_are_the_same(op, size):
    """A member's number only warns, too."""
    given, grid = ArraySpec((size, size), "float32"), 2 if op == "core_barrier" else 1
    ran = run(BODY.format(op, CALLS[op]), given, mode="timing", target="trn3", grid=grid)
    none, *others = [i for i in ran.trace.instructions if i.name == "asked"]
    assert len(others) == 2
    for other in others:
        assert (none.engine, none.attributes) == (other.engine, other.attributes)
    assert any("newer take nisa.engine.unknown" in text for text in ran.warnings)
