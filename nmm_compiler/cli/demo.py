"""`nmm demo`: the main job on a real model, every step checked.

A trained language model is factorized and compiled with backend "nmm"; every kernel that was built
is run from its source in the simulator against float64, and the compiled model's outputs are
compared with the uncompiled one's. Then the whole model's latency is predicted, dense and low-rank,
and a plan shows what a larger model gains. Everything printed comes from the run.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nmm_compiler.cli import values
from nmm_compiler.cli.show import show, show_json
from nmm_compiler.errors import CacheWarning
from nmm_compiler.lowrank_models.progress import Step, steps
from nmm_compiler.options import cache_dir, let_threads_sleep
from nmm_compiler.report.parts import Grid, Line, Section

if TYPE_CHECKING:
    from nmm_compiler.cli.demo_models import Subject
    from nmm_compiler.codegen.build import Kernel
    from nmm_compiler.codegen.check_against_float64 import Proof

_PLANNED, _RATIOS = "llama-3.2-1b", (0.1, 0.2)
"""The larger model of the plan, and ratios beside those that were asked for."""


def demo(
    ratio: Annotated[
        list[float] | None, values.option(values.share, "SHARE", "parameters removed")
    ] = None,
    target: values.Target = "trn2",
    out: Annotated[
        Path | None,
        values.option(values.directory, "DIR", "save the models here, dense and low-rank"),
    ] = None,
    as_json: values.AsJson = False,
) -> None:
    """Compress a real model, compile it, prove every kernel, and show what is gained.

    Example: nmm demo --ratio 0.1
    """
    started = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        runs = _run(ratio or [0.1], target, out)
        show(f"took {time.monotonic() - started:.0f} s")
    if as_json:
        show_json(runs)
    if not all(run["passed"] for run in runs):  # no kernel, a fallback, a proof, the outputs
        show("a check FAILED; see above", style="red", stderr=as_json)
        raise typer.Exit(1)
    show("every kernel and every output passed its check", style="green", stderr=as_json)


def _run(ratios: Sequence[float], target: str, out: Path | None) -> list[dict[str, Any]]:
    """Run the flow at each ratio and print what comes of it; return the figures."""
    let_threads_sleep()  # two processes share the cores

    from nmm_compiler.cli import demo_models

    # Predictions need shapes and ranks only, proofs the kernels' sources: a second process has
    # them beside the rest.
    beside = concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=_quiet
    )
    with steps(f"loading {demo_models.Subject.name}") as step, beside:
        try:
            plan = beside.submit(_plan, _PLANNED, sorted({*ratios, *_RATIOS}), target)
            subject = demo_models.Subject()
            runs = [
                _one_ratio(step, subject, value, target, beside.submit, out) for value in ratios
            ]
            if out is not None:
                subject.save(subject.model, out / "dense")
                show(f"\nsaved: {out / 'dense'}")
                show(f"next: nmm eval {out / f'ratio-{ratios[0]}'} --tasks arc_easy")
            step(f"planning {_PLANNED}")
            show(f"\nthe same on {_PLANNED}, from its shapes:\n{plan.result()}")
        except BaseException:
            beside.shutdown(wait=False, cancel_futures=True)
            raise
    return runs


def _quiet() -> None:
    """Say nothing in the second process that this one says, too."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", CacheWarning)


