"""The low-rank paper's table for whole models: what MLP factors gain, and over which baseline.

    python benchmarks/paper_table.py [--models llama-3.2-1b,...] [--targets trn1] [--tps 1,4]
        [--batches 1,8,32] [--prompts 128,2048] [--ratios 0.05,0.1,0.2] [--workers 2]
        [--weights bfloat16,float8_e4m3] [--price simulated|closed_form] [--subset]
        [--rows FILE.jsonl] [--check] [--markdown FILE.md]

A setting's ratios are lines of `--rows` (default benchmarks/data/paper_table.jsonl): a run computes
what is missing or stale. `--markdown`, which writes the tables of the rows and computes nothing,
marks stale lines; `--check` counts them. `--subset` leaves settings out but those that are kept
simulated: one sequence on one core, on four of trn2, and with fp8 on one core of trn2. A
simulated row is shown before one of the closed form. Decode is predicted with 4,096 tokens in the
cache; other contexts differ in attention alone, whose price each row has. The baselines: our
strongest dense kernels, and a model whose dense MLP products are blocked as in AWS's NKI tutorial.
All simulated or computed, nothing measured.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from row_file import Row, computed, is_stale, read_rows, version

from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.linear.specs import MatmulSpec
from nmm_compiler.prediction import predict as prediction
from nmm_compiler.prediction import prices
from nmm_compiler.prediction.model import ModelPrediction
from nmm_compiler.prediction.plan import layer_gains
from nmm_compiler.prediction.prices import Machine, Price, price
from nmm_compiler.prediction.walk import Piece
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.targets import get

MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b")
DENSE = f"{Path(__file__).parent / 'kernels_nki' / 'dense_blocked.py'}:dense_blocked"
ROWS = Path(__file__).parent / "data" / "paper_table.jsonl"
MOST_TOKENS = 512  # what is longer repeats it, as the tutorial's blocks do
CONTEXT = 4096
CONTEXTS = (512, 4096, 32768)


@functools.cache
def tutorial_us(m: int, k: int, n: int, target: str) -> float:
    """Return the simulated microseconds of one dense product as the tutorial blocks it."""
    if m > MOST_TOKENS:
        return m / MOST_TOKENS * tutorial_us(MOST_TOKENS, k, n, target)
    a, b = ArraySpec((k, m), "bfloat16"), ArraySpec((k, n), "bfloat16")
    profile = simulate(DENSE, a, b, target=target, mode="timing").profile
    assert profile is not None
    return float(profile.latency_us)


def tutorial_price(piece: Piece, machine: Machine) -> Price:
    """Return the price of a piece where dense MLP products are the tutorial's kernel."""
    if piece.kind != "kernel" or ".mlp" not in piece.module:
        return price(piece, machine)
    products: tuple[KernelSpec, ...] = tuple(
        one for spec in piece.ways[-1] for one in spec.as_products()[1]
    )
    us = 0.0
    for spec in products:
        assert isinstance(spec, MatmulSpec)
        us += tutorial_us(spec.m, spec.k, spec.n, machine.target.name)
    return Price(us, "simulated", "as the tutorial", len(products))


def tutorial(model: str, target: str, **setting: Any) -> ModelPrediction:
    """Return the dense model with the tutorial's MLP products."""
    with mock.patch.object(prices, "price", tutorial_price):
        return prediction.predict(model, target, **setting)


def times(made: ModelPrediction) -> dict[str, float]:
    """Return microseconds: the first token, a token, and the attention in it."""
    decode = made.phase("decode")
    assert decode is not None
    attention = decode.by("kind").get("attention", 0.0)
    found = {"first": made.ttft_us, "token": decode.us, "attention": attention}
    return {name: round(us, 2) for name, us in found.items()}


@functools.cache
def attention_us(model: str, target: str, context: int, **setting: Any) -> float:
    """Return the microseconds of attention in a decode of the whole model."""
    made = prediction.predict(model, target, prompt=128, context=context, **setting)
    return times(made)["attention"]


def rows_of(job: tuple[Row, list[float]]) -> list[Row]:
    """Return the rows of one setting, one for each ratio; none where it cannot be predicted."""
    setting, ratios = job
    asked = {key: setting[key] for key in ("tp", "batch", "prompt", "price")}
    alike = {key: setting[key] for key in ("tp", "batch", "price")}
    model, target = setting["model"], setting["target"]
    made = []
    try:
        blocked = times(tutorial(model, target, context=CONTEXT, **asked))
        attention = {str(c): attention_us(model, target, c, **alike) for c in CONTEXTS}
        for ratio in ratios:
            low = prediction.predict(
                model, target, context=CONTEXT, ratio=ratio, include=["mlp"],
                weights=setting["weights"], **asked,
            )  # fmt: skip
            assert low.dense is not None
            limit = low.dense.memory.weight_bytes / low.memory.weight_bytes
            made.append(setting | {
                "ratio": ratio, "low": times(low), "dense": times(low.dense), "tutorial": blocked,
                "attention": attention, "fits": low.memory.fits, "weight_limit": round(limit, 5),
                "mlp": {name: layer_gains(low, name).get("mlp") for name in ("decode", "prefill")},
                "code": version(),
            })  # fmt: skip
    except NmmError as error:
        print(f"{setting}: {error}", file=sys.stderr)
    return made


