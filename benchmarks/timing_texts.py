"""Kernels whose published texts are timed as they are: found in clones, told by digest, simulated.

`data/timing_texts.toml` has the rules by which they were chosen and a row a text; the texts are
others' and stay in their repositories (ucb-bar/autocomp, zhang677/AccelOpt,
Jerry2423/kda-for-trainium). timing_points.py runs them: `--autocomp CLONE --accelopt CLONE --kda
CLONE`. A text whose digest differs is refused by its name, and so is one whose run does not bear
out what its row says. Without a clone, what the last run predicted is taken from
`data/timing_texts.json`, as long as no constant has changed since.
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import functools
import hashlib
import json
import math
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from timing_hash import constants_hash

from nmm_compiler.errors import NmmError
from nmm_compiler.simulator.run import ArraySpec, Simulation, simulate
from nmm_compiler.simulator.timing.evidence import kernel_class
from nmm_compiler.simulator.timing.profile import Profile

DATA = Path(__file__).resolve().parent / "data" / "timing_texts.toml"
RECORD = DATA.with_suffix(".json")
SEARCHED, PROFILED = "ucb-bar/autocomp", "zhang677/AccelOpt"
LOGGED = "Jerry2423/kda-for-trainium"
PROFILES = "experiments/full_complete_local/profile_results.csv"
_BUSY = 50.0  # us: of an engine that works less, a rounded share says little
_SHARES = {
    "tensor": ("PE_pct", "tensor_engine_active_time_percent"),
    "vector": ("Vec_pct",),
    "scalar": ("Scl_pct", "scalar_engine_active_pct"),
}
SPILLED = 0.01  # of the HBM traffic that a published profile has
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


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the texts of one file or folder compute, and on what.

    repository, file: where their times are published. shapes: of the arguments in order; one that
    is a number is the argument itself.
    """

    name: str
    repository: str
    file: str
    function: str
    shapes: tuple[tuple[int, ...] | float, ...]
    dtype: str = "float32"
    target: str = "trn1"
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Text:
    """One text: its published time in us, and its digest.

    remark: why it is not counted. file, home: where the text is, if not where its problem says.
    logged: the time in ms as the log has it, if it is not the measured one.
    """

    problem: Problem
    measured: float
    digest: str
    counted: bool = True
    remark: str = ""
    file: str = ""
    home: str = ""
    logged: float = 0.0

    @property
    def name(self) -> str:
        """The problem, and the file or the published time, which tell texts apart."""
        if self.file:
            return f"{self.problem.name}, {'baseline' if self.home else Path(self.file).stem}"
        return f"{self.problem.name}, text of {self.measured:,.5g} us"

    @property
    def source(self) -> str:
        """Where it is published."""
        return f"{self.problem.file.rsplit('/', 1)[0]} ({self.problem.repository})"

    @property
    def repository(self) -> str:
        """The repository that has the text."""
        return self.home or self.problem.repository


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a run says: device us, class, why it does not count, if so; and its own size.

    kind: the class of its profile, "" if it does not run.
    shares: by engine, its busy time by the log over the busy time of the run.
    """

    predicted: float | None
    kind: str
    left_out: str = ""
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    instructions: int = 0
    seconds: float = 0.0


def texts() -> list[Text]:
    """Return the texts of the data file, in its order."""
    data = tomllib.loads(DATA.read_text())
    problems = {row["name"]: Problem(**row) for row in data["problem"]}
    return [Text(problems[row.pop("problem")], **row) for row in data["text"]]


def digest(text: str) -> str:
    """Return a digest of the syntax tree, or of the characters of a text that has none."""
    try:
        shape = repr(_shape(ast.parse(text)))
    except SyntaxError:
        shape = text
    return hashlib.sha256(shape.encode()).hexdigest()[:12]


def _shape(node: Any) -> Any:
    """Return a tree without positions; what is empty is left out, as Python's versions differ."""
    if isinstance(node, list):
        return [_shape(one) for one in node]
    if not isinstance(node, ast.AST):
        return node
    fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    return type(node).__name__, [(name, _shape(value)) for name, value in fields]


def candidates(trace: Path) -> list[tuple[float, str]]:
    """Return (score in ms, text) of each kernel that a published search recorded."""
    found = []
    for node in ast.walk(ast.parse(trace.read_text(encoding="utf-8"))):
        fields = {k.arg: k.value for k in node.keywords} if isinstance(node, ast.Call) else {}
        if "score" in fields and "code" in fields:
            score = ast.literal_eval(fields["score"])
            found.append((score, str(ast.literal_eval(fields["code"]))))
    return found


def published(text: Text, clone: Path) -> str:
    """Return the text from a clone; SystemExit if it is not the one that the row means."""
    path = clone / (text.file or text.problem.file)
    if text.repository == SEARCHED:
        found = [code for score, code in candidates(path) if round(score * 1e3, 3) == text.measured]
    else:
        found = [path.read_text(encoding="utf-8")]
    for code in found:
        if digest(code) == text.digest:
            return code
    others = ", ".join(map(digest, found)) or "none"
    raise SystemExit(f"{text.name}: digest {text.digest} expected; {path} has {others}")


