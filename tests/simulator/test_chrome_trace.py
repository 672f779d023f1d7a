"""Several timelines in one Chrome trace file."""

import json

import pytest

from nmm_compiler import targets
from nmm_compiler.errors import OutputError, TimelineMissingError
from nmm_compiler.simulator.timing.profile import Profile, profile_trace, write_trace
from nmm_compiler.simulator.trace import Access, Allocation, Instruction, Trace


def profile(columns):
    """One copy on VectorE."""
    pattern = ((4, columns),)
    accesses = [Access(i, "sbuf", 0, 128, 0, 4 * columns, pattern, "float32", 4) for i in (1, 2)]
    trace = Trace(
        instructions=[
            Instruction("tensor_copy", "vector", (accesses[0],), (accesses[1],), {}, "k.py", 3)
        ],
        allocations={
            i: Allocation(i, f"t{i}", "sbuf", (128, columns), "float32", 4 * columns, 0, 0, 1)
            for i in (1, 2)
        },
    )
    return profile_trace(trace, targets.get("trn2"))


def test_each_profile_has_its_own_processes(tmp_path):
    path = write_trace({"wide": profile(512), "narrow": profile(64)}, tmp_path / "t.json")
    events = json.loads(path.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.split(":")[0] for name in names] == ["wide", "wide", "narrow", "narrow"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len({e["pid"] for e in slices}) == 2
    assert slices[0]["dur"] > slices[1]["dur"]
    assert not list(tmp_path.glob("*.part"))


def test_failures_are_named(tmp_path):
    with pytest.raises(TimelineMissingError):
        write_trace({"old": Profile.from_json(profile(8).to_json())}, tmp_path / "t.json")
    with pytest.raises(OutputError, match="nowhere"):
        write_trace({"one": profile(8)}, tmp_path / "nowhere" / "t.json")
