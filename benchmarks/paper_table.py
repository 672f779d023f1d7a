"""The low-rank paper's table for whole models: what MLP factors gain, and over which baseline.

    python benchmarks/paper_table.py [--models llama-3.2-1b,...] [--targets trn1] [--tps 1,4]
        [--batches 1,8,32] [--prompts 128,2048] [--ratios 0.05,0.1,0.2] [--workers 2]
        [--weights bfloat16,float8_e4m3] [--price simulated|closed_form] [--rows FILE.jsonl]
        [--markdown FILE.md]

A setting's ratios are lines of `--rows` (default benchmarks/data/paper_table.jsonl). A line holds
digests of the code that its figures depend on: a run computes what is missing or stale, and
`--markdown`, which writes the tables of the rows and computes nothing, marks what is stale. A
simulated row is shown before one of the closed form. Decode is predicted with 4,096 tokens in the
cache; other contexts differ in attention alone, whose price each row has. The baselines: our
strongest dense kernels, and a model whose dense MLP products are blocked as in AWS's NKI tutorial.
All simulated or computed, nothing measured.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import inspect
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from row_file import computed, read_rows

from nmm_compiler.codegen.code_digests import code_digests
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.prediction import predict as prediction
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
# Files of nmm_compiler/prediction that decide a figure.
PRICED = ("predict.py", "walk.py", "prices.py", "collectives.py", "tensor_parallel.py",
          "public_models.json")  # fmt: skip


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
    with mock.patch.object(prediction, "price", tutorial_price):
        return prediction.predict(model, target, **setting)


def times(made: ModelPrediction) -> dict[str, float]:
    """Return microseconds: the first token, a token, and the attention in it."""
    decode = made.phase("decode")
    assert decode is not None
    attention = decode.by("kind").get("attention", 0.0)
    return {"first": made.ttft_us, "token": decode.us, "attention": attention}


@functools.cache
def attention_us(model: str, target: str, context: int, **setting: Any) -> float:
    """Return the microseconds of attention in a decode of the whole model."""
    made = prediction.predict(model, target, prompt=128, context=context, **setting)
    return times(made)["attention"]


@functools.cache
def code(price: str) -> dict[str, str]:
    """Return digests of the code that a row depends on, by room."""
    package = Path(prediction.__file__).parent
    found = dict(code_digests())
    rooms = ["codegen", "kernels", "targets", *(["simulator"] if price == "simulated" else [])]
    files = [package / name for name in PRICED]
    files.append(Path(DENSE.rpartition(":")[0]))
    own = (tutorial_us, tutorial_price, times, rows_of)
    texts = [file.read_text(encoding="utf-8") for file in files]
    texts = [_meaning(text) if file.suffix == ".py" else text
             for file, text in zip(files, texts, strict=True)]  # fmt: skip
    texts += [_meaning(inspect.getsource(one)) for one in own]
    return {**{room: found[room][:8] for room in rooms},
            "prediction": hashlib.sha256("".join(texts).encode()).hexdigest()[:8]}  # fmt: skip


def _meaning(text: str) -> str:
    """Return what source does: without comments, layout and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        held = getattr(node, "body", None)
        if isinstance(held, list):
            node.body = [
                one
                for one in held  # type: ignore[attr-defined]
                if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
            ]
    return ast.dump(tree)


def is_stale(row: dict[str, Any]) -> bool:
    """Return whether code that a row depends on is another now."""
    return bool(row.get("code") != code(row["price"]))


