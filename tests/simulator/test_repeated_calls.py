"""Speed without data: calls like an earlier one are recorded at once, and still rightly.

Time on a shared machine says little, so the guards count Python calls instead of seconds.
"""

import gc
import sys

import numpy as np
import pytest
from simulator_kernels import kernel_file, run
from test_rules import attempt, rules
from trace_builder import starts, stops

from benchmarks.simulator import LOW_RANK, SOFTMAX, TILED
from nmm_compiler import errors, targets
from nmm_compiler.simulator import machine
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.simulator.timing.schedule import time_trace


def tiled(rows, mode="timing"):
    path = kernel_file(TILED)
    shapes = (512, rows), (512, 1024)
    given = [ArraySpec(shape, "bfloat16") for shape in shapes]
    if mode != "timing":
        given = [np.ones(shape, np.float32) for shape in shapes]
    return simulate(f"{path}:tiled", *given, mode=mode)


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, id=f"{rule.topic}: {rule.says}")
        for rule in rules()
        if rule.grid == 1 and not rule.needs_data and rule.on == rule.holds_on
    ],
)
def test_a_breaker_is_refused_after_calls_that_hold_the_rule(rule):
    with pytest.raises(errors.SimulationError) as caught:
        attempt(rule, f"{rule.holder}\n{rule.holder}\n{rule.breaker}", rule.on, "timing")
    assert type(caught.value).__name__ == rule.error, caught.value


@pytest.mark.parametrize("before", ["a[:, 1:5], b[:, 0:4]", "a[:, 4:8], a[:, 0:4]"])
def test_a_call_is_known_by_which_operands_share_memory_and_where_they_begin(before):
    body = f"""
    a, b = nl.zeros((128, 8), nl.float32), nl.zeros((128, 8), nl.float32)
    nisa.tensor_copy({before})
    {{}}
    return out(a)
    """
    run(body.format(""), mode="timing")
    with pytest.raises(errors.HazardError):
        run(body.format("nisa.tensor_copy(a[:, 1:5], a[:, 0:4])"), mode="timing")


NUMBERED = """
t = nl.ndarray((128, 8), nl.float32, nl.sbuf)
nisa.memset(dst=t, value=0.0)
for n in [64] * 300:
    s = {}
    nisa.tensor_scalar(dst=t, data=t, op0=nl.multiply, operand0=s)
return out(t)
"""
PLACED = """
t = nl.ndarray((32, 32), nl.bfloat16, nl.sbuf)
nisa.memset(dst=t, value=0.0)
p = nl.ndarray((32, 32), nl.float32, nl.psum)
for n in range(300):
    nisa.nc_matmul(dst=p, stationary=t, moving=t, tile_position=(n % 2 * 32, 0), tile_size=(32, 32))
return out(p)
"""
COMPUTED = "1.0 / n", "float(n) + 0.5", "n * 1000", "np.float32(1.0) / n", "-(1.0 / n)"


@pytest.mark.parametrize(
    ("body", "most"), [*((NUMBERED.format(number), 4) for number in COMPUTED), (PLACED, 6)]
)
def test_what_is_computed_for_each_call_is_known_by_its_value(body, most, monkeypatch):
    """Its identity is new each time: so the memory of calls grew, and knew none of them."""
    known = {}
    monkeypatch.setattr(machine, "_outcomes_on", lambda target: known)
    trace = run(body, mode="timing").trace
    assert len(known) <= most
    assert all(instruction.kind for instruction in trace.instructions)


def test_an_equal_number_of_another_class_is_checked_anew():
    body = """
    t = nl.ndarray((32, 32), nl.bfloat16, nl.sbuf)
    nisa.memset(dst=t, value=0.0)
    p = nl.ndarray((32, 32), nl.float32, nl.psum)
    for place in (0, 0, 0.0):
        nisa.nc_matmul(dst=p, stationary=t, moving=t, tile_position=(place, 0), tile_size=(32, 32))
    return out(p)
    """
    with pytest.raises(errors.KernelArgumentError, match="no compile-time integer"):
        run(body, mode="timing")


def test_a_rule_that_only_warns_warns_on_every_line():
    body = """
    a = nl.ndarray((128, 8), nl.float32, nl.sbuf)
    nisa.memset(dst=a, value=0.0)
    b = nl.ndarray((64, 8), nl.float32, nl.sbuf)
    nisa.tensor_copy(dst=b, src=a[32:96])
    nisa.tensor_copy(dst=b, src=a[32:96])
    return out(a)
    """
    said = run(body, mode="timing", strict=False).warnings
    assert len([text for text in said if "starts at partition 32" in text]) == 2


