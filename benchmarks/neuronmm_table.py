"""The tables of `make bench-neuronmm`: rows of JSON in, ratios with mean, least and most out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from row_file import Row, is_stale

HOW = ("shipped", "tuned", "tutorial", "dense", "ours")
# What is divided by ours: the faster of these.
RATIOS = {
    "the strongest dense kernel": ("tutorial", "dense"),
    "the paper's kernel, tuned": ("tuned",),
    "the paper's kernel, its authors' fixed blocks": ("shipped",),
}
SHORT = ("over dense", "over tuned", "over shipped")
MARKS = ("<!-- rows -->", "<!-- end of rows -->")
Shape = tuple[str, str, int]


def ratios(us: dict[str, float]) -> list[float | None]:
    """Return latencies over ours, in the order of RATIOS; None where a kernel has no row."""
    return [
        min(us[how] for how in ways) / us["ours"]
        if "ours" in us and all(how in us for how in ways) else None
        for ways in RATIOS.values()
    ]  # fmt: skip


def lines(jobs: list[Any], rows: dict[str, Row]) -> Iterator[tuple[Shape, dict[str, float]]]:
    """Yield (shape, us of each way) of each shape with rows."""
    for shape in dict.fromkeys((job.model, job.part, job.m) for job in jobs):
        here = [job for job in jobs if (job.model, job.part, job.m) == shape and job.key in rows]
        us = {job.how: job.times * rows[job.key]["us"] for job in here if rows[job.key]["us"]}
        if us:
            yield shape, us


def summary(jobs: list[Any], rows: dict[str, Row]) -> list[tuple[str, list[float]]]:
    """Return each ratio's name and its values over the shapes that have all of them."""
    found: list[tuple[str, list[float]]] = [(name, []) for name in RATIOS]
    for _, us in lines(jobs, rows):
        whole = [value for value in ratios(us) if value is not None]
        for (_, values), value in zip(
            found, whole if len(whole) == len(found) else (), strict=False
        ):
            values.append(value)
    return found


def _cells(us: dict[str, float]) -> list[str]:
    times = [f"{us[how]:,.1f}" if how in us else "-" for how in HOW]
    return times + ["-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios(us)]


def checked(jobs: list[Any], rows: dict[str, Row]) -> None:
    """Print how many figures of each column are current, stale and missing."""
    for how in HOW:
        keys = {job.key for job in jobs if job.how == how}
        stale = [is_stale(rows[key]) for key in keys & rows.keys()]
        print(
            f"{how:8} {stale.count(False):3} current, {stale.count(True):3} stale, "
            f"{len(keys) - len(stale):3} missing"
        )


def markdown(jobs: list[Any], rows: dict[str, Row]) -> str:
    """Return the two tables of the page."""
    text = ["| over | mean | least | most | shapes |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, values in summary(jobs, rows):
        figures = (sum(values) / len(values), min(values), max(values))
        text.append(f"| {name} | {' | '.join(f'{v:.2f}x' for v in figures)} | {len(values)} |")
    text += ["", f"| model | part | tokens | {' | '.join((*HOW, *SHORT))} |",
             "| --- | --- |" + " ---: |" * (1 + len(HOW) + len(SHORT))]  # fmt: skip
    for (model, part, m), us in lines(jobs, rows):
        if None not in ratios(us):
            text.append(f"| {model} | {part} | {m:,} | {' | '.join(_cells(us))} |")
    return "\n".join(text)


def written(page: Path, jobs: list[Any], rows: dict[str, Row]) -> None:
    """Write the tables into a page, between its two marks."""
    before, _, rest = page.read_text("utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    tables = f"{MARKS[0]}\n\n{markdown(jobs, rows)}\n\n{MARKS[1]}"
    page.write_text(f"{before}{tables}{after}", encoding="utf-8")
