"""Each documented rule: a kernel that breaks it is refused, one that just holds it runs.

`rules()` reads `documented_rules.toml`. A row has a call with a `$`, which `breaks` and `holds`
replace, so that the two calls differ in the rule alone. The simulator does not read this table: its
checks are beside the instructions.
"""

import functools
import itertools
import random
import re
import textwrap
import tomllib
import types
from pathlib import Path

import numpy as np
import pytest
from simulator_kernels import kernel_file

from nmm_compiler import errors
from nmm_compiler.simulator.isa.names import INSTRUCTIONS
from nmm_compiler.simulator.run import simulate
from nmm_compiler.simulator.tensors.dtypes import ALL

# Fields of a rule: topic, the instruction or the subject; says, the rule in our words; source, page
# and section of the Neuron documentation (SDK 2.32 unless it says otherwise); error, the class in
# errors.py that refuses its breach; call, kernel lines over the tiles that `RULE_KERNEL` makes, `$`
# where the breaking and the holding call differ; breaks, holds. And what it may leave out: targets
# of both calls; whether it is about values, so that mode="timing" cannot see its breach; programs.
LEFT_OUT = {"on": "trn2", "holds_on": "", "needs_data": False, "grid": 1}

RULE_KERNEL = """\
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl


def sb(*shape, dtype=nl.float32, value=1, address=None):
    tile = nl.ndarray(shape, dtype, nl.sbuf, address=address)
    nisa.memset(dst=tile, value=0 if "_x4" in str(dtype) else value)
    return tile


def ps(*shape, dtype=nl.float32):
    tile = nl.ndarray(shape, dtype, nl.psum)
    nisa.memset(dst=tile, value=1)
    return tile


def hb(*shape, dtype=nl.float32, buffer=nl.shared_hbm):
    return nl.zeros(shape, dtype, buffer)


def idx(*values, dtype=nl.uint32, rows=None):
    tile = nl.ndarray((rows or len(values), 1), dtype, nl.sbuf)
    for row, value in enumerate(values):
        nisa.dma_copy(dst=tile[row : row + 1], src=sb(1, 1, dtype=dtype, value=value))
    if rows:
        nisa.memset(dst=tile, value=values[0])
    return tile


@nki.jit
def kernel(a):
{body}
    return a
"""
"""The kernel around a row's call: sb, ps and hb make written tensors in SBUF, PSUM and HBM."""


@functools.cache
def rules():
    """Return all rules in the table's order, with both calls."""
    rows = tomllib.loads(
        Path(__file__).with_name("documented_rules.toml").read_text(encoding="utf-8")
    )["rule"]
    made = [types.SimpleNamespace(**{**LEFT_OUT, **row}) for row in rows]
    for rule in made:
        rule.holds_on = rule.holds_on or rule.on
        rule.breaker, rule.holder = (rule.call.replace("$", by) for by in (rule.breaks, rule.holds))
    return made


def attempt(rule, lines, target, mode):
    """Run a rule's lines as a kernel."""
    path = kernel_file(RULE_KERNEL.replace("{body}", textwrap.indent(lines.strip("\n"), "    ")))
    array = np.ones((4, 4), np.float32)
    return simulate(f"{path}:kernel", array, target=target, grid=rule.grid, mode=mode)


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, id=f"{rule.topic}: {rule.says}") for rule in rules()]
)
def test_the_breaker_is_refused_and_the_holder_runs(rule):
    assert rule.call, "no call"
    assert (rule.breaker, rule.on) != (rule.holder, rule.holds_on), "one call only"
    for mode in ("functional", "timing"):
        attempt(rule, rule.holder, rule.holds_on, mode)
        if rule.needs_data and mode == "timing":
            attempt(rule, rule.breaker, rule.on, mode)
            continue
        with pytest.raises(errors.SimulationError) as caught:
            attempt(rule, rule.breaker, rule.on, mode)
        error = caught.value
        assert type(error).__name__ == rule.error, error
        # names the thing, and where: the kernel's own file and line
        assert error.file.endswith(".py"), error
        assert error.line > 0, error
        assert "report" not in str(error), error


WITHOUT_A_RULE_OF_ITS_OWN = {"reciprocal", "register_load", "register_move", "register_store"}


def test_every_instruction_has_rules():
    topics = {rule.topic for rule in rules()}
    assert set(INSTRUCTIONS) - topics == WITHOUT_A_RULE_OF_ITS_OWN


# Valid kernels with a word or two changed: refused or run, and never an internal error.

DTYPES = sorted(set(ALL) - {"bool_", "int64", "uint64"})
OPERATORS = ["add", "maximum", "bitwise_and", "exp", "rsqrt", "less", "not_equal", "power", "abs",
             "average", "bypass", "left_shift", "logical_and", "prelu", "square"]  # fmt: skip
MUTATIONS = (
    # but what ends a while_loop
    (
        r"(?<!r: nisa\.register_alloc\()\b\d+\b",
        ["0", "1", "2", "3", "7", "8", "16", "33", "64", "128", "129", "513"],
    ),
    (r"(?<=nl\.)(?:float\d+\w*|bfloat16|u?int\d+|tfloat32)", DTYPES),
    (r"\b(?:sb|ps|hb)\b", ["sb", "ps", "hb"]),
    (r"(?<=nl\.)(?:add|multiply|maximum|exp|less|bitwise_and|equal|abs)\b", OPERATORS),
    (r"(?<=engine\.)\w+", ["vector", "scalar", "gpsimd", "tensor", "sync", "unknown"]),
    (r"(?<=reduce_cmd\.)\w+", ["idle", "reset", "reduce", "reset_reduce", "load_reduce"]),
    (r"\b(?:True|False|None)\b", ["True", "False", "None", "0.5"]),
    (r"\b\d+\.\d+\b", ["sb(8, 1)", "0", "None", "1e30", "'text'"]),
    (r"(?<=[=\[ ])(?:sb|hb)\([^()]*\)", ["None", "1.0", "sb(8, 4)", "hb(8, 4)[0:2]"]),
)


def outcome(rule, lines, target, mode):
    """Return the instructions of a run, or the error that refused it."""
    try:
        return attempt(rule, lines, target, mode).trace.instructions
    except errors.NmmError as error:
        return error


def mutant(rule, seed):
    """Return a rule's holder with one or two words changed, and its outcome in both modes."""
    r = random.Random(f"{rule.topic} {rule.says} {seed}")
    lines = rule.holder
    for _ in range(r.choice([1, 1, 2])):
        pattern, words = r.choice(MUTATIONS)
        places = list(re.finditer(pattern, lines))
        if places:
            at = r.choice(places)
            lines = lines[: at.start()] + r.choice(words) + lines[at.end() :]
    target = r.choice([rule.holds_on, r.choice(("trn1", "trn2", "trn3"))])
    return lines, *(outcome(rule, lines, target, mode) for mode in ("functional", "timing"))


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize("topic", sorted({rule.topic for rule in rules()}))
def test_no_internal_errors_beside_valid_kernels(topic, seeds):
    """And what runs with data runs without, with an equal trace."""
    for rule, seed in itertools.product(rules(), seeds):
        if rule.topic == topic:
            lines, full, timed = mutant(rule, seed)
            for found in (full, timed):
                assert not isinstance(found, errors.InternalFaultError), f"{lines}\n{found}"
            if isinstance(timed, errors.NmmError):
                assert type(timed) is type(full), f"{lines}\n{timed}; with data {full}"
            elif not isinstance(full, errors.NmmError):
                assert timed == full, lines