def rows_of_group(jobs: list[tuple[Row, list[float]]]) -> list[Row]:
    """Return the rows of settings of one model, which is traced once for all targets."""
    return [row for job in jobs for row in rows_of(job)]


def key(row: Row) -> tuple[Any, ...]:
    """Return what a row is of."""
    names = ("model", "target", "weights", "tp", "batch", "prompt", "price")
    return tuple(row[name] for name in names)


def shown_rows(rows: list[Row]) -> list[Row]:
    """Return one row for each setting and ratio: not stale, then simulated, then the later one."""
    best: dict[tuple[Any, ...], tuple[tuple[bool, bool], dict[str, Any]]] = {}
    for row in rows:
        of = (*key(row)[:-1], row["ratio"])
        order = (not is_stale(row), row["price"] == "simulated")
        if of not in best or order >= best[of][0]:
            best[of] = order, row
    return [row for _, row in best.values()]


def settings_of(given: argparse.Namespace) -> list[Row]:
    """Return the settings that are asked for; what people ask first comes first."""
    grid = itertools.product(
        given.weights, given.tps, given.batches, given.targets, given.models, given.prompts
    )
    made = [
        {"model": model, "target": target, "weights": weights, "tp": int(tp), "batch": int(batch),
         "prompt": int(prompt), "price": given.price}
        for weights, tp, batch, target, model, prompt in grid
        if weights == "bfloat16" or get(target).float8_kernels
    ]  # fmt: skip
    return [one for one in made if not given.subset or in_subset(one)]


def in_subset(setting: Row) -> bool:
    """Return whether the setting is kept simulated: the others would take hours."""
    if setting["batch"] > 1:
        return False
    if setting["tp"] == 1 and setting["weights"] == "bfloat16":
        return True
    other = (setting["tp"], setting["weights"])
    return setting["target"] == "trn2" and other in ((4, "bfloat16"), (1, "float8_e4m3"))


def compute(given: argparse.Namespace, rows: list[Row]) -> None:
    """Append the rows that are missing or stale to the file."""
    there = {(*key(row), row["ratio"]) for row in rows if not is_stale(row)}
    groups: dict[tuple[Any, ...], list[tuple[Row, list[float]]]] = {}
    for setting in settings_of(given):
        left = [r for r in map(float, given.ratios) if (*key(setting), r) not in there]
        if left:
            traced = tuple(setting[name] for name in ("model", "tp", "batch"))
            groups.setdefault(traced, []).append((setting, left))
    rows += computed(given.rows, list(groups.values()), rows_of_group, given.workers)


def check(given: argparse.Namespace, rows: list[Row]) -> None:
    """Print how many rows are current, stale and missing."""
    there = {(*key(row), row["ratio"]): is_stale(row) for row in rows}
    settings = settings_of(given)
    asked = [there.get((*key(one), float(ratio))) for one in settings for ratio in given.ratios]
    counts = {"current": False, "stale": True, "missing": None}
    print(", ".join(f"{asked.count(state)} {name}" for name, state in counts.items()))


INTRO = """# The low-rank paper's models

Written by `python benchmarks/paper_table.py --markdown FILE.md` from
`benchmarks/data/paper_table.jsonl`. Low-rank MLPs (the paper compresses these) against dense
models. Simulated and computed, nothing measured. In each cell: ratio {ratios}.

The paper claims 1.66x end to end in its version 3 (four models, ratio 0.2) and 1.21x in version 4
(six models, ratio 0.05), kernels 1.35x in the mean, all on one trn1 core against products blocked
as in AWS's matrix multiplication tutorial. So there are two baselines: "over dense" is our
strongest dense kernels, "over tutorial" the same model with dense MLP products as that tutorial
blocks them. "weights" is what a token would gain if it took the time of its weight bytes alone: a
larger gain over the tutorial is the baseline's, not low rank's.

Decode is predicted with 4,096 tokens in the cache; 512 and 32,768 differ in attention alone, by
our attention kernel. First tokens do not depend on the context, tokens not on the prompt.
"fp8" has every matrix of the low-rank model and of "over dense" in float8_e4m3, with a scale for
each output channel, as our kernels multiply it on trn2 and trn3 (x is rounded to fp8, too); its
tutorial baseline stays in bfloat16. trn1 has no such kernels. Settings that a table lacks were not
computed: `make bench-paper` adds them. A core is one physical core.
{marks}

Four cores (tp 4) cut a model as docs/latency.md says, and low rank pays less there.
"""