def _one_ratio(
    step: Step, subject: Subject, ratio: float, target: str, beside: Callable[..., Any],
    out: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Run the whole flow at one compression ratio; print its tables; return its figures.

    beside: `submit` of the executor that proves and predicts. out: where to save the model.
    """
    import torch

    from nmm_compiler.lowrank_models.apply import compress
    from nmm_compiler.prices.ways import ways

    step(f"ratio {ratio}: calibrating and factorizing")
    compressed = copy.deepcopy(subject.model)
    tokens = subject.workload["batch"] * subject.workload["prompt"]
    compression = compress(
        compressed, ratio, include=list(subject.include), calibration=subject.calibration,
        target=target, workload=tokens,
    )  # fmt: skip

    step(f"ratio {ratio}: compiling, building kernels")
    torch._dynamo.reset()
    reports: list[Any] = []
    # inductor would take a minute for thirty layers
    options: Any = {"target": target, "report": reports.append, "inner": "eager"}
    served = copy.deepcopy(compressed).to(subject.dtype)
    agreement = subject.agreement(compressed, torch.compile(served, backend="nmm", options=options))

    kernels = [kernel for report in reports for kernel in report.built]
    waiting = [beside(_prove, kernel.spec, target) for kernel in kernels]
    dtype = str(subject.dtype).removeprefix("torch.")
    asked = {"target": target, "rank": compression.ranks(), "dtype": dtype, **subject.workload}
    prediction = beside(_predict, subject.config(), asked)
    step(f"ratio {ratio}: judging the quality")
    quality = subject.quality(compressed)
    texts = {"dense": subject.written(subject.model), "compressed": subject.written(compressed)}
    step(f"ratio {ratio}: comparing")
    comparisons = [ways(kernel.spec, target, source="simulated") for kernel in kernels]
    proofs = []
    for done, proof in enumerate(waiting):
        step(f"ratio {ratio}: proving", done, len(kernels))
        proofs.append(proof.result())
    step(f"ratio {ratio}: predicting the whole model", len(kernels), len(kernels))
    predicted = prediction.result()
    show("")
    show([
        Line(f"{subject.name} at ratio {ratio} on {target}"),
        Line(compression.summary(), hang=0),
        Line(quality, hang=0),
        *(Line(f"{title}: {text}", hang=4) for title, text in texts.items()),
    ])  # fmt: skip
    for report in reports:
        show(f"\n{report}")
    difference, tolerance = agreement["difference"], agreement["tolerance"]
    show("")
    show([
        kernel_table(kernels, proofs, comparisons),
        Line(f"their sources: nmm cache list ENTRY names the file; {cache_dir()}"),
        Line(
            f"logits: compiled against uncompiled differ by {difference:.2e} "
            f"(tolerance {tolerance:.2e})"
        ),
        Line(predicted.headline(quality), "headline"),
    ])  # fmt: skip
    if out is not None:
        subject.save(compressed, out / f"ratio-{ratio}")
        show(f"\nsaved: {out / f'ratio-{ratio}'}")
    whole = bool(kernels) and all(report.fallback is None for report in reports)
    return {
        "model": subject.name,
        "ratio": ratio,
        "quality": quality,
        "prediction": predicted.to_dict(),
        "passed": difference <= tolerance and whole and all(proof.passed for proof in proofs),
        "agreement": agreement,
        "proofs": [proof.to_dict() for proof in proofs],
        "comparisons": [c.to_dict() for c in comparisons],
    }


def _predict(config: dict[str, Any], asked: dict[str, Any]) -> Any:
    from nmm_compiler.prediction.predict import predict

    return predict(config, include=list(asked["rank"]), **asked)


def _plan(model: str, ratios: Sequence[float], target: str) -> str:
    """Return the plan of a larger model whose MLPs become low-rank."""
    from nmm_compiler.prediction.plan import plan

    forms = ["bf16", *(f"lowrank:{ratio:g}" for ratio in ratios)]
    return str(plan(model, targets=[target], forms=forms, include=["mlp"], jobs=1))


def _prove(spec: Any, target: str) -> Proof:
    """Run the kernel that was built for a spec; it comes from the kernel cache."""
    from nmm_compiler.codegen.build import build_kernel
    from nmm_compiler.codegen.check_against_float64 import prove

    return prove(build_kernel(spec, target))


def kernel_table(
    kernels: Sequence[Kernel], proofs: Sequence[Proof], comparisons: Sequence[Any]
) -> Section:
    """Return the table of kernels: blocks, proof, and what each takes fused, in smaller calls, and
    the fastest dense way.

    Three lines a kernel. "of its bound" is the worst element's difference to float64, in percent of
    that element's bound; "gain" is that way's latency over the fused one's.
    """
    rows: list[tuple[str, ...]] = []
    for kernel, proof, times in zip(kernels, proofs, comparisons, strict=True):
        verdict = f"error at {100 * proof.norm_share:.0f} % of its limit"
        said = (kernel.spec.short(), kernel.schedule.short(),
                verdict if proof.passed else "FAILED the check")  # fmt: skip
        for text, way in zip(said, ("fused", "separate", "dense"), strict=True):
            us = getattr(times, way)
            figures = ("-", "-") if us is None else (f"{us:.1f}", f"{us / times.fused:.2f}x")
            rows.append((*figures, way, text))
    head = ("us", "gain", "way", "kernel, blocks, check against float64")
    title = (
        "kernels (simulated; separate is the fastest smaller calls, dense the fastest dense way)"
    )
    return Section(title, (Grid.of(head, rows, right=head[:2]),))
