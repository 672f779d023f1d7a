"""A kernel that leaves the engine open may say so with None or with nisa.engine.unknown."""

import inspect

import pytest

from nmm_compiler.simulator.isa.instruction import INSTRUCTIONS
from nmm_compiler.simulator.loading.standins import MODULES
from nmm_compiler.simulator.run import ArraySpec, simulate

nl, nisa = MODULES["nki.language"], MODULES["nki.isa"]
CALLS = {
    "core_barrier": lambda t, **how: nisa.core_barrier(t["seen"], (0, 1), **how),
    "dma_copy": lambda t, **how: nisa.dma_copy(dst=t["a"], src=t["x"], **how),
    "memset": lambda t, **how: nisa.memset(dst=t["a"], value=1.0, **how),
    "nc_transpose": lambda t, **how: nisa.nc_transpose(dst=t["p"], data=t["a"], **how),
    "rand_get_state": lambda t, **how: nisa.rand_get_state(dst=t["s"], **how),
    "rand_set_state": lambda t, **how: nisa.rand_set_state(t["s"], **how),
    "rng": lambda t, **how: nisa.rng(dst=t["s"], **how),
    "tensor_copy": lambda t, **how: nisa.tensor_copy(dst=t["a"], src=t["a"], **how),
    "tensor_scalar": lambda t, **how: nisa.tensor_scalar(
        dst=t["a"], data=t["a"], op0=nl.add, operand0=1.0, **how
    ),
    "tensor_tensor": lambda t, **how: nisa.tensor_tensor(
        dst=t["a"], data1=t["a"], data2=t["a"], op=nl.add, **how
    ),
}


def test_the_calls_above_are_all_that_take_an_engine():
    parameters = {name: inspect.signature(made).parameters for name, made in INSTRUCTIONS.items()}
    assert {name for name, known in parameters.items() if "engine" in known} == set(CALLS)


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("op", sorted(CALLS))
def test_no_engine_and_an_unknown_one_are_the_same(op, size):
    """A member's number only warns, too."""

    def kernel(x):
        seen = nl.ndarray((size, size), nl.float32, nl.shared_hbm)
        a = nl.ndarray((size, size), nl.float32, nl.sbuf)
        p = nl.ndarray((size, size), nl.float32, nl.psum)
        s = nl.ndarray((size, 6), nl.uint32, nl.sbuf)
        nisa.memset(dst=s, value=0)
        nisa.dma_copy(dst=a, src=x)
        for engine in (None, nisa.engine.unknown, nisa.engine.unknown.value):
            CALLS[op]({"x": x, "seen": seen, "a": a, "p": p, "s": s}, engine=engine, name="asked")
        nisa.dma_copy(dst=seen, src=a)
        return seen

    given, grid = ArraySpec((size, size), "float32"), 2 if op == "core_barrier" else 1
    ran = simulate(kernel, given, mode="timing", target="trn3", grid=grid)
    none, *others = [i for i in ran.trace.instructions if i.name == "asked"]
    for other in others:
        assert (none.engine, none.attributes) == (other.engine, other.attributes)
    assert any("newer take nisa.engine.unknown" in text for text in ran.warnings)