def test_a_view_by_a_register_is_not_kept():
    body = """
    a = nl.ndarray((128, 8), nl.float32, nl.sbuf)
    nisa.memset(dst=a, value=0.0)
    for i in nl.dynamic_range(3):
        nisa.memset(dst=a[:, nl.ds(i, 1)], value=1.0)
    return out(a)
    """
    trace = run(body, mode="timing").trace
    starts = [i.writes[0].byte_start for i in trace.instructions if i.op == "memset"]
    assert starts == [0, 0, 4, 8]


@pytest.mark.parametrize("memory", ["hbm", "sbuf"])
@pytest.mark.parametrize(
    "keys",
    [
        (np.s_[32:64, 8:40], np.s_[0:16, 4:32:4], np.s_[:, 1:3]),
        (np.s_[64:96], np.s_[3], np.s_[:1]),
        (np.s_[..., 7:9], np.s_[-32:, 1]),
        (np.s_[:, True:3], np.s_[0:1]),
    ],
)
def test_a_part_of_a_like_tensor_is_the_part_that_the_key_selects(memory, keys):
    """Shape, strides and region, with data and without; the first tensor is cut anew."""
    body = f"""
    for number in range(3):
        cut = nl.ndarray((128, 64), nl.bfloat16, nl.{memory})
        plain = cut
        for key in KEYS:
            plain, cut = plain._view(key if isinstance(key, tuple) else (key,)), cut[key]
            assert plain.access() == cut.access(), (number, key)
            for name in ("shape", "strides", "offset", "dtype", "geometry"):
                assert getattr(plain, name) == getattr(cut, name), (number, key, name)
    a = nl.ndarray((128, 8), nl.float32, nl.sbuf)
    nisa.memset(dst=a, value=0.0)
    return out(a)
    """.replace("KEYS", repr(keys))
    for mode in ("timing", "functional"):
        run(body, mode=mode)


@pytest.mark.parametrize("memory", ["hbm", "sbuf", "psum"])
def test_parts_of_parts_that_begin_apart_begin_apart(memory):
    body = f"""
    whole = nl.ndarray((128, 64), nl.float32, nl.{memory})
    starts = [whole[:, first : first + 16][:, 2:6].access().byte_start for first in (0, 16, 40)]
    assert starts == [8, 72, 168], starts
    a = nl.ndarray((128, 8), nl.float32, nl.sbuf)
    nisa.memset(dst=a, value=0.0)
    return out(a)
    """
    run(body, mode="timing")


def test_calls_of_python_for_an_instruction():
    """A timed instruction of a tiled product takes few calls from its line to the profile.

    With every call checked anew it took 116.
    """
    tiled(256)

    def calls(rows):
        count = 0

        def note(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            found = tiled(rows)
        finally:
            sys.setprofile(None)
        return count, len(found.trace.instructions)

    (few, small), (many, large) = calls(512), calls(2048)
    assert (many - few) / (large - small) < 80


@pytest.mark.parametrize("target", targets.names())
@pytest.mark.parametrize("name", ["tiled", "low_rank", "scores"])
def test_instructions_of_one_kind_take_what_each_alone_would(name, target):
    """Times by number of kind and times by the geometry of every operand: equal to the last bit."""
    path = kernel_file({"tiled": TILED, "low_rank": LOW_RANK, "scores": SOFTMAX}[name])
    shapes = ((512, 512), (512, 128), (128, 1024)) if name == "low_rank" else ((128, 512),) * 2
    given = [ArraySpec(shape, "bfloat16") for shape in shapes]
    trace = simulate(f"{path}:{name}", *given, mode="timing", target=target).trace
    kinds = {i.kind for i in trace.instructions}
    assert 0 not in kinds
    assert len(kinds) < len(trace.instructions)
    quick = time_trace(trace, targets.get(target))
    for instruction in trace.instructions:
        instruction.kind = 0
    slow = time_trace(trace, targets.get(target))
    assert (starts(quick), quick.end, stops(quick)) == (starts(slow), slow.end, stops(slow))


@pytest.mark.parametrize("mode", ["timing", "functional", "full"])
def test_a_run_leaves_nothing_for_the_garbage_collector(mode):
    """What no cycle holds is freed at once: many runs keep no old traces in memory."""
    tiled(128, mode)
    gc.freeze()  # what other tests left, which takes seconds to look through
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)  # what a collection finds is kept in gc.garbage
    try:
        tiled(128, mode)
        gc.collect()  # other libraries may leave something meanwhile
        kinds = {type(found).__module__ for found in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()
    assert not [kind for kind in kinds if kind.startswith("nmm_compiler.")]
