"""Predicted against published latencies of whole models, most of the runs held out.

The runs are in data/model_runs.json, each with its source. Those marked "calibrate" were looked at
when constants were chosen, those "held out" were not; that split was fixed first. Those "added"
came later, when all constants stood: of each model and instance of AWS's tables for Trainium and
Inferentia that was not there yet, the shortest and the longest run of one sequence. A run marked
"apart" is not one of dense production kernels and is only shown. The context is the length that a
program was compiled for where the source names one. "reading" says what a source's figure stands
for where it is not plainly a model's time per token. "stack" is what ran it: its
runs are predicted with it and judged apart; those without one are of Transformers-NeuronX and kiln,
by which `own` was set.

    python benchmarks/models.py [--only calibrate|"held out"|added|apart] [--json FILE]
        [--price closed_form]

`--price closed_form` takes the passes' closed form of every kernel instead of the simulator, in
seconds a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from nmm_compiler.prediction.meta_models import public_models
from nmm_compiler.prediction.model import ModelPrediction
from nmm_compiler.prediction.predict import predict
from nmm_compiler.prices.kernel import PRICES

RUNS = Path(__file__).parent / "data" / "model_runs.json"
TARGETS = {"inf2": "trn1"}  # the same NeuronCore-v2
# What the middle of the errors is, its bar, and that of the worst.
BARS = {"dense": ("mean", 0.20, 0.40), "experts": ("median", 0.25, 0.50)}
JUDGED = ("held out", "added")  # nothing was chosen on them


def predicted(run: dict[str, Any], price: str = "simulated") -> ModelPrediction:
    """Return the prediction of a published run."""
    return predict(
        run["model"],
        TARGETS.get(run["hardware"], run["hardware"]),
        prompt=run["prompt"] or run["context"],
        context=run["context"],
        batch=run["batch"],
        tp=run["tp"],
        lnc=run["lnc"],
        weights=run["weights"],
        price=price,
        stack=run.get("stack", "own"),
    )


def has_experts(model: str) -> bool:
    """Return whether a public model has experts that an index chooses."""
    return "num_experts_per_tok" in public_models()[model]


def error(us: float | None, measured_ms: float | None) -> float | None:
    """Return the relative error, None where nothing was published."""
    return None if us is None or measured_ms is None else us / 1e3 / measured_ms - 1


def shown(value: float | None) -> str:
    """Return an error as a percentage."""
    return "-" if value is None else f"{100 * value:+.0f} %"


def main(arguments: list[str] | None = None) -> int:
    """Print one line a run and the bars; return 1 where runs that nothing was chosen on miss
    them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("calibrate", "held out", "added", "apart"))
    parser.add_argument("--price", choices=tuple(PRICES), default="simulated")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    rows = []
    head = f"{'use':10} {'model':15} {'on':5} {'tp':>3} {'batch':>5} {'context':>7}"
    print(
        f"{head} {'TPOT ms':>8} {'published':>9} {'error':>7} {'TTFT ms':>8} {'published':>9} error"
    )
    for run in json.loads(RUNS.read_text(encoding="utf-8")):
        if given.only not in (None, run["use"]):
            continue
        made = predicted(run, given.price)
        assert made.tpot_us is not None
        row = {
            **run,
            "predicted_tpot_ms": made.tpot_us / 1e3,
            "predicted_ttft_ms": made.ttft_us / 1e3,
            "tpot_error": error(made.tpot_us, run["tpot_ms"]),
            "ttft_error": error(made.ttft_us, run["ttft_ms"]) if run["prompt"] else None,
            "kinds_ms": {k: v / 1e3 for k, v in made.phases[-1].by("kind").items()},
        }
        rows.append(row)
        print(
            f"{run['use']:10} {run['model']:15} {run['hardware']:5} {run['tp']:3} "
            f"{run['batch']:5} {run['context']:7} {row['predicted_tpot_ms']:8.2f} "
            f"{run['tpot_ms']:9.2f} {shown(row['tpot_error']):>7} {row['predicted_ttft_ms']:8.1f} "
            f"{run['ttft_ms'] or 0:9.1f} {shown(row['ttft_error'])}",
            flush=True,
        )
    missed = False
    kinds: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        stack = "with experts" if has_experts(row["model"]) else f"stack {row.get('stack', 'own')}"
        kinds.setdefault((stack, row["use"]), []).append(abs(row["tpot_error"]))
    for (kind, use), errors in kinds.items():
        median, mean, worst = statistics.median(errors), statistics.mean(errors), max(errors)
        name, most, worst_bar = BARS["experts" if kind == "with experts" else "dense"]
        print(
            f"{kind}, {use}: decode median {median:.0%}, mean {mean:.0%}, worst {worst:.0%} of "
            f"{len(errors)} runs; bars of {name} and worst {most:.0%} and {worst_bar:.0%}"
        )
        middle = median if name == "median" else mean
        missed |= use in JUDGED and (middle > most or worst > worst_bar)
    if given.json is not None:
        given.json.write_text(json.dumps({"runs": rows}, indent=1))
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
