"""Predicted against measured: the timing model on kernels that others measured on hardware.

Every point of `data/timing_points.toml` is a public measurement; its kernel is written anew under
`kernels/` from the published text, run through `simulate(mode="timing")`, and its prediction is
printed with the error. Points of the publishers from whom a constant was set, and points of others,
which are held out, have a table each. Further tables have texts that run as published
(timing_texts.py), split in the same way: from clones if they are given, else as recorded. Nothing
printed as predicted was measured by us. Run:

    python benchmarks/timing_points.py [--only TEXT] [--set NAME] [--write]
        [--autocomp CLONE] [--accelopt CLONE] [--kda CLONE]
    python benchmarks/timing_points.py --constants

The exit code is of what is held out, points and texts: 0 if it keeps every bar, 1 if it keeps them
only without what contradicts other published figures (timing_conflicts.py), and 2 otherwise. A
kernel that nobody could predict from its text is still one missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import re
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import timing_conflicts
import timing_texts
from timing_hash import constants_hash

from nmm_compiler import targets
from nmm_compiler.simulator.run import ArraySpec, Simulation, simulate
from nmm_compiler.simulator.timing.evidence import CLASSES, HELD_OUT, ErrorBand
from nmm_compiler.simulator.timing.profile import Profile

HERE = Path(__file__).resolve().parent
DATA = HERE / "data" / "timing_points.toml"
PAGE = HERE / "data" / "timing_tables.md"
SETS = ("constants", "held out")
TEXTS, LAWS = "texts as published", "texts that set laws"
_ENGINES = {"tensor": "TensorE busy, theirs / ours", "vector": "VectorE", "scalar": "ScalarE"}
BARS = {"mean": 0.10, "worst": 0.25, "vector": 0.15}


def _busy(engine: str) -> Callable[[Profile], float]:
    return lambda profile: profile.engine_busy_us[engine]


def _in_flight(engine: str) -> Callable[[Profile], float]:
    def total(profile: Profile) -> float:
        line = profile.timeline
        return sum(
            line.end[index] - line.start[index]
            for index, instruction in enumerate(line.trace.instructions)
            if line.placed.get(index, instruction.engine) == engine
        )

    return total


def _moved(profile: Profile) -> float:
    return float(profile.hbm_read_bytes + profile.hbm_write_bytes)


FIGURES: dict[str, Callable[[Profile], float]] = {
    "device us": lambda profile: profile.device_us,
    "TensorE active us": _busy("tensor"),
    "VectorE active us": _busy("vector"),
    "ScalarE active us": _busy("scalar"),
    "ScalarE instructions us": _in_flight("scalar"),
    "DMA active us": _busy("dma"),
    "DMA packet time us": lambda profile: profile.dma_engine_busy_us,
    "GB moved": lambda profile: _moved(profile) / 1e9,
    "GB/s moved": lambda profile: _moved(profile) / profile.engine_busy_us["dma"] / 1e3,
}


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement, as the data file writes it."""

    name: str
    set: str
    kind: str
    target: str
    source: str
    kernel: str
    shapes: tuple[tuple[int, ...], ...]
    measured: float
    dtype: str = "float32"
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    figure: str = "device us"
    counted: bool = True
    remark: str = ""
    more: tuple[tuple[str, float], ...] = ()

    @property
    def unit(self) -> str:
        """The unit of `measured`."""
        return "GB/s" if self.figure.startswith("GB/s") else "us"


@dataclasses.dataclass(frozen=True)
class Result:
    """A point and what was predicted for it."""

    point: Point
    predicted: float
    more: tuple[tuple[str, float, float], ...]
    instructions: int
    seconds: float
    shares: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted / self.point.measured - 1.0


def points() -> list[Point]:
    """Return the points of the data file, in its order."""
    rows = tomllib.loads(DATA.read_text())["point"]
    return [Point(kind=row.pop("class"), set=side(row["source"]), **row) for row in rows]