def rows_of(job: tuple[dict[str, Any], tuple[float, ...]]) -> list[dict[str, Any]]:
    """Return the rows of one setting, one for each ratio; none where it cannot be predicted."""
    setting, ratios = job
    asked = {key: setting[key] for key in ("tp", "batch", "prompt", "price")}
    alike = {key: setting[key] for key in ("tp", "batch", "price")}
    model, target = setting["model"], setting["target"]
    made = []
    try:
        base = times(tutorial(model, target, context=CONTEXT, **asked))
        attention = {str(c): attention_us(model, target, c, **alike) for c in CONTEXTS}
        for ratio in ratios:
            low = prediction.predict(
                model, target, context=CONTEXT, ratio=ratio, include=["mlp"],
                weights=setting["weights"], **asked,
            )  # fmt: skip
            assert low.dense is not None
            made.append({
                **setting, "ratio": ratio, "low": times(low), "dense": times(low.dense),
                "tutorial": base, "attention": attention, "code": code(setting["price"]),
                "mlp": {name: layer_gains(low, name).get("mlp") for name in ("decode", "prefill")},
                "weight_limit": low.dense.memory.weight_bytes / low.memory.weight_bytes,
                "fits": low.memory.fits,
            })  # fmt: skip
    except NmmError as error:
        print(f"{setting}: {error}", file=sys.stderr)
    return made


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a row is of."""
    names = ("model", "target", "weights", "tp", "batch", "prompt", "price")
    return tuple(row[name] for name in names)


def shown_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each setting and ratio: not stale, then simulated, then the later one."""
    best: dict[tuple[Any, ...], tuple[tuple[bool, bool], dict[str, Any]]] = {}
    for row in rows:
        of = (*key(row)[:-1], row["ratio"])
        order = (not is_stale(row), row["price"] == "simulated")
        if of not in best or order >= best[of][0]:
            best[of] = order, row
    return [row for _, row in best.values()]


def compute(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Append the rows that are not there yet to the file."""
    done = {key(row) for row in rows if not is_stale(row)}
    grid = itertools.product(
        given.weights, given.tps, given.batches, given.targets, given.models, given.prompts
    )  # what people ask first comes first
    settings = [
        {"model": model, "target": target, "weights": weights, "tp": int(tp), "batch": int(batch),
         "prompt": int(prompt), "price": given.price}
        for weights, tp, batch, target, model, prompt in grid
        if weights == "bfloat16" or get(target).float8_kernels
    ]  # fmt: skip
    left = [one for one in settings if key(one) not in done]
    ratios = tuple(map(float, given.ratios))
    rows += computed(given.rows, [(one, ratios) for one in left], rows_of, given.workers)


INTRO = """# The low-rank paper's models

Written by `python benchmarks/paper_table.py --markdown docs/paper-table.md` from
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
computed: `make bench-paper` adds them. A core is one physical core. {marks}
"""


def cells(rows: list[dict[str, Any]], of: Callable[[dict[str, Any]], float | None]) -> str:
    """Return a gain of each ratio, in one cell."""
    found = [of(row) for row in sorted(rows, key=lambda row: float(row["ratio"]))]
    return " ".join("-" if gain is None else f"{gain:.2f}" for gain in found) or "-"


def token_gain(row: dict[str, Any], base: str, context: int) -> float:
    """Return the gain of a token at a context, over "dense" or "tutorial"."""
    attention = row["attention"][str(context)] - row["attention"][str(CONTEXT)]
    return float((row[base]["token"] + attention) / (row["low"]["token"] + attention))


def first_gain(row: dict[str, Any], base: str) -> float:
    """Return the gain of the first token."""
    return float(row[base]["first"] / row["low"]["first"])


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return a table for each target, with a row for each model, tensor-parallel degree and
    batch."""
    rows = shown_rows(rows)
    ratios = ", ".join(f"{ratio:g}" for ratio in sorted({row["ratio"] for row in rows}))
    marks = []
    if any(row["price"] == "closed_form" for row in rows):
        marks.append("Rows with * have kernels priced by the closed form; others are simulated.")
    if any(map(is_stale, rows)):
        marks.append("Rows with + were computed by earlier code.")
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
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
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


def _line(rows: list[dict[str, Any]]) -> str:
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
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    rows = read_rows(given.rows)
    if given.markdown is None:
        compute(given, rows)
    else:
        given.markdown.write_text(markdown(rows) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