def run_text(code: str, problem: Problem) -> Simulation:
    """Simulate a text as it is, without data."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "published.py"
        header = "" if problem.repository == PROFILED else HEADER
        path.write_text(header + code, encoding="utf-8")
        specs = [
            shape if isinstance(shape, float) else ArraySpec(tuple(shape), problem.dtype)
            for shape in problem.shapes
        ]
        return simulate(
            f"{path}:{problem.function}", *specs, target=problem.target, mode="timing",
            strict=False, **problem.arguments,
        )  # fmt: skip


def ran(text: Text, clones: Mapping[str, Path]) -> Ran:
    """Simulate a text; SystemExit if its row says something else of it than the run or the log."""
    clone = clones[text.repository]
    code, before = published(text, clone), time.process_time()
    logged = {}
    if text.logged and text.problem.repository in clones:
        logged = _row_of_the_log(text, clones[text.problem.repository])
    try:
        run = run_text(code, text.problem)
    except (NmmError, SyntaxError) as error:
        found = Ran(None, "", f"{type(error).__name__}: {error}")
    else:
        assert run.profile is not None
        if text.problem.repository == PROFILED:
            left_out = _spilled_as_published(text, clone / PROFILES)
        else:
            left_out = _has_no_room(run.profile) or _log_says(text)
        kind = kernel_class(run.profile.engine_busy_us)
        size, seconds = len(run.trace.instructions), time.process_time() - before
        shares = {
            engine: round(share * text.measured / run.profile.engine_busy_us[engine], 3)
            for engine, share in logged.items() if run.profile.engine_busy_us[engine] > _BUSY
        }  # fmt: skip
        found = Ran(round(run.profile.device_us, 3), kind, left_out, shares, size, seconds)
    if bool(found.left_out) == text.counted:
        raise SystemExit(
            f"{text.name}: {DATA.name} says counted = {text.counted}; the run says "
            f"{found.left_out or 'nothing that leaves it out'}"
        )
    return found


def _spilled_as_published(text: Text, profiles: Path) -> str:
    """Return what a published profile spilled, "" if little; SystemExit without the profile."""
    with profiles.open(encoding="utf-8", newline="") as file:
        name = Path(text.problem.file).name
        rows = [row for row in csv.DictReader(file) if Path(row["kernel"]).name == name]
    for profile in (json.loads(row["profile"]) for row in rows):
        if round(profile["latency"] * 1e3, 1) == text.measured:
            moved = profile["hbm_read_bytes"] + profile["hbm_write_bytes"]
            share = (profile["spill_save_bytes"] + profile["spill_reload_bytes"]) / moved
            return f"{share:.0%} of the HBM traffic are spills" if share > SPILLED else ""
    raise SystemExit(f"{text.name}: {profiles} has no such time for {name}")


def _row_of_the_log(text: Text, clone: Path) -> dict[str, float]:
    """Return the busy share of each engine; SystemExit if the log has another time for a text.

    The last row of a file that has a time counts.
    """
    rows: list[dict[str, Any]]
    if text.home:
        found = json.loads((clone / "baselines.json").read_text(encoding="utf-8")).values()
        rows = [r for r in found if r["kernel"] == Path(text.file).name]
        times = [r["baseline_latency_ms"] for r in rows]
    else:
        folder = clone / text.file.split("/runs/")[0]
        lines = (folder / "candidates.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [
            r for r in (json.loads(line) for line in lines if line.strip())
            if r.get("latency_ms") and Path(r["candidate"].split()[0]).name == Path(text.file).name
        ]  # fmt: skip
        times = [r["latency_ms"] for r in rows]
    if not times or abs(times[-1] - text.logged) > 1e-9:
        raise SystemExit(f"{text.name}: {text.logged} ms expected; the log of {clone} has {times}")
    metrics = {}
    for row in rows:
        metrics |= row.get("metrics") or row.get("metrics_fast") or {}
    return {
        engine: metrics[name] / 100
        for engine, names in _SHARES.items() for name in names
        if isinstance(metrics.get(name), (int, float)) and metrics[name] > 0
    }  # fmt: skip


def _log_says(text: Text) -> str:
    return text.remark if text.remark.startswith("the log says") else ""


def _has_no_room(profile: Profile) -> str:
    """Return by what live tensors exceed SBUF or PSUM, "" if they fit."""
    banks = profile.timeline.target.psum_banks
    if profile.psum_peak_banks > banks:
        return f"spills: live tensors take {profile.psum_peak_banks} PSUM banks of {banks}"
    return next((line for line in profile.unmodelled if line.startswith("spills")), "")


def results(chosen: Iterable[Text], clones: Mapping[str, Path], pool: Any) -> dict[str, Ran]:
    """Return what is known of each text by its name: run, or else recorded with today's constants.

    clones: by repository; pool: an executor.
    """
    rows = list(chosen)
    waiting = {
        text.name: pool.submit(ran, text, clones) for text in rows if text.repository in clones
    }  # fmt: skip
    known, kinds, shares = recorded("predicted"), recorded("kinds"), recorded("shares")
    old = {
        t.name: Ran(known[t.name], kinds[t.name], shares=shares.get(t.name, {}))
        for t in rows if t.name in known
    }  # fmt: skip
    return old | {name: one.result() for name, one in waiting.items()}


@functools.cache
def recorded(what: str) -> dict[str, Any]:
    """Return one column of the record by name of text; none if a constant has changed since."""
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    same = record.get("constants") == constants_hash()
    return dict(record.get(what, {})) if same else {}


def write_record(
    predicted: Mapping[str, float],
    kinds: Mapping[str, str],
    shares: Mapping[str, dict[str, float]],
) -> None:
    """Record the predictions of all texts by name, NaN where one does not run, their classes, and
    the shares."""
    found = {k: None if math.isnan(us) else us for k, us in sorted(predicted.items())}
    record = {
        "constants": constants_hash(), "predicted": found, "kinds": dict(sorted(kinds.items())),
        "shares": dict(sorted(shares.items())),
    }  # fmt: skip
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