def publisher(source: str) -> str:
    """Return who published: the repository in brackets, or the source itself."""
    return source.rsplit("(", 1)[-1].rstrip(")")


@functools.cache
def side(source: str) -> str:
    """Return the set of a publisher's kernels: all of them set constants, or are held out."""
    givers = tomllib.loads(DATA.read_text())["law_givers"]
    return "constants" if publisher(source) in givers else "held out"


def simulated(point: Point) -> Simulation:
    """Run the kernel of a point without data."""
    specs = [ArraySpec(tuple(shape), point.dtype) for shape in point.shapes]
    return simulate(
        str(HERE / "kernels" / point.kernel), *specs, target=point.target, mode="timing",
        strict=False, **point.arguments,
    )  # fmt: skip


def predict(point: Point) -> Result:
    """Simulate a point."""
    before = time.process_time()
    run = simulated(point)
    assert run.profile is not None
    return Result(
        point,
        FIGURES[point.figure](run.profile),
        tuple((what, found, FIGURES[what](run.profile)) for what, found in point.more),
        len(run.trace.instructions),
        time.process_time() - before,
    )


def text_results(
    texts: list[timing_texts.Text], clones: dict[str, Path], pool: Any
) -> list[Result]:
    """Return the texts of which something is known; predicted is NaN where one does not run."""
    found = timing_texts.results(texts, clones, pool)
    return [
        Result(_as_point(text, one.kind), math.nan if one.predicted is None else one.predicted, (),
               one.instructions, one.seconds, one.shares)
        for text in texts if (one := found.get(text.name))
    ]  # fmt: skip


def _table_of(text: timing_texts.Text) -> str:
    return TEXTS if side(text.problem.repository) == "held out" else LAWS


def _as_point(text: timing_texts.Text, kind: str) -> Point:
    problem = text.problem
    return Point(
        name=text.name, set=_table_of(text), kind=kind or "-",
        target=problem.target, source=text.source, kernel=text.digest, shapes=problem.shapes,
        measured=text.measured, dtype=problem.dtype, counted=text.counted, remark=text.remark,
    )  # fmt: skip


def errors(results: Iterable[Result], kind: str = "") -> list[float]:
    """Return the absolute errors of the counted points, of one class or of all."""
    return [abs(r.error) for r in results if r.point.counted and kind in ("", r.point.kind)]


def row(result: Result) -> str:
    """Return a point's line of the table."""
    point = result.point
    remark = point.remark if point.counted else f"not counted: {point.remark}"
    ran = not math.isnan(result.predicted)
    predicted = f"{result.predicted:,.5g} {point.unit} | {result.error:+.1%}" if ran else "- | -"
    return (
        f"| {point.name} | {point.kind} | {point.target} | {point.source} | "
        f"{point.measured:,.5g} {point.unit} | {predicted} | {remark} |"
    )


def table(results: list[Result]) -> list[str]:
    """Return the table of one set of points, with its means by class below."""
    lines = [
        "| point | class | target | published in | measured | predicted | error |  |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | --- |",
        *(row(result) for result in results),
        "",
    ]
    lines += ["| class | points | mean error | worst |", "| --- | ---: | ---: | ---: |"]
    for kind in (*CLASSES, ""):
        found = errors(results, kind)
        if found:
            mean, worst = sum(found) / len(found), max(found)
            lines.append(f"| {kind or 'all'} | {len(found)} | {mean:.1%} | {worst:.1%} |")
    return lines