def cells(rows: list[Row], of: Callable[[dict[str, Any]], float | None]) -> str:
    """Return a gain of each ratio, in one cell."""
    found = [of(row) for row in sorted(rows, key=lambda row: float(row["ratio"]))]
    return " ".join("-" if gain is None else f"{gain:.2f}" for gain in found) or "-"


def token_gain(row: Row, base: str, context: int) -> float:
    """Return the gain of a token at a context, over "dense" or "tutorial"."""
    attention = row["attention"][str(context)] - row["attention"][str(CONTEXT)]
    return float((row[base]["token"] + attention) / (row["low"]["token"] + attention))


def first_gain(row: Row, base: str) -> float:
    """Return the gain of the first token."""
    return float(row[base]["first"] / row["low"]["first"])


def markdown(rows: list[Row]) -> str:
    """Return a table for each target, with a row for each model, tensor-parallel degree and
    batch."""
    rows = shown_rows(rows)
    ratios = ", ".join(f"{ratio:g}" for ratio in sorted({row["ratio"] for row in rows}))
    marks = []
    if any(row["price"] == "closed_form" for row in rows):
        marks.append("Rows with * have kernels priced by the closed form; others are simulated.")
    if any(map(is_stale, rows)):
        marks.append("Rows with + are stale: other code than today's made them.")
    text = [INTRO.format(ratios=ratios, marks="\n".join(marks))]
    head = ["model", "tp", "batch", "MLP, token", "MLP, prompt 2048",
            *(f"token over dense, context {c}" for c in CONTEXTS),
            "first over dense, prompt 128", "prompt 2048",
            "token over tutorial, 4096", "first over tutorial, 2048", "weights"]  # fmt: skip
    for target in sorted({row["target"] for row in rows}):
        text += [
            f"## {target}\n",
            f"| {' | '.join(head)} |",
            "| --- |" + " ---: |" * (len(head) - 1),
        ]
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            if row["target"] == target:
                order = (
                    row["weights"], row["tp"], row["batch"], MODELS.index(row["model"]),
                    row["price"],
                )  # fmt: skip
                groups.setdefault(order, []).append(row)
        text += [_line(found) for _, found in sorted(groups.items())]
        text.append("")
    return "\n".join(text)


def _line(rows: list[Row]) -> str:
    one = rows[0]
    at = {prompt: [row for row in rows if row["prompt"] == prompt] for prompt in (128, 2048)}
    some = at[2048] or at[128]
    star = "*" if one["price"] == "closed_form" else ""
    old = "+" if any(map(is_stale, rows)) else ""
    narrow = "" if one["weights"] == "bfloat16" else ", fp8"
    shown = [
        f"{one['model']}{narrow}{star}{old}", str(one["tp"]), str(one["batch"]),
        cells(some, lambda row: row["mlp"]["decode"]),
        cells(at[2048], lambda row: row["mlp"]["prefill"]),
        *(cells(some, functools.partial(token_gain, base="dense", context=c)) for c in CONTEXTS),
        *(cells(at[p], functools.partial(first_gain, base="dense")) for p in (128, 2048)),
        cells(some, functools.partial(token_gain, base="tutorial", context=CONTEXT)),
        cells(at[2048], functools.partial(first_gain, base="tutorial")),
        cells(some, lambda row: row["weight_limit"]),
    ]  # fmt: skip
    return f"| {' | '.join(shown)} |"


def main() -> int:
    """Compute rows, or write them as tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    lists = {"models": ",".join(MODELS), "targets": "trn1,trn2,trn3", "ratios": "0.05,0.1,0.2",
             "prompts": "128,2048", "batches": "1,8,32", "tps": "1,4",
             "weights": "bfloat16,float8_e4m3"}  # fmt: skip
    for name, default in lists.items():
        parser.add_argument(f"--{name}", default=default.split(","), type=lambda t: t.split(","))
    parser.add_argument("--price", choices=("simulated", "closed_form"), default="simulated")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--subset", action="store_true", help="what is kept simulated")
    parser.add_argument("--check", action="store_true", help="count current and stale rows")
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    rows = read_rows(given.rows)
    if given.check:
        check(given, rows)
    elif given.markdown is None:
        compute(given, rows)
    else:
        given.markdown.write_text(markdown(rows) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
