"""The errors of the timing model on published kernels: what was recorded holds today."""

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import pytest
from trace_builder import Scene

from nmm_compiler import targets
from nmm_compiler.simulator.isa import cycles
from nmm_compiler.simulator.timing import costs, evidence, resources
from nmm_compiler.simulator.timing.schedule import time_trace

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import laws
import timing_hash
import timing_points
import timing_texts

POINTS = timing_texts.points()
TEXTS = timing_texts.texts()
RESULTS = timing_points.recorded([*POINTS, *TEXTS])
QUICK = [p for p in POINTS if p.name.startswith(("add 256000", "DMA rate", "transpose"))]


def test_the_held_out_errors_were_printed_with_the_constants_of_today():
    """Fails when a constant has changed: run `make bench-timing ARGS=--write`, with the clones of
    ucb-bar/autocomp, zhang677/AccelOpt and Jerry2423/kda-for-trainium (`--autocomp CLONE --accelopt
    CLONE --kda CLONE`)."""
    recorded = json.loads(evidence.HELD_OUT.read_text())
    assert recorded["constants"] == timing_hash.constants_hash()
    assert [result.point for result in RESULTS] == [*POINTS, *TEXTS]
    assert timing_points.bands(RESULTS) == list(evidence.bands().values())


@pytest.fixture
def before(monkeypatch):
    """The hash of few kinds of work on two targets; each price is in it, shown one by one."""
    monkeypatch.setattr(targets, "names", lambda: ("trn1", "trn2"))
    monkeypatch.setattr(timing_hash, "RULES", ["tensor_copy"])
    return timing_hash.constants_hash()


SLOWER_TRN1 = dataclasses.replace(targets.get("trn1"), semaphore_seconds=1e-6)


def slower(rule):
    return lambda *given: rule(*given) + 0.5


@pytest.mark.parametrize("op", [op for op in costs.RULES if op not in timing_hash.NOT_PUBLISHED])
def test_the_hash_notices_a_cost_rule(op, monkeypatch):
    monkeypatch.setattr(targets, "names", lambda: ("trn2",))
    for name, only in (("RULES", [op]), ("_products", list), ("_transfers", list)):
        monkeypatch.setattr(timing_hash, name, only)
    before = timing_hash.constants_hash()
    monkeypatch.setitem(costs.RULES, op, slower(costs.RULES[op]))
    assert timing_hash.constants_hash() != before


@pytest.mark.parametrize(
    ("module", "name", "other"),
    [
        (resources, "_WORTH_A_SWAP", 0.25),
        (targets, "get", lambda name: SLOWER_TRN1),
        (costs, "one_pass", slower(costs.one_pass)),
        (costs, "_pipeline_cycles", slower(costs._pipeline_cycles)),
        (cycles, "_fast_mode", slower(cycles._fast_mode)),
        (costs, "_LARGEST_DESCRIPTOR_BYTES", 32768),
        (costs, "_split", lambda target, reads, writes, transpose: [(0, 1.0)]),
        (costs, "_transpose_fraction", lambda target, reads, writes: 0.1),
        (costs, "_issue", lambda target, mode, issuer, descriptors: ("software", 1e-9)),
        (costs, "tensor_dtype", lambda instruction: "bfloat16"),
    ],
)
def test_the_hash_notices_a_constant_and_how_transfers_and_products_are_priced(
    module, name, other, monkeypatch, before
):
    monkeypatch.setattr(module, name, other)
    assert timing_hash.constants_hash() != before


def test_the_hash_holds_while_no_constant_of_timing_changes(monkeypatch, before):
    known = targets.get
    freed = {"absent_forms": (), "hbm_bytes": 1, "collective_points": ()}
    monkeypatch.setattr(targets, "get", lambda name: dataclasses.replace(known(name), **freed))
    assert timing_hash.constants_hash() == before
    assert {field.name for field in dataclasses.fields(targets.Target)} > timing_hash.NOT_OF_TIMING


def test_each_conflict_is_borne_out_and_is_a_counted_held_out_point():
    found = timing_texts.conflicts(timing_points.BARS["worst"])
    held = {result.point.name for result in RESULTS if result.held_out}
    assert len(found) == len({v.point for v in found} & held)
    assert all(v.holds(timing_points.BARS["worst"]) for v in found)
    assert not any(v.holds(0.9) for v in timing_texts.conflicts(0.9))


def test_predictions_recorded_with_other_constants_are_not_shown(monkeypatch):
    timing_texts.recorded.cache_clear()
    monkeypatch.setattr(timing_texts, "constants_hash", lambda: "other")
    assert timing_points.text_results(TEXTS, {}, None) == []
    timing_texts.recorded.cache_clear()