def by_problem(results: list[Result]) -> list[str]:
    """Return a table with a row for the texts of each kernel, and a list of those far off.

    The last columns: median of the busy time of each engine by the log, over ours.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.point.name.rsplit(", ", 1)[0], []).append(result)
    lines = [
        "| kernel | texts | measured, us | mean error | median | worst | class | "
        + " | ".join(_ENGINES.values())
        + " |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |" + " ---: |" * len(_ENGINES),
    ]
    for name, group in groups.items():
        counted = [r for r in group if r.point.counted]
        found = errors(counted)
        if not found:
            continue
        worst = max(counted, key=lambda r: abs(r.error)).error
        times = sorted(r.point.measured for r in counted)
        span = f"{times[0]:,.5g}" + (f" to {times[-1]:,.5g}" if times[1:] else "")
        kinds = ", ".join(k for k in CLASSES if errors(counted, k))
        busy = [[r.shares[engine] for r in counted if engine in r.shares] for engine in _ENGINES]
        cells = [f"{statistics.median(b):.2f}" if b else "-" for b in busy]
        lines.append(
            f"| {name} | {len(found)} | {span} | {statistics.mean(found):.1%} | "
            f"{statistics.median(found):.1%} | {worst:+.1%} | {kinds} | {' | '.join(cells)} |"
        )
    far = [f"{r.point.name} {r.error:+.0%}" for r in results
           if r.point.counted and abs(r.error) > BARS["worst"]]  # fmt: skip
    out = [f"{r.point.name} ({r.point.remark})" for r in results if not r.point.counted]
    for what, names in ((f"More than {BARS['worst']:.0%} off", far), ("Not counted", out)):
        if names:
            lines += ["", f"{what}: {'; '.join(names)}."]
    return lines


def counters(results: list[Result]) -> list[str]:
    """Return the table of further counters."""
    lines = [
        "| further counters of these runs | counter | measured | predicted | error |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for result in results:
        for what, found, value in result.more:
            lines.append(
                f"| {result.point.name} | {what} | {found:,.5g} | {value:,.5g} | "
                f"{value / found - 1:+.1%} |"
            )
    return lines


def held_out_figures(results: list[Result], without: frozenset[str]) -> dict[str, float]:
    """Return the errors that have a bar, of the held-out points but for those named `without`."""
    held = [r for r in results if r.point.name not in without]
    vector, found = errors(held, "vector"), errors(held)
    return {
        "mean": sum(found) / len(found),
        "worst": max(found),
        "vector": sum(vector) / len(vector) if vector else 0.0,
    }


def verdict(results: list[Result]) -> tuple[list[str], int]:
    """Return lines on the bars, of all that is held out and without the conflicts; the exit code.

    results: points and texts of all tables.
    """
    held = [r for r in results if r.point.set in ("held out", TEXTS) and r.point.counted]
    missed = {r.point.name for r in held if abs(r.error) > BARS["worst"]}
    without = timing_conflicts.contradicted(BARS["worst"]) & missed
    if not {r.point.name for r in held} - without:
        return [], 0
    lines, code = [], 2
    for names in (without, frozenset[str]()):
        found = held_out_figures(held, names)
        broken = {name for name, value in found.items() if value > BARS[name]}
        code -= not broken
        which = f"but for {len(names)} that contradict other figures" if names else "all"
        lines.insert(
            0,
            f"held out, {which} ({sum(r.point.name not in names for r in held)}): "
            + ", ".join(
                f"{name} {value:.1%} (bar {BARS[name]:.0%}{', broken' if name in broken else ''})"
                for name, value in found.items()
            ),
        )
    return [*lines, *timing_conflicts.lines(BARS["worst"])] if without else lines[:1], code


def summary(held: list[Result], texts: list[Result]) -> list[str]:
    """Return the table of the errors of the held-out points, of the texts, and of both."""
    both = [*held, *texts]
    conflicts = {r.point.name for r in both} & timing_conflicts.contradicted(BARS["worst"])
    parts = {
        "points, written anew": held,
        TEXTS: texts,
        "both": both,
    }
    if conflicts:
        rest = [r for r in both if r.point.name not in conflicts]
        parts[f"both but for {len(conflicts)} that contradict other figures"] = rest
    lines = [
        f"| held out | points | mean error | median | worst | {' | '.join(CLASSES)} |",
        "| --- |" + " ---: |" * (4 + len(CLASSES)),
    ]
    for name, part in parts.items():
        found = errors(part)
        if not found:
            continue
        kinds = [errors(part, kind) for kind in CLASSES]
        cells = [f"{statistics.mean(e):.1%} of {len(e)}" if e else "-" for e in kinds]
        lines.append(
            f"| {name} | {len(found)} | {statistics.mean(found):.1%} | "
            f"{statistics.median(found):.1%} | {max(found):.1%} | {' | '.join(cells)} |"
        )
    return lines


def gains(results: list[Result]) -> str:
    """Return how far off predicted gains are, of each text over each other of its problem."""
    conflicts = timing_conflicts.contradicted(BARS["worst"])
    groups: dict[str, list[float]] = {}
    for result in results:
        if result.point.counted and result.point.name not in conflicts:
            problem = result.point.name.rsplit(", ", 1)[0]
            groups.setdefault(problem, []).append(1.0 + result.error)
    both = (pair for group in groups.values() for pair in itertools.combinations(group, 2))
    pairs = [abs(one / other - 1) for one, other in both]
    if not pairs:
        return ""
    return (
        f"gains of a held-out text over another of its problem: {len(pairs)} pairs, off by "
        f"{statistics.mean(pairs):.1%} in the mean, {statistics.median(pairs):.1%} in the median"
    )


def bands(results: list[Result]) -> list[ErrorBand]:
    """Return the error bands of what is held out and contradicts no other published figure."""
    conflicts = timing_conflicts.contradicted(BARS["worst"])
    held = [r for r in results if r.point.set in ("held out", TEXTS)
            and r.point.name not in conflicts]  # fmt: skip
    found = {kind: errors(held, kind) for kind in CLASSES}
    return [
        ErrorBand(kind=kind, points=len(e), mean=sum(e) / len(e), worst=max(e))
        for kind, e in found.items()
    ]


def rewrite(text: str, section: str, lines: list[str]) -> str:
    """Return the page with the lines between the two marks of `section` replaced."""
    marks = f"<!-- {section} -->", f"<!-- end of {section} -->"
    pattern = re.compile(re.escape(marks[0]) + ".*?" + re.escape(marks[1]), re.S)
    if not pattern.search(text):
        raise SystemExit(f"{PAGE} has no marks {marks[0]} ... {marks[1]}")
    return pattern.sub(lambda _: "\n".join((marks[0], *lines, marks[1])), text, count=1)


def constants() -> str:
    """Return the constants as a Markdown table, with kind and source; trn2's unless it says."""
    names = targets.names()
    lines = [f"| constant | {' | '.join(names)} | source (trn2 unless said) |"]
    lines.append("| --- " * (len(names) + 2) + "|")
    records = [targets.get(name) for name in names]
    for field in dataclasses.fields(targets.Target):
        sources = [record.sources.get(field.name) for record in records]
        if None in sources:
            continue
        cells = []
        for record, source in zip(records, sources, strict=True):
            value = getattr(record, field.name)
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            cells.append(f"{shown} {source.kind[0].upper()}")
        where = sources[names.index("trn2")].where
        first = sources[0].where
        if first != where and cells[0] != cells[names.index("trn2")]:
            where += f"; trn1: {first}"
        lines.append(f"| `{field.name}` | {' | '.join(cells)} | {where} |")
    return "\n".join(lines)


