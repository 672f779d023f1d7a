"""Each documented rule: a kernel that breaks it is refused, one that just holds it runs."""

import re
import textwrap
import traceback
from pathlib import Path

import numpy as np
import pytest
from simulator_kernels import kernel_file

from nmm_compiler import errors
from nmm_compiler.nki_api.api import api
from nmm_compiler.nki_api.rules import RULE_KERNEL, rules
from nmm_compiler.simulator.isa.instruction import INSTRUCTIONS
from nmm_compiler.simulator.run import simulate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rules.md"
ROOM = "nmm_compiler/simulator/"
MODES = ("functional", "timing")


def attempt(rule, lines, target, mode):
    """Run a rule's lines as a kernel."""
    path = kernel_file(RULE_KERNEL.replace("{body}", textwrap.indent(lines.strip("\n"), "    ")))
    array = np.ones((4, 4), np.float32)
    return simulate(f"{path}:kernel", array, target=target, grid=rule.grid, mode=mode)


def refusal(rule, mode="functional"):
    """Return the error with which the simulator refuses a rule's breaker."""
    with pytest.raises(errors.SimulationError) as caught:
        attempt(rule, rule.breaker, rule.on, mode)
    return caught.value


def checked_in(error):
    """Return file.function of the simulator's check that raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if ROOM in f.filename]
    names = ("error", "rule", "fail", "__enter__")
    last = [f for f in frames if f.name not in names][-1]
    file = last.filename.partition(":")[0].rpartition(ROOM)[2]
    return f"{file}, {last.name}"


def cases():
    return [pytest.param(r, id=f"{r.topic}: {r.says}") for r in rules()]


@pytest.mark.parametrize("rule", cases())
def test_the_breaker_is_refused_and_the_holder_runs(rule):
    assert rule.call, "no call"
    assert (rule.breaker, rule.on) != (rule.holder, rule.holds_on or rule.on), "one call only"
    for mode in MODES:
        attempt(rule, rule.holder, rule.holds_on or rule.on, mode)
        if rule.needs_data and mode == "timing":
            attempt(rule, rule.breaker, rule.on, mode)
            continue
        error = refusal(rule, mode)
        assert type(error).__name__ == rule.error, error
        # names the thing, and where: the kernel's own file and line
        assert error.file.endswith(".py"), error
        assert error.line > 0, error
        assert "report" not in str(error), error


def test_rules_that_were_once_not_checked_stay_in_the_table():
    """Each by a part of its row's sentence; the test above runs the row's breaker and holder."""
    known = [(rule.topic, rule.says) for rule in rules()]
    missing = [
        (topic, part)
        for topic, parts in ONCE_ACCEPTED.items()
        for part in parts.split("; ")
        if not any(topic == t and part in says for t, says in known)
    ]
    assert not missing


ONCE_ACCEPTED = {
    "operands of compute instructions": "4 free dimensions; stride fits int16; size fits uint16",
    "dma_copy": "priority needs trn3; priority is 0 to 3; engine goes with dge_mode hwdge only; "
    "dge_mode none takes no runtime address; indices of a gather are in SBUF; indices of a gather "
    "are integers; A scalar offset is in SBUF; same index hold the same values",
    "dma_transpose": "oob_mode skip needs a runtime index; index of an indirect transpose is 2-D; "
    "index of an indirect transpose has 16 to 128 rows; priority is 0 to 3",
    "dma_compute": "No runtime addresses but row indices; indices of a scatter are unique",
    "nc_matmul": "float8_e4m3fn needs trn3; not combined with column tiles; not combined with "
    "transposes; A transpose keeps the dtype; A float32 operand is no .indirect(); views are not "
    "combined with tiles",
    "nc_transpose": "dst has the dtype of data",
    "nc_matmul_mx": "Tiles are by rows only",
    "tensor indirection": "does not run on GpSimd; The index is in SBUF; The index is an integer",
    "tensor_tensor": "power runs on GpSimd; Bit operators run on VectorE; start at the same "
    "partition",
    "tensor_scalar": "GpSimd takes rsqrt only; Bit operators run on VectorE; operand of arithmetic "
    "is float32",
    "scalar_tensor_tensor": "start at the same partition",
    "activation": "bias is no tfloat32; load_reduce is not among its commands",
    "exponential": "reduce_init goes with load_reduce only",
    "tensor_reduce": "negate goes with arithmetic",
    "tensor_partition_reduce": "op is add, average, maximum",
    "tensor_scalar_reduce": "reverse0 is not supported; reduce_init is float32; load_reduce needs",
    "max8": "at most 3 dimensions; dst has 2 dimensions",
    "range_select": "not_equal is no bound; Indices stay within; bounds are float32",
    "select_reduce": "predicate is an integer; on_true is no tfloat32",
    "dropout": "dst has data's dtype; Of integer data prob is float32",
    "rng": "GpSimd needs trn2",
    "rand_set_state": "VectorE needs trn3; The state is uint32",
    "core_barrier": "data is in shared HBM",
    "device loops": "depends_on does not reach into a device loop",
}


INTRODUCTION = """\
# Rules

The {count} documented rules that the [simulator](simulator.md) checks, in functional and in timing
mode alike; a rule about values, marked with a star, needs data. Sources are pages of the public
documentation of AWS Neuron SDK 2.32 (NKI 0.6.0) unless they say otherwise. Each row is a row of
`nmm_compiler/nki_api/rules.toml`, which holds a call that breaks it and one that just holds it.
`tests/simulator/test_rules.py` runs both, and prints this page when it is run as a script."""


def page():
    """Return the text of docs/rules.md."""
    lines = [INTRODUCTION.format(count=len(rules()))]
    topic = None
    for rule in rules():
        if rule.topic != topic:
            topic = rule.topic
            lines += ["", f"## {topic}", "", "| rule | source | refused with | checked in |"]
            lines.append("| --- | --- | --- | --- |")
        says = rule.says.replace("*", r"\*") + (" *" if rule.needs_data else "")
        place = checked_in(refusal(rule))
        lines.append(f"| {says} | {rule.source} | `{rule.error}` | {place} |")
    return "\n".join(lines) + "\n"


def test_the_page_is_current():
    assert page() == PAGE.read_text(), "run python tests/simulator/test_rules.py"


WITHOUT_A_RULE_OF_ITS_OWN = {"reciprocal", "register_load", "register_move", "register_store"}


def test_every_instruction_has_rules():
    topics = {rule.topic for rule in rules()}
    assert set(INSTRUCTIONS) - topics == WITHOUT_A_RULE_OF_ITS_OWN


def test_sources_name_what_the_api_has():
    functions = api("0.6")
    for rule in rules():
        named = re.match(r"nki\.isa\.(\w+)", rule.source)
        if named:
            name = f"nki.isa.{named.group(1)}"
            assert name in functions.functions or name in functions.values, rule.source
        assert rule.source, rule
        assert getattr(errors, rule.error, None) is not None, rule


if __name__ == "__main__":
    PAGE.write_text(page())
