"""Each documented rule: a kernel that breaks it is refused, one that just holds it runs."""

import re
import textwrap

import numpy as np
import pytest
from documented_rules import RULE_KERNEL, rules
from simulator_kernels import kernel_file

from nmm_compiler import errors
from nmm_compiler.nki_api.api import api
from nmm_compiler.simulator.isa.instruction import INSTRUCTIONS
from nmm_compiler.simulator.run import simulate

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
