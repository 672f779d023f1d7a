"""Held-out points whose published times contradict other published figures, with the arithmetic.

A prediction reads a kernel's text. `data/timing_conflicts.toml` lists points for which published
figures say that the text does not decide the time, each by one of two arguments:
twin: the same instructions in the same order have another published time, so far away that no
prediction is within the bar of both;
floor: the text's instructions take longer at AWS's documented minimum.
`python benchmarks/timing_conflicts.py` prints them and returns 1 if one does not hold.
`--autocomp CLONE` also compares the two texts of the twin, simulated from a clone of
ucb-bar/autocomp.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tomllib
from pathlib import Path
from typing import Any

import timing_texts

from nmm_compiler import targets
from nmm_compiler.simulator.trace import Instruction

DATA = Path(__file__).resolve().parent / "data"
TWIN = "depthwise conv"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What published figures say about a point; low to high: what they leave for it, us."""

    point: str
    measured: float
    low: float
    high: float
    says: str

    def holds(self, worst: float) -> bool:
        """Whether the point cannot be within `worst` of a prediction that the figures leave."""
        return self.high < (1 - worst) * self.measured or self.low > (1 + worst) * self.measured


def verdicts(worst: float) -> list[Verdict]:
    """Return one verdict a conflict; `worst` is the error that the bar allows a point."""
    points = {
        p["name"]: p for p in tomllib.loads((DATA / "timing_points.toml").read_text())["point"]
    }
    for text in timing_texts.texts():
        points[text.name] = {"measured": text.measured, "target": text.problem.target}
    rows = tomllib.loads((DATA / "timing_conflicts.toml").read_text())["conflict"]
    return [_verdict(row, points, worst) for row in rows]


def _verdict(row: dict[str, Any], points: dict[str, Any], worst: float) -> Verdict:
    point = points[row["point"]]
    low, high = 0.0, float("inf")
    if row["kind"] == "twin":
        low, high = (1 - worst) * row["twin_us"], (1 + worst) * row["twin_us"]
        says = f"the same instructions are published with {row['twin_us']:,} us"
    else:
        clock = targets.get(point["target"]).vector_clock_hz
        low = row["instructions"] * row["cycles"] / clock * 1e6
        says = (
            f"{row['instructions']:,} instructions of {row['cycles']} cycles at {clock / 1e9:g} GHz"
        )
    return Verdict(row["point"], point["measured"], low, high, says)


def contradicted(worst: float) -> frozenset[str]:
    """Return the names of the points whose conflict the arithmetic bears out."""
    return frozenset(v.point for v in verdicts(worst) if v.holds(worst))


def lines(worst: float) -> list[str]:
    """Return the arithmetic, a paragraph a point."""
    found = []
    for v in verdicts(worst):
        least, most = (1 - worst) * v.measured, (1 + worst) * v.measured
        bound = f"at least {v.low:,.0f}" if v.high == float("inf") else f"at most {v.high:,.0f}"
        found.append(
            f"{v.point}: {v.measured:,} us published, so {least:,.0f} to {most:,.0f} are within "
            f"the bar; {v.says}: {bound} us" + ("" if v.holds(worst) else " (DOES NOT HOLD)")
        )
    return found


def twins(clone: Path) -> bool:
    """Simulate the two texts of the twin; return whether they issue the same instructions."""
    runs = []
    problem = next(t.problem for t in timing_texts.texts() if t.problem.name == TWIN)
    for score in (4.955, 0.461):
        run = timing_texts.run_text(_text_of(clone / problem.file, score), problem)
        assert run.profile is not None
        print(f"score {score} ms: {len(run.trace.instructions):,} instructions, predicted "
              f"{run.profile.device_us:,.1f} us")  # fmt: skip
        runs.append([_content(instruction) for instruction in run.trace.instructions])
    return runs[0] == runs[1]


def _content(instruction: Instruction) -> tuple[Any, ...]:
    accesses = (*instruction.reads, *instruction.writes)
    places = [(a.memory, a.byte_start, a.pattern) for a in accesses]
    return instruction.op, instruction.engine, instruction.attributes, places


def _text_of(trace: Path, score: float) -> str:
    """Return the kernel's text that a published search recorded with a score in ms."""
    for found, text in timing_texts.candidates(trace):
        if found == score:
            return text
    raise SystemExit(f"{trace} has no kernel with score {score}")


def main() -> int:
    """Print the arithmetic; return 1 if an argument does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worst", type=float, default=0.25, help="the bar of a single point")
    parser.add_argument("--autocomp", type=Path, help="clone of ucb-bar/autocomp: compare the twin")
    options = parser.parse_args()
    print("\n".join(lines(options.worst)))
    same = True
    if options.autocomp:
        same = twins(options.autocomp)
        print("the same instructions in the same order" if same else "NOT the same instructions")
    return int(not (same and all(v.holds(options.worst) for v in verdicts(options.worst))))


if __name__ == "__main__":
    sys.exit(main())
