"""Published kernels with measured times: points written anew, and texts that run as they are.

`data/timing_points.toml` has the points, whose kernels are under `kernels/`.
`data/timing_texts.toml` has the rules by which texts were chosen and a row a text; the texts are
others' and stay in their repositories (ucb-bar/autocomp, zhang677/AccelOpt,
Jerry2423/kda-for-trainium). timing_points.py runs them: `--autocomp CLONE --accelopt CLONE --kda
CLONE`. A text whose digest differs is refused by its name, and so is one whose run does not bear
out what its row says. What the last run predicted is in `data/timing_record.json`, and holds as
long as no constant has changed since.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import math
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timing_hash import constants_hash

from nmm_compiler import targets
from nmm_compiler.errors import NmmError
from nmm_compiler.simulator.run import ArraySpec, Simulation, simulate
from nmm_compiler.simulator.timing.evidence import kernel_class

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"
RECORD = DATA / "timing_record.json"
TABLES = ("constants", "held out", "texts that set laws", "texts as published")
"""What set constants and what is held out: points that are written anew, and texts."""
SEARCHED, PROFILED = "ucb-bar/autocomp", "zhang677/AccelOpt"
LOGGED = "Jerry2423/kda-for-trainium"
PUBLISHED_SPILLS = "spills in the published profile", "the log says that it spills"
# What the publisher's harnesses put before a text.
HEADER = """\
import math
import numpy as np
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import neuronxcc.nki.typing as nt
from neuronxcc.nki.language import par_dim
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement, as the data file writes it.

    shapes: of the arguments in order; one that is a number is the argument itself.
    """

    name: str
    kind: str
    target: str
    source: str
    kernel: str
    shapes: tuple[tuple[int, ...] | float, ...]
    measured: float
    dtype: str = "float32"
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    figure: str = "device us"
    counted: bool = True
    remark: str = ""

    @property
    def repository(self) -> str:
        """Who published it: the repository in brackets, or the source itself."""
        return self.source.rsplit("(", 1)[-1].rstrip(")")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(Point):
    """One text: its published time in us, and its digest; `kernel` is its function.

    remark: why it is not counted. published: where its time is. file, home: where the text is, if
    it is elsewhere. logged: the time in ms as the log has it, if it is not the measured one.
    """

    published: str
    digest: str
    file: str = ""
    home: str = ""
    logged: float = 0.0

    @property
    def problem(self) -> str:
        """What it computes, as other texts do."""
        return self.name.rsplit(", ", 1)[0]

    @property
    def clone(self) -> str:
        """The repository that has the text."""
        return self.home or self.repository


@functools.cache
def points() -> list[Point]:
    """Return the points of the data file, in its order."""
    rows = tomllib.loads((DATA / "timing_points.toml").read_text())["point"]
    return [Point(kind=row.pop("class"), **row) for row in rows]


@functools.cache
def texts() -> list[Text]:
    """Return the texts of the data file, in its order; a name has what tells texts apart."""
    data = tomllib.loads((DATA / "timing_texts.toml").read_text())
    problems = {row["name"]: row for row in data["problem"]}
    known, found = recorded(), []
    for row in data["text"]:
        problem = dict(problems[row.pop("problem")])
        last = f"text of {row['measured']:,.5g} us"
        if "file" in row:
            last = "baseline" if "home" in row else Path(row["file"]).stem
        name = f"{problem.pop('name')}, {last}"
        published, function = problem.pop("file"), problem.pop("function")
        source = f"{published.rsplit('/', 1)[0]} ({problem.pop('repository')})"
        kind = known.get(name, {"kind": ""})["kind"]
        found.append(Text(**{"target": "trn1", **problem}, **row, name=name, kind=kind,
                          source=source, kernel=function, published=published))  # fmt: skip
    return found


@functools.cache
def side(repository: str) -> str:
    """Return the set of a publisher's kernels: all of them set constants, or are held out."""
    givers = tomllib.loads((DATA / "timing_points.toml").read_text())["law_givers"]
    return "constants" if repository in givers else "held out"


def clones_of(autocomp: Path | None, accelopt: Path | None, kda: Path | None) -> dict[str, Path]:
    """Return the clones that are given, by repository."""
    given = {SEARCHED: autocomp, PROFILED: accelopt, LOGGED: kda}
    return {repository: clone for repository, clone in given.items() if clone}


@dataclasses.dataclass(frozen=True)
class Result:
    """A point or text and what was predicted for it, NaN where it does not run."""

    point: Point
    predicted: float
    kind: str

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted / self.point.measured - 1.0

    @property
    def table(self) -> str:
        """Which of TABLES has it."""
        held = side(self.point.repository) == "held out"
        return TABLES[held + 2 * isinstance(self.point, Text)]

    @property
    def held_out(self) -> bool:
        """Whether it counts among what no constant was set from."""
        return self.point.counted and side(self.point.repository) == "held out"


