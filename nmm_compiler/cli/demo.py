"""`nmm demo`: the main job on a real model, every step checked.

SmolLM2-135M, a trained language model, is factorized and compiled with backend "nmm". Every kernel
that was built is run from its source in the simulator against float64, and the compiled model's
logits are compared with the uncompiled one's. A second process predicts the whole model in each
form of its weights meanwhile. Text is Python's manual (`pydoc_data`, part of every Python), cut by
chapter into what calibrates and what judges. Everything printed comes from the run.
"""

from __future__ import annotations

import concurrent.futures
import copy
import math
import multiprocessing
import random
import time
import warnings
from typing import Annotated, Any

from nmm_compiler.cli import models, values
from nmm_compiler.cli.show import Answer, show
from nmm_compiler.errors import CacheWarning
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.options import let_threads_sleep
from nmm_compiler.report.parts import Grid, Line, Part

_LAYERS = ["layers.1?.mlp", "layers.2[0-4].mlp"]
"""What becomes low-rank: the MLPs of 15 of 30 layers. The first and last layers cost more quality
than they gain time, and attention of this model is too narrow to gain."""
_HELD_OUT_SHARE = 0.25
_LENGTH, _LEARNED, _JUDGED = 256, 4, 3
"""Tokens of a passage; passages that calibrate, passages that judge."""


def demo(
    ratio: Annotated[float, values.option(values.share, "SHARE", "parameters removed")] = 0.08,
    target: values.Target = "trn2",
) -> Answer:
    """Compress a real model, compile it, prove every kernel, and show what is gained.

    It takes about a minute on two free cores.

    Example: nmm demo --ratio 0.2
    """
    started = time.monotonic()
    show(f"{models.LANGUAGE_MODEL} on {target}: about a minute on two free cores", stderr=True)
    let_threads_sleep()  # two processes share the cores
    # Predictions need shapes and ranks only: a second process makes them beside the rest.
    beside = concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=_quiet
    )
    try:
        figures = _run(ratio, target, beside)
    finally:
        beside.shutdown(wait=False, cancel_futures=True)
    passed = bool(figures["passed"])  # no kernel, a fallback, a proof or the outputs would fail it
    said = "every kernel and every output passed its check" if passed else "a check FAILED"
    parts = [*figures.pop("parts"), Line(f"took {time.monotonic() - started:.0f} s; {said}")]
    return Answer(figures, [parts], passed=passed)


def _run(ratio: float, target: str, beside: concurrent.futures.Executor) -> dict[str, Any]:
    """Run the flow; return its figures and, as "parts", its table."""
    import torch

    from nmm_compiler.codegen.check_against_float64 import prove
    from nmm_compiler.lowrank_models.apply import compress
    from nmm_compiler.lowrank_models.meta_copies import without_data
    from nmm_compiler.prices.ways import ways

    with steps(f"loading {models.LANGUAGE_MODEL}") as step:
        model, tokenizer = models.language_model()
        config = {**model.config.to_dict(), "name_or_path": models.LANGUAGE_MODEL}
        plan = beside.submit(predicted_forms, config, ratio, target)
        learned, judged = (_passages(tokenizer, text) for text in manual_split())

        step("calibrating and factorizing")
        chosen: dict[str, Any] = {"include": _LAYERS, "target": target, "allow_slower": True}
        # Equal layers get equal ranks, as in the prediction: one kernel serves all of them.
        ranks = compress(without_data(model), ratio, **chosen).ranks()
        small = copy.deepcopy(model)
        calibration = [{"input_ids": row[None]} for row in _spread(learned, _LEARNED)]
        report = compress(small, rank=ranks, method="two-sided", calibration=calibration, **chosen)

        step("compiling, building kernels")
        judged = _spread(judged, _JUDGED)
        torch._dynamo.reset()
        reports: list[Any] = []
        # inductor would take a minute for thirty layers
        options: Any = {"target": target, "report": reports.append, "inner": "eager"}
        served = copy.deepcopy(small).to(torch.bfloat16)
        compiled = torch.compile(served, backend="nmm", options=options)
        off, bound = agreement(small, served, compiled, judged[:1])
        kernels = [kernel for one in reports for kernel in one.built]
        proofs: list[Any] = []
        for kernel in kernels:
            step("proving kernels", len(proofs), len(kernels))
            proofs.append(prove(kernel))
        step("judging the quality")
        before, after = (_perplexity(one, judged) for one in (model, small))
        step("predicting the whole model")
        planned = plan.result()
    dense, low = (
        next(p for p in planned.predictions if p.form == form) for form in ("bf16", _form(ratio))
    )
    whole = bool(kernels) and all(one.fallback is None for one in reports)
    calls = [ways(kernel.spec, target, source="simulated") for kernel in kernels]
    right = sum(proof.passed for proof in proofs)
    parts: list[Part] = [
        Line(report.summary()),
        Grid.of(
            ("", "dense", "low rank", ""),
            [
                ("perplexity", f"{before:.1f}", f"{after:.1f}",
                 f"{judged.numel():,} tokens of held-out text"),
                *((f"{phase.name} ms", f"{old.us / 1e3:.2f}", f"{phase.us / 1e3:.2f}",
                   f"{old.us / phase.us:.2f}x, predicted")
                  for old, phase in zip(dense.phases, low.phases, strict=True)),
                *((f"{kernel.name} us", f"{call.dense:.1f}", f"{call.low:.1f}",
                   f"{call.gain:.2f}x, one call of {call.tokens} tokens, simulated")
                  for kernel, call in zip(kernels, calls, strict=True)
                  if call.dense is not None and call.gain is not None),
            ],
            right=("dense", "low rank"),
        ),
        Line(f"{right} of {len(proofs)} kernels agree with float64; logits differ from float32's "
             f"by {off:.2e}, permitted {bound:.2e}"),
        *(Line(text, "headline") for text in planned.verdict()),
    ]  # fmt: skip
    return {
        "model": models.LANGUAGE_MODEL,
        "ratio": ratio,
        "perplexity": [before, after],
        "agreement": {"difference": off, "tolerance": bound},
        "proofs": [proof.to_dict() for proof in proofs],
        "calls": [call.to_dict() for call in calls],
        "predictions": [dense.to_dict(), low.to_dict()],
        "verdict": planned.verdict(),
        "passed": off <= bound and whole and right == len(proofs),
        "parts": parts,
    }