def _texts(options: argparse.Namespace, pool: Any) -> list[Result]:
    """Return the chosen texts' results; say what is recorded and what is left out."""
    chosen = [
        text for text in timing_texts.texts()
        if options.only in text.name
        and options.set in ("", _table_of(text))
    ]  # fmt: skip
    given = {timing_texts.SEARCHED: options.autocomp, timing_texts.PROFILED: options.accelopt,
             timing_texts.LOGGED: options.kda}  # fmt: skip
    clones = {repository: clone for repository, clone in given.items() if clone}
    results = text_results(chosen, clones, pool)
    old = sum(text.repository not in clones for text in chosen)
    if old and len(results) == len(chosen):
        print(f"{old} texts as recorded with these constants, not run: no clone is given")
    elif old:
        print(f"{len(chosen) - len(results)} texts left out: recorded with other constants, and no "
              "clone is given (--autocomp, --accelopt, --kda)")  # fmt: skip
    return results


def _write(results: list[Result], tables: dict[str, list[str]]) -> None:
    """Put the tables into the page and record the errors that they show."""
    page = PAGE.read_text()
    for name, lines in tables.items():
        page = rewrite(page, f"points: {name}", lines)
    PAGE.write_text(page)
    record = {
        "constants": constants_hash(),
        "bands": [
            {k: round(v, 4) if isinstance(v, float) else v for k, v in band.to_dict().items()}
            for band in bands(results)
        ],
    }
    HELD_OUT.write_text(json.dumps(record, indent=1) + "\n")
    texts = {r.point.name: r for r in results if r.point.set in (TEXTS, LAWS)}
    if len(texts) == len(timing_texts.texts()):
        timing_texts.write_record(
            {name: r.predicted for name, r in texts.items()},
            {name: r.point.kind.strip("-") for name, r in texts.items()},
            {name: r.shares for name, r in texts.items() if r.shares},
        )