def digest(text: str) -> str:
    """Return a digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def candidates(trace: Path) -> list[tuple[float, str]]:
    """Return (score in ms, text) of each kernel that a published search recorded."""
    nodes = ast.walk(ast.parse(trace.read_text(encoding="utf-8")))
    calls = [{k.arg: k.value for k in one.keywords} for one in nodes if isinstance(one, ast.Call)]
    return [
        (ast.literal_eval(given["score"]), str(ast.literal_eval(given["code"])))
        for given in calls if "score" in given and "code" in given
    ]  # fmt: skip


def published(text: Text, clone: Path) -> str:
    """Return the text from a clone; SystemExit if it is not the one that the row means."""
    path = clone / (text.file or text.published)
    if text.clone == SEARCHED:
        found = [code for score, code in candidates(path) if round(score * 1e3, 3) == text.measured]
    else:
        found = [path.read_text(encoding="utf-8")]
    for code in found:
        if digest(code) == text.digest:
            return code
    others = ", ".join(map(digest, found)) or "none"
    raise SystemExit(f"{text.name}: digest {text.digest} expected; {path} has {others}")


def simulated(point: Point, clones: Mapping[str, Path] | None = None) -> Simulation:
    """Run the kernel of a point, or a text of a clone as it is, without data."""
    specs = [
        shape if isinstance(shape, float) else ArraySpec(tuple(shape), point.dtype)
        for shape in point.shapes
    ]
    with tempfile.TemporaryDirectory() as folder:
        kernel = HERE / "kernels" / point.kernel
        if isinstance(point, Text):
            path = Path(folder) / "published.py"
            header = "" if point.repository == PROFILED else HEADER
            path.write_text(header + published(point, clones[point.clone]), encoding="utf-8")
            kernel = Path(f"{path}:{point.kernel}")
        return simulate(
            kernel, *specs, target=point.target, mode="timing", strict=False, **point.arguments
        )


def ran(text: Text, clones: Mapping[str, Path]) -> Result:
    """Simulate a text; SystemExit if its row says something else of it than the run.

    That a publisher's log or profile has spills is not to be seen in a run.
    """
    try:
        profile = simulated(text, clones).profile
    except (NmmError, SyntaxError) as error:
        found, left_out = Result(text, math.nan, ""), f"{type(error).__name__}: {error}"
    else:
        found = Result(text, round(profile.device_us, 3), kernel_class(profile.engine_busy_us))
        spills = (line for line in profile.unmodelled if line.startswith("spills"))
        published = text.remark.endswith(PUBLISHED_SPILLS)
        left_out = text.remark if published else next(spills, "")
    if bool(left_out) == text.counted:
        raise SystemExit(
            f"{text.name}: timing_texts.toml says counted = {text.counted}; the run says "
            f"{left_out or 'nothing that leaves it out'}"
        )
    return found


@functools.cache
def recorded() -> dict[str, dict[str, Any]]:
    """Return what was predicted, by name; nothing if a constant has changed since."""
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    return dict(record["rows"]) if record.get("constants") == constants_hash() else {}


@dataclasses.dataclass(frozen=True)
class Conflict:
    """A held-out point whose published time contradicts other published figures.

    A prediction reads a kernel's text, and these figures say that the text does not decide the
    time. twin: the same instructions in the same order have another published time, so far away
    that no prediction is within the bar of both. floor: the text's instructions take longer at
    AWS's documented minimum. low to high: what they leave for the point, us.
    """

    point: str
    measured: float
    low: float
    high: float
    says: str

    def holds(self, worst: float) -> bool:
        """Whether the point cannot be within `worst` of a prediction that the figures leave."""
        return self.high < (1 - worst) * self.measured or self.low > (1 + worst) * self.measured


def conflicts(worst: float) -> list[Conflict]:
    """Return one verdict a conflict; `worst` is the error that the bar allows a point."""
    named, found = {point.name: point for point in (*points(), *texts())}, []
    for row in tomllib.loads((DATA / "timing_conflicts.toml").read_text())["conflict"]:
        point = named[row["point"]]
        if row["kind"] == "twin":
            low, high = (1 - worst) * row["twin_us"], (1 + worst) * row["twin_us"]
            says = f"the same instructions are published with {row['twin_us']:,} us"
        else:
            count, cycles = row["instructions"], row["cycles"]
            clock = targets.get(point.target).vector_clock_hz
            low, high = count * cycles / clock * 1e6, math.inf
            says = f"{count:,} instructions of {cycles} cycles at {clock / 1e9:g} GHz"
        found.append(Conflict(point.name, point.measured, low, high, says))
    return found


def contradicted(worst: float) -> frozenset[str]:
    """Return the names of the points whose conflict the arithmetic bears out."""
    return frozenset(v.point for v in conflicts(worst) if v.holds(worst))


def arithmetic(worst: float) -> list[str]:
    """Return the arithmetic of the conflicts, a paragraph a point."""
    return [
        f"{v.point}: {v.measured:,} us published; {v.says}, which leaves {v.low:,.0f} to "
        f"{v.high:,.0f} us{'' if v.holds(worst) else ' (DOES NOT HOLD)'}"
        for v in conflicts(worst)
    ]