def _form(ratio: float) -> str:
    return f"lowrank:{ratio:g}"


def _quiet() -> None:
    """Say nothing in the second process that this one says, too."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", CacheWarning)


def predicted_forms(config: dict[str, Any], ratio: float, target: str) -> Any:
    """Return the plan of the model in the forms that its weights can take."""
    from nmm_compiler.prediction.plan import plan

    return plan(
        config, targets=[target], forms=["bf16", "fp8", _form(ratio)], include=_LAYERS,
        prompts=[_LENGTH], contexts=[2 * _LENGTH], jobs=1,
    )  # fmt: skip


def agreement(exact: Any, rounded: Any, compiled: Any, ids: Any) -> tuple[float, float]:
    """Return how far the compiled model's logits are from float32's, and how far they may be.

    The compiled model may be twice as far from them as the uncompiled one in bfloat16: both round
    every product once, in different orders. The distance is the largest of a row, as a share of the
    exact row's length.
    """
    import torch

    with torch.no_grad():
        wanted, plain, got = (
            one(input_ids=ids, use_cache=False).logits.double()
            for one in (exact, rounded, compiled)
        )
    off, bound = (
        float(((rows - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()) for rows in (got, plain)
    )
    return off, 2 * bound


def _perplexity(model: Any, judged: Any) -> float:
    """Return the perplexity of a model, a passage a time."""
    import torch

    losses = []
    with torch.no_grad():
        for ids in judged:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
            losses.append(float(torch.nn.functional.cross_entropy(logits, ids[1:])))
    return math.exp(sum(losses) / len(losses))


def _passages(tokenizer: Any, text: str) -> Any:
    import torch

    ids = torch.tensor(tokenizer(text)["input_ids"])
    return ids[: len(ids) // _LENGTH * _LENGTH].reshape(-1, _LENGTH)


def _spread(rows: Any, count: int) -> Any:
    return rows[:: len(rows) // count][:count]


def manual_split(seed: int = 0) -> tuple[str, str]:
    """Return (text to learn from, held-out text) of Python's manual; no chapter is in both."""
    from pydoc_data import topics as manual

    chapters: dict[str, str] = dict(manual.topics)
    names = sorted(chapters)
    random.Random(seed).shuffle(names)
    held_out: list[str] = []
    while sum(map(len, held_out)) < _HELD_OUT_SHARE * sum(map(len, chapters.values())):
        held_out.append(chapters[names.pop()])
    return "\n\n".join(chapters[name] for name in names), "\n\n".join(held_out)
