"""One-instruction kernels with odd operands: refused or run, and never an internal error."""

import dataclasses
import inspect
import random
import re

import numpy as np
import pytest
from documented_rules import rules
from test_rules import attempt

from nmm_compiler import errors
from nmm_compiler.simulator.isa.instruction import INSTRUCTIONS, MEMBERS
from nmm_compiler.simulator.loading.standins import MODULES
from nmm_compiler.simulator.run import simulate
from nmm_compiler.simulator.tensors.dtypes import ALL

nl, nisa = MODULES["nki.language"], MODULES["nki.isa"]
TARGETS = ("trn1", "trn2", "trn3")
SHAPES = [(1, 1), (8, 4), (32, 32), (128, 8), (64, 3), (16, 2, 4), (8, 2, 2, 4), (128, 1), (33, 16),
          (128, 128), (4, 1), (8, 8), (8, 6), (1, 2, 8), (8, 2, 2, 2, 2, 2)]  # fmt: skip
DTYPES = sorted(set(ALL) - {"bool_", "int64", "uint64"})
OPERATORS = ["add", "maximum", "bitwise_and", "exp", "rsqrt", "less", "not_equal", "power", "abs",
             "average", "bypass", "left_shift", "logical_and", "prelu", "square"]  # fmt: skip
NUMBERS = [0, 1, -1, 3, 128, 2**31, 2**40, 0.5, -2.5, float("inf"), float("nan"), True]
ODD = [None, "text", (), [1, 2], object, -7, 1.5]
DATA_ONLY = (
    errors.HazardError, errors.OutOfBoundsError, errors.HazardError,
    errors.HazardError, errors.SimulationError,
)  # fmt: skip
QUICK, MANY = 8, 600


