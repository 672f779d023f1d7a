"""`nmm demo`: the main job on a real model, every step checked.

SmolLM2-135M, a trained language model, gets the form of its weights that `nmm plan` names for the
target. A second process predicts the model in every form, and runs each kernel of the chosen one
from its source in the simulator, against float64. Text is Python's manual (`pydoc_data`, part of
every Python), cut by chapter into what calibrates a branch and what judges. Everything printed
comes from the run.
"""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import math
import multiprocessing
import random
import time
import warnings
from typing import Annotated, Any

import typer

from nmm_compiler.cli import models, values
from nmm_compiler.cli.endings import say
from nmm_compiler.errors import CacheWarning, ModelError
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.options import let_threads_sleep
from nmm_compiler.report.parts import Grid, Line, Part

_HELD_OUT_SHARE = 0.25
_LENGTH, _LEARNED, _JUDGED = 256, 16, 4
"""Tokens of a passage; passages that calibrate a branch, passages that judge."""


def demo(
    form: Annotated[
        str | None, typer.Option(metavar="FORM", help="of the weights; default: the best one")
    ] = None,
    target: values.Target = "trn2",
    as_json: values.Json = False,
) -> values.Answer:
    """Compress a real model, prove its kernels, and show what is gained and what is lost.

    It takes about a minute on two free cores, and some minutes more where a branch is fitted.

    Example: nmm demo --target trn3
    """
    from nmm_compiler.prediction.forms import DEFAULT, read_form

    started = time.monotonic()
    forms = {name: read_form(name) for name in (*DEFAULT, form or DEFAULT[0])}
    say(
        f"{models.LANGUAGE_MODEL} on {target}: about a minute on two free cores, and some minutes "
        "more if the best form has a branch, which is fitted to data"
    )
    let_threads_sleep()  # two processes share the cores
    dense = next(iter(forms))
    # Predictions need shapes only: a second process makes them while the model is loaded.
    spawn = multiprocessing.get_context("spawn")
    quiet = functools.partial(warnings.simplefilter, "ignore", CacheWarning)  # said here, too
    with (
        concurrent.futures.ProcessPoolExecutor(1, spawn, quiet) as beside,
        steps(f"loading {models.LANGUAGE_MODEL}") as step,
    ):
        plan = beside.submit(predicted_forms, models.LANGUAGE_MODEL, tuple(forms), target)
        from nmm_compiler.lowrank_models.apply import compress

        model, tokenizer = models.language_model()
        model = model.bfloat16()
        text, held_out = manual_split()
        judged = _passages(tokenizer, held_out, _JUDGED)
        step("judging the dense model")
        before = _perplexity(model, judged)

        step("predicting the model in each form of its weights")
        planned = plan.result()
        chosen = forms[form or planned.best_form(target) or dense]
        taken = next((p for p in planned.predictions if p.form == chosen.name), None)
        if taken is None:
            raise ModelError(next(one.reason for one in planned.refused))
        kernels = dict.fromkeys(line.spec for line in taken.lines if line.spec is not None)
        proving = beside.submit(proofs_of, list(kernels), target)

        step(f"making the weights {chosen.name}")
        done = "all weights stay as they are"
        if chosen.keywords():
            branch = chosen.rank or chosen.ratio is not None
            data = [{"input_ids": row[None]} for row in _passages(tokenizer, text, _LEARNED)]
            report = compress(
                model, **chosen.keywords(), target=target, allow_slower=True,
                calibration=data if branch else None,
            )  # fmt: skip
            left = 1 - report.achieved_ratio
            done = f"{len(report.compressed)} weight matrices became {chosen.name}, {left:.2f} of "\
                "their bytes"  # fmt: skip
        step("judging the quality")
        after = _perplexity(model, judged)
        step(f"proving the kernels of {chosen.name}")
        proofs = proving.result()
    right = sum(proof.passed for proof in proofs)
    passed = right == len(proofs) > 0 and math.isfinite(after)  # no kernel fails it, too
    said = "every kernel passed its check" if passed else "a check FAILED"
    perplexities = {dense: f"{before:.2f}", chosen.name: f"{after:.2f}"}
    times = [f"{phase.name} ms" for phase in planned.predictions[0].phases]
    head = ("weights", "MiB", "perplexity", *times, "gain", "")
    rows = [
        (
            p.form,
            f"{p.memory.needed_bytes / 2**20:,.0f}",
            perplexities.get(p.form, "-"),
            *(f"{phase.us / 1e3:.2f}" for phase in p.phases),
            f"{planned.over_first(p):.2f}x",
            "taken" if p.form == chosen.name else "",
        )
        for p in planned.predictions
    ]
    parts: list[Part] = [
        Line(f"{models.LANGUAGE_MODEL}, a language model: {done}"),
        Line(f"{right} of the {len(proofs)} kernels that the times of {chosen.name} are made of "
             "agree with float64, run from their source in the simulator"),
        Grid.of(head, rows, right=head[1:-1]),
        Line(f"perplexity: measured here, of {judged.numel():,} tokens that calibrated nothing; "
             f"times: predicted for one core of {target}, batch 1; nmm plan does it for any model",
             "note"),
        *(Line(text, "headline") for text in planned.verdict()),
        Line(f"took {time.monotonic() - started:.0f} s; {said}"),
    ]  # fmt: skip
    figures = {
        "model": models.LANGUAGE_MODEL,
        "form": chosen.name,
        "perplexity": [before, after],
        "proofs": [proof.to_dict() for proof in proofs],
        "predictions": [one.to_dict() for one in planned.predictions],
        "verdict": planned.verdict(),
        "passed": passed,
    }
    return values.Answer(figures, parts, passed=passed)


def predicted_forms(name: str, forms: tuple[str, ...], target: str) -> Any:
    """Return the plan of a model in forms that its weights can take."""
    from nmm_compiler.prediction.plan import plan

    return plan(
        name, targets=[target], forms=forms, prompts=[_LENGTH], contexts=[2 * _LENGTH],
        change=False, jobs=1,
    )  # fmt: skip


def proofs_of(specs: list[Any], target: str) -> list[Any]:
    """Run the source of each kernel in the simulator; return how it compares with float64."""
    from nmm_compiler.codegen.build import build_kernel
    from nmm_compiler.codegen.check_against_float64 import prove

    return [prove(build_kernel(spec, target)) for spec in specs]


def _perplexity(model: Any, judged: Any) -> float:
    """Return the perplexity of a model over passages of one length.

    Its weights are those given, its arithmetic is float32: many CPUs have none of bfloat16.
    """
    wide = copy.deepcopy(model).float().requires_grad_(False)
    return math.exp(float(wide(input_ids=judged, labels=judged, use_cache=False).loss))


def _passages(tokenizer: Any, text: str, count: int) -> Any:
    """Return so many passages that are spread over a text."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    rows = ids[: len(ids) // _LENGTH * _LENGTH].reshape(-1, _LENGTH)
    return rows[:: len(rows) // count][:count]


def manual_split() -> tuple[str, str]:
    """Return (text to learn from, held-out text) of Python's manual; no chapter is in both."""
    from pydoc_data import topics as manual

    chapters: dict[str, str] = dict(manual.topics)
    names = sorted(chapters)
    random.Random(0).shuffle(names)
    held_out: list[str] = []
    while sum(map(len, held_out)) < _HELD_OUT_SHARE * sum(map(len, chapters.values())):
        held_out.append(chapters[names.pop()])
    return "\n\n".join(chapters[name] for name in names), "\n\n".join(held_out)