def main() -> int:
    """Print the tables and the bars; return the exit code that the module's docstring states."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="points whose name contains this text")
    parser.add_argument("--set", default="", choices=("", *SETS, TEXTS, LAWS), help="one table")
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    parser.add_argument("--jobs", type=int, default=1, help="processes that simulate")
    parser.add_argument("--autocomp", type=Path, help="clone of ucb-bar/autocomp: run its texts")
    parser.add_argument("--accelopt", type=Path, help="clone of zhang677/AccelOpt: run its texts")
    parser.add_argument("--kda", type=Path, help="clone of kda-for-trainium: run its texts")
    parser.add_argument("--constants", action="store_true", help="print the constants and stop")
    options = parser.parse_args()
    if options.constants:
        print(constants())
        return 0
    if options.write and (options.only or options.set):
        parser.error("--write needs all points: leave --only and --set out")
    chosen_points = [
        point for point in points() if options.only in point.name and options.set in ("", point.set)
    ]
    results = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for result in pool.map(predict, chosen_points):
            results.append(result)
            print(row(result), file=sys.stderr, flush=True)
        texts = _texts(options, pool)
    held = [result for result in results if result.point.set == "held out"]
    tables = {}
    for name in SETS:
        chosen = [result for result in results if result.point.set == name]
        if not chosen:
            continue
        tables[name] = table(chosen)
        if name == "held out":
            tables[name] += ["", f"Printed with the constants of hash `{constants_hash()}`."]
    kept = [r for r in texts if r.point.set == TEXTS]
    if texts:
        old, new = ([r for r in kept if r.point.target == target] for target in ("trn1", "trn2"))
        tables[TEXTS] = [
            *table(old), "", *by_problem(new), "", *summary(held, kept), "",
            f"Printed with the constants of hash `{constants_hash()}`.",
        ]  # fmt: skip
        tables[LAWS] = by_problem([r for r in texts if r.point.set == LAWS])
    for name, lines in tables.items():
        print(f"\nPoints: {name}\n\n" + "\n".join(lines))
    if texts:
        print("\nEvery text on trn2\n\n" + "\n".join(
            row(r) for r in texts if r.point.target == "trn2"
        ))  # fmt: skip
    tables["counters"] = counters(results)
    print("\n" + "\n".join(tables["counters"]))
    if options.write:
        if len(texts) < len(timing_texts.texts()):
            parser.error("--write needs all texts: give every clone")
        _write([*results, *texts], tables)
    instructions = sum(r.instructions for r in (*results, *texts))
    seconds = sum(r.seconds for r in (*results, *texts))
    if seconds:
        print(
            f"\n{instructions:,} instructions in {seconds:.1f} s of one core: "
            f"{instructions / seconds:,.0f} per second"
        )
    print(gains(kept))
    sentences, code = verdict([*results, *kept])
    print("\n".join(sentences))
    return code


if __name__ == "__main__":
    sys.exit(main())
