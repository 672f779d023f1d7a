"""benchmarks/laws.py switches each law of the timing model off alone, and on again."""

import sys
from pathlib import Path

import pytest
from trace_builder import Scene

from nmm_compiler import targets
from nmm_compiler.simulator.timing.schedule import time_trace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import laws


def kernel(dtype):
    """Loads, products, copies, a scan of equal work and stores, in turns that leave stalls."""
    turns = "".join(f"""
        sbuf tile out other 128x512 {dtype}
        psum bank 128x512
        dma tile source dge_mode={mode}
        dma tile[:,:8] source[:,:8]
        tensor bank[:,:64] weight tile[:64,::8]
        tensor bank[:,:64] weight tile[:64,::8]
        vector out bank
        scalar other out op=activation function=exp
        vector out other op=reciprocal
        vector out tile other op=tensor_tensor function=add
        dma target out
    """ for mode in ("none", "swdge", "swdge"))  # fmt: skip
    return Scene(f"""
        hbm source target 128x512 {dtype}
        sbuf weight 64x128 {dtype}
        vector weight op=memset
        {turns}
    """).trace


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.name)
def test_a_law_is_off_only_as_long_as_it_is_asked(law):
    target = targets.get("trn2")
    trace = kernel("float32")
    before = time_trace(trace, target).end
    with law.off(target) as without:
        time_trace(trace, without)
    assert time_trace(trace, target).end == before


def test_most_laws_change_the_time_of_a_kernel_that_has_them():
    found = set()
    for name in targets.names():
        target = targets.get(name)
        for dtype in ("float32", "bfloat16"):
            trace = kernel(dtype)
            before = time_trace(trace, target).end
            for law in laws.LAWS:
                with law.off(target) as without:
                    if time_trace(trace, without).end != before:
                        found.add(law.name)
    assert 2 * len(found) > len(laws.LAWS)
