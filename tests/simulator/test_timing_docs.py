"""docs/timing.md shows the constants that the targets have and the errors that they give."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from nmm_compiler import targets
from nmm_compiler.simulator.timing import evidence, resources

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "timing.md"
sys.path.insert(0, str(ROOT / "benchmarks"))
import timing_conflicts  # noqa: E402
import timing_points  # noqa: E402

POINTS = timing_points.points()
QUICK = [p for p in POINTS if p.name.startswith(("add 256000", "DMA rate", "transpose"))]


def section(name):
    text = PAGE.read_text()
    start, end = f"<!-- points: {name} -->\n", f"\n<!-- end of points: {name} -->"
    return text[text.index(start) + len(start) : text.index(end)]


def test_constants_on_the_page_are_current():
    rows = re.findall(
        r"^\| `(\w+)` \| (\S+) ([DMA]) \| (\S+) ([DMA]) \| (\S+) ([DMA]) \|", PAGE.read_text(), re.M
    )
    assert len(rows) > 35
    for name, *cells in rows:
        for target, value, kind in zip(targets.names(), cells[::2], cells[1::2], strict=True):
            record = targets.get(target)
            actual = getattr(record, name)
            shown = f"{actual:g}" if isinstance(actual, float) else str(actual)
            assert (shown, record.sources[name].kind[0].upper()) == (value, kind), (target, name)


def test_every_point_is_on_the_page_in_its_own_table():
    for name in timing_points.SETS:
        rows = [line for line in section(name).splitlines() if line.count("|") == 9]
        shown = [tuple(cell.strip() for cell in row.split("|")[1:6]) for row in rows[2:]]
        assert shown == [
            (p.name, p.kind, p.target, p.source, f"{p.measured:,.5g} {p.unit}")
            for p in POINTS
            if p.set == name
        ]


def test_there_are_enough_points_of_each_kind():
    counted = [p for p in POINTS if p.counted]
    held = [p for p in counted if p.set == "held out"]
    assert (len(counted), len(held)) >= (60, 25)
    assert {p.kind for p in held} == set(evidence.CLASSES)
    assert {p.target for p in held} == {"trn1", "trn2"}
    assert len({p.name for p in POINTS}) == len(POINTS)


def test_the_held_out_errors_were_printed_with_the_constants_of_today():
    """Fails when a constant has changed: run `make bench-timing ARGS=--write`."""
    recorded = json.loads(evidence.HELD_OUT.read_text())
    assert recorded["constants"] == evidence.constants_hash()
    assert f"hash `{recorded['constants']}`" in section("held out")
    for band in evidence.bands().values():
        row = f"| {band.kind} | {band.points} | {band.mean:.1%} | {band.worst:.1%} |"
        assert row in section("held out")
        held = [p for p in POINTS if p.counted and p.set == "held out" and p.kind == band.kind]
        assert band.points == len(held)


def test_the_hash_notices_a_constant(monkeypatch):
    before = evidence.constants_hash()
    monkeypatch.setattr(resources, "_WORTH_A_SWAP", 0.25)
    other = evidence.constants_hash()
    monkeypatch.undo()
    slower = dataclasses.replace(targets.get("trn1"), semaphore_seconds=1e-6)
    monkeypatch.setattr(targets, "get", lambda name: slower)
    assert len({before, other, evidence.constants_hash()}) == 3


def test_the_hash_holds_while_no_constant_of_timing_changes(monkeypatch):
    """What the hash leaves out is read nowhere in the timing model."""
    before = evidence.constants_hash()
    known = targets.get
    freed = {"absent_forms": (), "hbm_bytes": 1, "collective_points": ()}
    monkeypatch.setattr(targets, "get", lambda name: dataclasses.replace(known(name), **freed))
    assert evidence.constants_hash() == before
    folder = Path(evidence.__file__).parent
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    read = set(re.findall(r"target\.(\w+)", source))
    assert len(read) > 50
    assert not evidence.NOT_OF_TIMING & read
    assert {field.name for field in dataclasses.fields(targets.Target)} > evidence.NOT_OF_TIMING


def test_each_conflict_is_borne_out_and_is_a_counted_held_out_point():
    found = timing_conflicts.verdicts(timing_points.BARS["worst"])
    held = {p.name for p in POINTS if p.counted and p.set == "held out"}
    assert len(found) == len({v.point for v in found} & held)
    assert all(v.holds(timing_points.BARS["worst"]) for v in found)
    assert not any(v.holds(0.9) for v in found)


@pytest.mark.parametrize(
    ("errors", "code"), [((0.1, 0.1), 0), ((0.1, 0.5), 1), ((0.5, 0.5), 2), ((0.5, 0.1), 2)]
)
def test_the_exit_code_counts_points_that_contradict_others(errors, code):
    """The first point is a plain one, the second contradicts other published figures."""
    named = {p.name: p for p in POINTS}
    conflict = timing_conflicts.verdicts(0.25)[0].point
    pair = (named["layer norm 4096x8192"], named[conflict])
    plain = [named["max pool 3x3, 4096x4096"]] * 30
    results = [
        timing_points.Result(p, p.measured * (1 + e), (), 1, 1.0)
        for p, e in [*zip(pair, errors, strict=True), *((p, 0.0) for p in plain)]
    ]
    lines, found = timing_points.verdict(results)
    assert found == code
    assert ("but for 1 " in lines[1]) if errors[1] > 0.25 else len(lines) == 1


def check(point):
    row = timing_points.row(timing_points.predict(point))
    assert row in PAGE.read_text(), f"{row}\nis not on the page: make bench-timing ARGS=--write"


@pytest.mark.parametrize("point", QUICK, ids=lambda point: point.name)
def test_predictions_on_the_page_are_current(point):
    check(point)


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_all_predictions_on_the_page_are_current(point):
    check(point)


@pytest.mark.parametrize(
    ("busy", "kind"),
    [
        ({"tensor": 9.0, "vector": 4.0, "scalar": 1.0}, "matrix"),
        ({"tensor": 4.0, "vector": 1.0, "scalar": 9.0}, "vector"),
        ({"tensor": 4.0, "vector": 3.0}, "mixed"),
        ({}, "mixed"),
    ],
)
def test_the_class_of_a_kernel_is_what_works_longest(busy, kind):
    assert evidence.kernel_class(busy) == kind
