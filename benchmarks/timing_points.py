"""Predicted against measured: the timing model on kernels that others measured on hardware.

Every point of `data/timing_points.toml` is a public measurement; its kernel is written anew under
`kernels/` from the published text, run through `simulate(mode="timing")`, and its prediction is
printed with the error. Points of the publishers from whom a constant was set, and points of others,
which are held out, have a table each. Further tables have texts that run as published
(timing_texts.py), split in the same way: from clones if they are given, else as recorded. Nothing
printed as predicted was measured by us. Run:

    python benchmarks/timing_points.py [--only TEXT] [--jobs 2] [--write]
        [--autocomp CLONE] [--accelopt CLONE] [--kda CLONE]
    python benchmarks/timing_points.py --constants

`--write` records all predictions in `data/timing_record.json`, and the errors of what is held out
where `profile.error_band` reads them. The exit code is of what is held out, points and texts: 0 if
it keeps every bar, or misses them by no more than is recorded; else 1 if it keeps them without what
contradicts other published figures (data/timing_conflicts.toml), and 2 otherwise. A kernel that
nobody could predict from its text is still one missed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import timing_texts
import typer
from timing_hash import constants_hash
from timing_texts import RECORD, TABLES, Point, Result, points, texts

from nmm_compiler import targets
from nmm_compiler.simulator.timing import evidence
from nmm_compiler.simulator.timing.evidence import CLASSES, HELD_OUT, ErrorBand
from nmm_compiler.simulator.timing.profile import Profile

BARS = {"mean": 0.10, "worst": 0.25, "vector": 0.15}


def _scalar_in_flight(profile: Profile) -> float:
    line = profile.timeline
    return sum(
        line.end[held.index] - held.start for held in line.held("engine") if held.row == "scalar"
    )


def _gigabytes_per_second(profile: Profile) -> float:
    moved = profile.hbm_read_bytes + profile.hbm_write_bytes
    return moved / profile.engine_busy_us["dma"] / 1e3


FIGURES: dict[str, Callable[[Profile], float]] = {
    "device us": lambda profile: profile.device_us,
    "TensorE active us": lambda profile: profile.engine_busy_us["tensor"],
    "ScalarE instructions us": _scalar_in_flight,
    "GB/s moved": _gigabytes_per_second,
}


def predict(point: Point) -> Result:
    """Simulate a point."""
    profile = timing_texts.simulated(point).profile
    return Result(point, FIGURES[point.figure](profile), point.kind)


def recorded(chosen: Iterable[Point]) -> list[Result]:
    """Return what was recorded for points and texts, of those with today's constants."""
    known = timing_texts.recorded()
    rows = [(point, known[point.name]) for point in chosen if point.name in known]
    return [
        Result(point, math.nan if row["predicted"] is None else row["predicted"], row["kind"])
        for point, row in rows
    ]  # fmt: skip


def text_results(
    chosen: Sequence[timing_texts.Text], clones: dict[str, Path], pool: Any
) -> list[Result]:
    """Return what is known of texts: run from clones, or recorded."""
    waiting = {
        text.name: pool.submit(timing_texts.ran, text, clones)
        for text in chosen if text.clone in clones
    }  # fmt: skip
    known = {result.point.name: result for result in recorded(chosen)}
    known |= {name: one.result() for name, one in waiting.items()}
    return [known[text.name] for text in chosen if text.name in known]


def errors(results: Iterable[Result], kind: str = "") -> list[float]:
    """Return the absolute errors of the counted points, of one class or of all."""
    return [abs(r.error) for r in results if r.point.counted and kind in ("", r.kind)]