KERNEL = """
@nki.jit
def test(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.exp(nl.load(a)))
    return out
"""


def clone_with(folder, code):
    """Return a text of 12 us, and a clone in which a search recorded `code` with that time."""
    (folder / "trace.py").write_text(f"CodeCandidate(parent=None, code={code!r}, score=0.012)\n")
    return timing_texts.Text(
        name="exp, text of 12 us", kind="", target="trn1", kernel="test", shapes=((128, 512),),
        source=f"traces ({timing_texts.SEARCHED})", measured=12.0, published="trace.py",
        digest=timing_texts.digest(KERNEL),
    ), folder  # fmt: skip


def ran(text, clone):
    return timing_texts.ran(text, {text.clone: clone})


TWELVE_BANKS = """
@nki.jit
def test(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    tile = nl.load(a)
    products = nl.ndarray((12, nl.par_dim(128), 512), dtype=nl.float32, buffer=nl.psum)
    for i in nl.affine_range(12):
        products[i] = nisa.nc_matmul(tile[:, 0:128], tile)
    for i in nl.affine_range(12):
        nl.store(out, nl.copy(products[i]))
    return out
"""


@pytest.mark.parametrize(
    ("code", "changes", "said"),
    [
        (KERNEL.replace("nl.exp", "nl.log"), {}, f"digest {timing_texts.digest(KERNEL)} expected"),
        (KERNEL, {"counted": False}, "nothing that leaves it out"),
        (TWELVE_BANKS, {"digest": timing_texts.digest(TWELVE_BANKS)},
         "spills: live sums take 12 PSUM banks of 8"),
    ],
    ids=["the text has changed", "a run does not bear out the row", "it spills"],
)  # fmt: skip
def test_a_text_that_is_not_what_its_row_says_is_refused_by_name(tmp_path, code, changes, said):
    text, clone = clone_with(tmp_path, code)
    with pytest.raises(SystemExit, match=f"exp, text of 12 us: .*{said}"):
        ran(dataclasses.replace(text, **changes), clone)


@pytest.mark.parametrize(
    ("errors", "code"), [((0.1, 0.1), 0), ((0.1, 0.5), 1), ((0.5, 0.5), 2), ((0.5, 0.1), 2)]
)
def test_the_exit_code_counts_points_that_contradict_others(errors, code):
    """The first point is a plain one, the second contradicts other published figures."""
    named = {p.name: p for p in POINTS}
    conflict = timing_texts.conflicts(0.25)[0].point
    pair = (named["GEMM, groups of 4x2, loads fused"], named[conflict])
    plain = [named["scan, loads once, 256 channels, 2048 positions"]] * 30
    results = [
        timing_points.Result(p, p.measured * (1 + e), p.kind)
        for p, e in [*zip(pair, errors, strict=True), *((p, 0.0) for p in plain)]
    ]
    lines, found = timing_points.verdict(results)
    assert found == code
    assert ("but for 1 " in lines[1]) if errors[1] > 0.25 else len(lines) == 1


def check(point):
    known = timing_texts.recorded()[point.name]
    assert timing_points.predict(point).predicted == pytest.approx(known["predicted"], rel=1e-9), (
        "record it: make bench-timing ARGS=--write"
    )


@pytest.mark.parametrize("point", QUICK, ids=lambda point: point.name)
def test_recorded_predictions_are_current(point):
    check(point)


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_all_recorded_predictions_are_current(point):
    check(point)


@pytest.mark.parametrize(
    ("busy", "kind"),
    [
        ({"tensor": 9.0, "vector": 4.0, "scalar": 1.0}, "matrix"),
        ({"tensor": 4.0, "vector": 1.0, "scalar": 9.0}, "vector"),
        ({"tensor": 4.0, "vector": 3.0, "dma": 7.0}, "mixed"),
        ({"tensor": 4.0, "vector": 1.0, "dma": 9.0}, "dma"),
        ({}, "mixed"),
    ],
)
def test_the_class_of_a_kernel_is_what_works_longest(busy, kind):
    assert evidence.kernel_class(busy) == kind


def of_every_law(dtype):
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


def test_a_law_is_off_as_long_as_it_is_asked_and_most_change_a_kernel_that_has_them():
    """benchmarks/laws.py switches each law of the timing model off alone, and on again."""
    found = set()
    for name, dtype in itertools.product(targets.names(), ("float32", "bfloat16")):
        target, trace = targets.get(name), of_every_law(dtype)
        before = time_trace(trace, target).end
        for law in laws.LAWS:
            with law.off(target) as without:
                if time_trace(trace, without).end != before:
                    found.add(law.name)
            assert time_trace(trace, target).end == before, law.name
    assert 2 * len(found) > len(laws.LAWS)
