"""`nmm demo`: compresses and compiles a real model, and checks every step.

A trained sentence encoder is factorized and compiled with backend "nmm"; every kernel that was
built is run from its source in the simulator against float64, and the compiled model's embeddings
are compared with the uncompiled ones. Everything printed comes from the run.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nmm_compiler.cli import values
from nmm_compiler.cli.progress import Step, steps
from nmm_compiler.cli.show import show
from nmm_compiler.outputs import write_text
from nmm_compiler.records import Record
from nmm_compiler.report.parts import Grid, Line, Section

if TYPE_CHECKING:
    import torch

    from nmm_compiler.codegen.build import Kernel
    from nmm_compiler.codegen.check_against_float64 import Proof


@dataclass(frozen=True, kw_only=True)
class Agreement(Record):
    """Embeddings of the compiled model against the uncompiled one, in units of a unit vector."""

    difference: float
    tolerance: float
    cosine_to_original: float

    @property
    def passed(self) -> bool:
        """Whether the largest difference stays within the derived tolerance."""
        return self.difference <= self.tolerance


def demo(
    ratio: Annotated[list[float] | None, values.share_option("parameters removed")] = None,
    target: values.Target = "trn2",
    json: Annotated[Path | None, values.output_option(help_="also write the figures here")] = None,
) -> None:
    """Compress all-MiniLM-L6-v2, compile it, prove every kernel, and show what was gained.

    Example: nmm demo --ratio 0.2
    """
    import json as json_module

    from nmm_compiler.cli import models

    runs: list[dict[str, Any]] = []
    with steps() as step:
        step("loading the encoder")
        model, tokenizer = models.encoder()
        sentences = models.sentences()
        batch = dict(tokenizer(sentences, padding=True, return_tensors="pt"))
        original = embed(model, batch)
        for value in ratio or [0.1, 0.2]:
            runs.append(_one_ratio(step, model, batch, original, value, target))
    if json is not None:
        write_text(json, json_module.dumps(runs, indent=2))
        show(f"figures: {json}")
    if not all(run["passed"] for run in runs):  # a kernel, a proof, an embedding
        show("a check FAILED; see above", style="red")
        raise typer.Exit(1)
    show("every kernel and every embedding passed its check", style="green")


def _one_ratio(
    step: Step,
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    original: torch.Tensor,
    ratio: float,
    target: str,
) -> dict[str, Any]:
    """Run the whole flow at one compression ratio; print its tables; return its figures."""
    import torch

    from nmm_compiler.compress.apply import compress
    from nmm_compiler.prediction.predict import predict

    step(f"ratio {ratio}: factorizing")
    compressed = copy.deepcopy(model)
    compression = compress(compressed, ratio, progress=False)
    expected = embed(compressed, batch)

    step(f"ratio {ratio}: compiling, building kernels")
    torch._dynamo.reset()
    reports: list[Any] = []
    options: Any = {"target": target, "report": reports.append}
    compiled = torch.compile(compressed, backend="nmm", options=options)
    got = embed(compiled, batch)

    kernels = [kernel for report in reports for kernel in report.built]
    proofs, comparisons = [], []
    for done, kernel in enumerate(kernels):
        step(f"ratio {ratio}: proving", done, len(kernels))
        proofs.append(_prove(kernel))
        comparisons.append(_compare(kernel, target))
    step(f"ratio {ratio}: proved", len(kernels), len(kernels))

    agreement = Agreement(
        difference=float((got - expected).norm(dim=1).max()),
        tolerance=embedding_tolerance(compressed),
        cosine_to_original=float(torch.nn.functional.cosine_similarity(got, original).mean()),
    )
    sequences, length = batch["input_ids"].shape
    predicted = predict(compressed, target, dense=model, batch=sequences, prompt=length)
    quality = f"mean cosine to the original {agreement.cosine_to_original:.4f}"
    whole = bool(kernels) and all(report.fallback is None for report in reports)
    show([
        Line(f"\nratio {ratio} on {target}"),
        Line(compression.summary(), hang=0),
        Line(predicted.headline(quality), hang=0),
    ])  # fmt: skip
    for report in reports:
        show(f"\n{report}")
    show("")
    show([kernel_table(kernels, proofs, comparisons)])
    for kernel in kernels:
        show(f"source {kernel.path}")
    show([Line(
        f"embeddings: compiled against uncompiled differ by {agreement.difference:.2e} "
        f"(tolerance {agreement.tolerance:.2e}); mean cosine to the original model "
        f"{agreement.cosine_to_original:.4f}"
    )])  # fmt: skip
    return {
        "ratio": ratio,
        "prediction": predicted.to_dict(),
        "passed": agreement.passed and whole and all(proof.passed for proof in proofs),
        "agreement": agreement.to_dict(),
        "proofs": [proof.to_dict() for proof in proofs],
        "comparisons": [c.to_dict() for c in comparisons],
    }


def embed(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return unit embeddings [sentences, hidden]: the mean over real tokens, normalized."""
    import torch

    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def embedding_tolerance(model: torch.nn.Module) -> float:
    """Return how far two correct evaluations of `model` may differ, for unit embeddings.

    Each product of contraction length K, summed in another order, moves its result by about
    eps * sqrt(K) of its norm (the probabilistic bound of Higham and Mary, 2019). Each layer is
    normalized, so these relative errors add over the products; both evaluations have them.
    """
    import torch

    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    eps = torch.finfo(linears[0].weight.dtype).eps
    return float(2 * eps * sum(m.in_features**0.5 for m in linears))


def _prove(kernel: Kernel) -> Proof:
    from nmm_compiler.codegen.check_against_float64 import prove

    return prove(kernel)


def _compare(kernel: Kernel, target: str) -> Any:
    from nmm_compiler.prediction.comparison import compare

    return compare(kernel.spec, target)


def kernel_table(
    kernels: Sequence[Kernel], proofs: Sequence[Proof], comparisons: Sequence[Any]
) -> Section:
    """Return the table of kernels: blocks, proof, and predicted costs fused, separate and dense.

    Three lines a kernel. "of its bound" is the worst element's difference to float64, in percent of
    that element's bound; "gain" is that way's latency over the fused one's.
    """
    rows: list[tuple[str, ...]] = []
    for kernel, proof, c in zip(kernels, proofs, comparisons, strict=True):
        verdict = f"error at {100 * proof.norm_share:.0f} % of its limit"
        said = (kernel.spec.short(), kernel.schedule.short(),
                verdict if proof.passed else "FAILED the check")  # fmt: skip
        for text, way, cost in zip(said, ("fused", "separate", "dense"), c.ways(), strict=True):
            gain = f"{cost.latency_us / c.fused.latency_us:.2f}x"
            rows.append((f"{cost.latency_us:.1f}", f"{cost.hbm_bytes / 1e6:.2f}", gain, way, text))
    head = ("us", "MB", "gain", "way", "kernel, blocks, check against float64")
    return Section(
        "kernels (latency and HBM traffic are the simulator's predictions)",
        (Grid.of(head, rows, right=head[:3]),),
    )