def of_problems(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the counted texts of each problem."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.point.counted:
            groups.setdefault(result.point.problem, []).append(result)
    return groups


def middle(found: Sequence[float]) -> list[str]:
    """Return mean and median."""
    return [f"{statistics.mean(found):.1%}", f"{statistics.median(found):.1%}"]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def table(results: list[Result]) -> list[str]:
    """Return a table with a row for each point."""
    rows = []
    for one in results:
        point, shown = one.point, ("-", "-")
        unit = "GB/s" if point.figure.startswith("GB/s") else "us"
        if not math.isnan(one.predicted):
            shown = f"{one.predicted:,.5g} {unit}", f"{one.error:+.1%}"
        remark = point.remark if point.counted else f"not counted: {point.remark}"
        rows.append((point.name, one.kind or "-", point.target, point.source,
                     f"{point.measured:,.5g} {unit}", *shown, remark))  # fmt: skip
    heads = ("point", "class", "target", "published in", "measured", "predicted", "error", "")
    return markdown(heads, rows)


def scaled(group: Iterable[Result]) -> list[float]:
    """Return the errors of the texts of a kernel if all were predicted times one number, the best:
    how the texts differ from each other, which no constant mends."""
    ratios = [1 + one.error for one in group]
    return min(([abs(r / by - 1) for r in ratios] for by in ratios), key=statistics.mean)


def by_problem(results: list[Result]) -> list[str]:
    """Return a table with a row for the counted texts of each kernel."""
    rows = []
    for name, group in of_problems(results).items():
        found = errors(group)
        times = sorted(r.point.measured for r in group)
        span = " to ".join(f"{us:,.5g}" for us in dict.fromkeys((times[0], times[-1])))
        kinds = ", ".join(k for k in CLASSES if errors(group, k))
        worst = f"{max((r.error for r in group), key=abs):+.1%}"
        rows.append(
            (name, str(len(found)), span, *middle(found), worst, *middle(scaled(group))[:1], kinds)
        )
    heads = ("kernel", "texts", "measured, us", "mean error", "median", "worst",
             "mean, times one number", "class")  # fmt: skip
    return markdown(heads, rows)


def but_for_conflicts(results: Iterable[Result]) -> tuple[str, list[Result]]:
    """Return the results that contradict no other published figure, and how many others do."""
    names = timing_texts.contradicted(BARS["worst"])
    given = list(results)
    rest = [r for r in given if r.point.name not in names]
    return f"but for {len(given) - len(rest)} that contradict other figures", rest


def summary(results: list[Result]) -> list[str]:
    """Return the table of the errors of each table, and of all that is held out."""
    parts = {name: [r for r in results if r.table == name] for name in TABLES}
    held = [r for r in results if r.held_out]
    which, rest = but_for_conflicts(held)
    parts |= {"held out, both": held, f"held out, both {which}": rest}
    rows = []
    for name, part in parts.items():
        if found := errors(part):
            kinds = [errors(part, kind) for kind in CLASSES]
            cells = [f"{statistics.mean(e):.1%} of {len(e)}" if e else "-" for e in kinds]
            rows.append((name, str(len(found)), *middle(found), f"{max(found):.1%}", *cells))
    return markdown(("errors", "points", "mean", "median", "worst", *CLASSES), rows)


def verdict(results: list[Result]) -> tuple[list[str], int]:
    """Return lines on the bars, of all that is held out and without the conflicts; the exit code.

    results: points and texts of all tables.
    """
    held = [r for r in results if r.held_out]
    missed = {r.point.name for r in held if abs(r.error) > BARS["worst"]}
    without = timing_texts.contradicted(BARS["worst"]) & missed
    rest = [r for r in held if r.point.name not in without]
    ways = {"all": held, f"but for {len(without)} that contradict other figures": rest}
    lines, code = [], 0
    for which, part in ways.items():
        if not part:
            return [], 0
        found, vector = errors(part), errors(part, "vector")
        figures = {"mean": statistics.mean(found), "worst": max(found),
                   "vector": statistics.mean(vector or [0.0])}  # fmt: skip
        broken = {name for name, value in figures.items() if value > BARS[name]}
        code += bool(broken)
        said = (f"{name} {value:.1%} (bar {BARS[name]:.0%}{', broken' * (name in broken)})"
                for name, value in figures.items())  # fmt: skip
        lines.append(f"held out, {which} ({len(part)}): {', '.join(said)}")
    return [*lines, *timing_texts.arithmetic(BARS["worst"])] if without else lines[:1], code


def gains(results: list[Result]) -> str:
    """Return how far off predicted gains are, of each text over each other of its problem."""
    groups = of_problems(but_for_conflicts(results)[1]).values()
    both = (pair for group in groups for pair in itertools.combinations(group, 2))
    pairs = [abs((1 + one.error) / (1 + other.error) - 1) for one, other in both]
    if not pairs:
        return ""
    mean, median = middle(pairs)
    return (
        f"gains of a held-out text over another of its problem: {len(pairs)} pairs, off by {mean} "
        f"in the mean, {median} in the median"
    )


def bands(results: list[Result]) -> list[ErrorBand]:
    """Return the error bands of what is held out and contradicts no other published figure."""
    held = but_for_conflicts(r for r in results if r.held_out)[1]
    return [
        ErrorBand(kind=kind, points=len(e), mean=round(statistics.mean(e), 4),
                  worst=round(max(e), 4))
        for kind in CLASSES for e in [errors(held, kind)]
    ]  # fmt: skip


def constants() -> list[str]:
    """Return the constants as a table, with kind and source; trn2's unless it says."""
    records = {name: targets.get(name) for name in targets.names()}
    shared = set.intersection(*(set(record.sources) for record in records.values()))
    rows = []
    for name in (field.name for field in dataclasses.fields(targets.Target)):
        if name not in shared:
            continue
        cells = {}
        for target, record in records.items():
            value, kind = getattr(record, name), record.sources[name].kind[0].upper()
            cells[target] = f"{value:g} {kind}" if isinstance(value, float) else f"{value} {kind}"
        first, where = (records[target].sources[name].where for target in ("trn1", "trn2"))
        if first != where and cells["trn1"] != cells["trn2"]:
            where += f"; trn1: {first}"
        rows.append((f"`{name}`", *cells.values(), where))
    return markdown(("constant", *records, "source (trn2 unless said)"), rows)


def write(results: list[Result]) -> None:
    """Record the predictions, and the errors of what is held out."""
    rows = {
        r.point.name: {"predicted": None if math.isnan(r.predicted) else r.predicted,
                       "kind": r.kind}
        for r in sorted(results, key=lambda result: result.point.name)
    }  # fmt: skip
    found = [band.to_dict() for band in bands(results)]
    for file, part in ((RECORD, {"rows": rows}), (HELD_OUT, {"bands": found})):
        file.write_text(json.dumps({"constants": constants_hash(), **part}, indent=1) + "\n")


def main(
    only: str = "",
    write_record: Annotated[bool, typer.Option("--write")] = False,
    jobs: int = 1,
    autocomp: Path | None = None,
    accelopt: Path | None = None,
    kda: Path | None = None,
    show_constants: Annotated[bool, typer.Option("--constants")] = False,
) -> None:
    """Compare predictions with published measurements.

    Only points and texts whose name contains ONLY; AUTOCOMP, ACCELOPT, KDA: clones whose texts run,
    else they are as recorded.
    """
    if show_constants:
        print("\n".join(constants()))
        return
    clones = timing_texts.clones_of(autocomp, accelopt, kda)
    with ProcessPoolExecutor(jobs) as pool:
        results = []
        for result in pool.map(predict, (point for point in points() if only in point.name)):
            results.append(result)
            print(f"{result.point.name}: {result.error:+.1%}", file=sys.stderr, flush=True)
        chosen = [text for text in texts() if only in text.name]
        found = text_results(chosen, clones, pool)
        results += found
    old = sum(text.clone not in clones for text in chosen)
    if old:
        print(f"{old} texts not run, for no clone is given (--autocomp, --accelopt, --kda): "
              f"{len(chosen) - len(found)} left out, recorded with other constants")  # fmt: skip
    for name in TABLES:
        found = [result for result in results if result.table == name]
        shown = by_problem(found) + [""] if name.startswith("texts") else []
        print(f"\n{name}\n\n" + "\n".join(shown + table(found)) if found else f"\n{name}: none")
    print("\n" + "\n".join(summary(results)))
    if write_record:
        if len(results) < len(points()) + len(texts()):
            raise typer.BadParameter("--write needs all points and texts: give every clone")
        write(results)
    print(gains([r for r in results if r.table == TABLES[3]]))
    sentences, code = verdict(results)
    print("\n".join(sentences))
    known = evidence.bands()
    as_recorded = all(one.mean <= known[one.kind].mean + 0.001 for one in bands(results))
    if code and len(results) == len(points()) + len(texts()) and as_recorded:
        print("known misses: no class is predicted worse than its recorded errors")
        code = 0
    sys.exit(code)


if __name__ == "__main__":
    typer.run(main)
