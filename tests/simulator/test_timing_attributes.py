"""What the timing pass prices is what instructions yield: ops and attributes."""

import ast
import re
from pathlib import Path

import pytest
from simulator_kernels import run

from nmm_compiler import targets
from nmm_compiler.simulator.isa.instruction import INSTRUCTIONS
from nmm_compiler.simulator.timing import costs

SIMULATOR = Path(costs.__file__).resolve().parents[1]
TRN2 = targets.get("trn2")


def test_every_cost_rule_is_of_an_instruction():
    rules = next(v for v in vars(costs).values() if isinstance(v, dict) and "memset" in v)
    assert set(rules) <= set(INSTRUCTIONS)


def test_attributes_that_timing_reads_are_yielded():
    read, yielded = set(), set()
    for path in (SIMULATOR / "timing").glob("*.py"):
        read |= set(re.findall(r'attributes(?:\.get\(|\[)"(\w+)"', path.read_text()))
    for path in (*SIMULATOR.glob("*.py"), *(SIMULATOR / "isa").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "attributes":
                yielded |= {keyword.arg for keyword in node.keywords}
            if isinstance(node, ast.Dict):  # of collectives
                yielded |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    assert len(read) > 12
    assert read <= yielded


@pytest.mark.parametrize("engine", ["unknown", "vector", "gpsimd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
def test_only_zeros_of_16_bits_are_filled_two_at_a_time(engine, dtype):
    """NKI 0.1's table of costs: N cycles, N/2 for zeros of 16 bits."""
    body = f"""
    for value in (0, 1, -2, 0):
        t = nl.ndarray((128, 4096), nl.{dtype}, nl.sbuf)
        nisa.memset(dst=t, value=value, engine=nisa.engine.{engine})
    return out(t)
    """
    trace = run(body, mode="timing").trace
    fills = [i for i in trace.instructions if i.op == "memset"]
    took = [costs.other_cost(TRN2, fill)[0] for fill in fills]
    zero, one = took[:2]
    assert took == [zero, one, one, zero]
    clock = TRN2.gpsimd_clock_hz if engine == "gpsimd" else TRN2.vector_clock_hz
    cycles = (one - zero) * clock / 1e6
    assert cycles == pytest.approx(2048 if dtype in ("bfloat16", "float16") else 0)