def tensor(r):
    """Return a tensor, or a view of one, of some shape, dtype and memory."""
    memory = r.choice([nl.sbuf] * 6 + [nl.psum] * 2 + [nl.shared_hbm])
    shape = r.choice(SHAPES[:3] * 3 + SHAPES)
    dtype = r.choice(["float32"] * 6 + ["bfloat16", "int32", "uint8", "uint32"] * 2 + DTYPES)
    made = nl.ndarray(shape, dtype, memory)
    if memory is not nl.shared_hbm and r.random() < 0.8:
        nisa.memset(dst=made, value=r.choice([0, 1]) if ALL[dtype].kind != "packed" else 0)
    how = r.random()
    if how < 0.1 and shape[-1] > 1:
        return made[..., 1:]
    if how < 0.15 and shape[-1] > 2:
        return made[..., ::2]
    if how < 0.2:
        return made[shape[0] // 2 :]
    if how < 0.24:
        return made.select(1, nisa.register_alloc(r.choice([0, 9]))) if len(shape) > 2 else made
    if how < 0.28 and memory is nl.shared_hbm:
        return made.vector_select(0, r.choice(TENSORS)(r))
    if how < 0.31 and memory is nl.sbuf:
        return made.indirect(nl.ndarray((shape[0], 1), "uint16", nl.sbuf), num_elem=2)
    return made


TENSORS = [tensor]


LIKELY = {
    **dict.fromkeys(("op", "op0", "op1", "reduce_op", "cmp_op", "comp_op0", "comp_op1"),
                    tuple(getattr(nl, name) for name in OPERATORS)),
    **dict.fromkeys(("tile_position", "tile_size"),
                    ((), (32, 128), (0, 0), (64, 64), (1, 2, 3), (0.5, 0))),
    "pattern": [[[1, 4]], [[1, 2], [2, 2]], [[1, 8]], [[0, 1]] * 5, [[1, 32]], [[1.5, 4]]],
    "axis": [1, -1, 0, (1, 2), (2,), 7],
    "shuffle_mask": [list(range(32)), [255] * 32, [0] * 31, [99] * 32],
    "cores": [(0, 1), (1, 0), 3],
}  # fmt: skip
"""Arguments of some parameters."""


def value(r, name, parameter):
    """Return a likely argument for a parameter, or an odd one."""
    if name == "name" or (parameter.default is not parameter.empty and r.random() < 0.5):
        return parameter.default
    if r.random() < 0.04:
        return r.choice(ODD)
    if name in MEMBERS:
        return r.choice([*MEMBERS[name], 1, 9])
    if name in LIKELY:
        return r.choice(LIKELY[name])
    if name == "srcs":
        return [tensor(r) for _ in range(r.choice([0, 1, 2, 17]))]
    if parameter.annotation in (bool, "bool") or name in ("accumulate", "unique_indices"):
        return r.choice([True, False])
    kinds = {"dst", "src", "data", "stationary", "moving", "predicate", "on_true", "vals", "index"}
    if parameter.default is parameter.empty and (
        name in kinds or name.startswith(("dst", "src", "data", "on_true", "idx", "val", "bound",
                                          "indic", "stationary", "moving", "segment"))
    ):  # fmt: skip
        return tensor(r)
    return r.choice([lambda: tensor(r), lambda: r.choice(NUMBERS)])()


def outcome(op, seed, mode):
    """Run the kernel of a seed; return the error or None."""
    r = random.Random(f"{op} {seed}")
    target = r.choice(TARGETS)
    instruction = INSTRUCTIONS[op]

    def kernel(a):
        parameters = inspect.signature(instruction).parameters
        arguments = {n: value(r, n, p) for n, p in parameters.items()}
        instruction(**arguments)
        return a

    try:
        simulate(kernel, np.ones((4, 4), np.float32), target=target, mode=mode)
    except errors.NmmError as error:
        return error
    return None


MUTATIONS = (
    (r"\b\d+\b", ["0", "1", "2", "3", "7", "8", "16", "33", "64", "128", "129", "513"]),
    (r"(?<=nl\.)(?:float\d+\w*|bfloat16|u?int\d+|tfloat32)", DTYPES),
    (r"\b(?:sb|ps|hb)\b", ["sb", "ps", "hb"]),
    (r"(?<=nl\.)(?:add|multiply|maximum|exp|less|bitwise_and|equal|abs)\b", OPERATORS),
    (r"(?<=engine\.)\w+", ["vector", "scalar", "gpsimd", "tensor", "sync", "unknown"]),
    (r"(?<=reduce_cmd\.)\w+", ["idle", "reset", "reduce", "reset_reduce", "load_reduce"]),
    (r"\b(?:True|False|None)\b", ["True", "False", "None", "0.5"]),
    (r"\b\d+\.\d+\b", ["sb(8, 1)", "0", "None", "1e30", "'text'"]),
    (r"(?<=[=\[ ])(?:sb|hb)\([^()]*\)", ["None", "1.0", "sb(8, 4)", "hb(8, 4)[0:2]"]),
)


def mutant(rule, seed):
    """Return the outcome in both modes of a rule's holder with one or two words changed."""
    r = random.Random(f"{rule.topic} {rule.says} {seed}")
    lines = rule.holder
    for _ in range(r.choice([1, 1, 2])):
        pattern, words = r.choice(MUTATIONS)
        places = list(re.finditer(pattern, lines))
        if places:
            at = r.choice(places)
            lines = lines[: at.start()] + r.choice(words) + lines[at.end() :]
    made = dataclasses.replace(rule, call=lines)
    target = r.choice([rule.holds_on or rule.on, r.choice(TARGETS)])
    errors_of = []
    for mode in ("functional", "timing"):
        try:
            attempt(made, lines, target, mode)
            errors_of.append(None)
        except errors.NmmError as error:
            errors_of.append(error)
    return lines, *errors_of


def check_mutants(rule, seeds):
    for seed in seeds:
        lines, *both = mutant(rule, seed)
        for error in both:
            assert not isinstance(error, errors.InternalFaultError), f"{lines}\n{error}"
        full, timed = both
        if full is None:
            assert timed is None, f"{lines}\n{timed}; not with data"


@pytest.mark.parametrize("topic", sorted({rule.topic for rule in rules()}))
def test_no_internal_errors_beside_valid_kernels(topic):
    for rule in rules():
        if rule.topic == topic:
            check_mutants(rule, range(2))


@pytest.mark.long
@pytest.mark.parametrize("topic", sorted({rule.topic for rule in rules()}))
def test_no_internal_errors_in_many_kernels_beside_valid_ones(topic):
    for rule in rules():
        if rule.topic == topic:
            check_mutants(rule, range(2, 60))


def check(op, seeds):
    for seed in seeds:
        full, timed = (outcome(op, seed, mode) for mode in ("functional", "timing"))
        for error in (full, timed):
            assert not isinstance(error, (errors.InternalFaultError, errors.KernelFailedError)), (
                f"seed {seed}: {error}"
            )
        if timed is not None and "no value in timing mode" not in str(timed):
            assert type(timed) is type(full), f"seed {seed}: {timed}; with data {full}"
        if timed is None and full is not None:
            assert type(full) in DATA_ONLY, f"seed {seed}: {full}; not in timing mode"


@pytest.mark.parametrize("op", sorted(INSTRUCTIONS))
def test_no_internal_errors(op):
    check(op, range(QUICK))


@pytest.mark.long
@pytest.mark.parametrize("op", sorted(INSTRUCTIONS))
def test_no_internal_errors_in_many_kernels(op):
    check(op, range(QUICK, MANY))
