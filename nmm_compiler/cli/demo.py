"""`nmm demo`: the main job on a real model, every step checked.

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
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nmm_compiler.cli import values
from nmm_compiler.outputs import write_text
from nmm_compiler.records import Record

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

    console = Console(markup=False)
    runs: list[dict[str, Any]] = []
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        task = progress.add_task("loading the encoder", total=None)
        model, tokenizer = models.encoder()
        sentences = models.sentences()
        batch = dict(tokenizer(sentences, padding=True, return_tensors="pt"))
        original = embed(model, batch)
        progress.remove_task(task)
        for value in ratio or [0.1, 0.2]:
            runs.append(_one_ratio(progress, console, model, batch, original, value, target))
    if json is not None:
        write_text(json, json_module.dumps(runs, indent=2))
        console.print(f"figures: {json}")
    if not all(run["passed"] for run in runs):  # no kernel, a fallback, a proof, an embedding
        console.print("a check FAILED; see above", style="red")
        raise typer.Exit(1)
    console.print("every kernel and every embedding passed its check", style="green")


def _one_ratio(
    progress: Progress,
    console: Console,
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    original: torch.Tensor,
    ratio: float,
    target: str,
) -> dict[str, Any]:
    """Run the whole flow at one compression ratio; print its tables; return its figures."""
    import torch

    from nmm_compiler.compress.apply import compress

    task = progress.add_task(f"ratio {ratio}: factorizing", total=None)
    compressed = copy.deepcopy(model)
    compression = compress(compressed, ratio, progress=False)
    expected = embed(compressed, batch)

    progress.update(task, description=f"ratio {ratio}: compiling, building kernels")
    torch._dynamo.reset()
    reports: list[Any] = []
    options: Any = {"target": target, "report": reports.append}
    compiled = torch.compile(compressed, backend="nmm", options=options)
    got = embed(compiled, batch)

    kernels = [kernel for report in reports for kernel in report.built]
    progress.update(task, description=f"ratio {ratio}: proving", total=len(kernels), completed=0)
    proofs, comparisons = [], []
    for kernel in kernels:
        proofs.append(_prove(kernel))
        comparisons.append(_compare(kernel, target))
        progress.advance(task)
    progress.remove_task(task)

    agreement = Agreement(
        difference=float((got - expected).norm(dim=1).max()),
        tolerance=embedding_tolerance(compressed),
        cosine_to_original=float(torch.nn.functional.cosine_similarity(got, original).mean()),
    )
    whole = bool(kernels) and all(report.fallback is None for report in reports)
    console.rule(f"ratio {ratio} on {target}")
    console.print(compression.summary(), markup=False, soft_wrap=True)
    for report in reports:
        console.print(str(report), markup=False, soft_wrap=True)
    console.print(kernel_table(kernels, proofs, comparisons))
    for kernel in kernels:
        console.print(f"source {kernel.path}", markup=False, soft_wrap=True)
    console.print(
        f"embeddings: compiled against uncompiled differ by {agreement.difference:.2e} "
        f"(tolerance {agreement.tolerance:.2e}); mean cosine to the original model "
        f"{agreement.cosine_to_original:.4f}"
    )
    return {
        "ratio": ratio,
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
) -> Table:
    """Return the table of kernels: blocks, proof, and predicted costs fused, separate and dense.

    Three lines a kernel. "of its bound" is the worst element's difference to float64, in percent of
    that element's bound; "gain" is that way's latency over the fused one's.
    """
    table = Table(
        title="kernels (latency and HBM traffic are the simulator's predictions)",
        box=box.HORIZONTALS,
        pad_edge=False,
    )
    table.add_column("kernel, blocks, check against float64", overflow="fold", min_width=38)
    for name, justify in (("way", "left"), ("us", "right"), ("MB", "right"), ("gain", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for kernel, proof, c in zip(kernels, proofs, comparisons, strict=True):
        verdict = f"error at {100 * proof.norm_share:.0f} % of its limit"
        table.add_row(
            f"{kernel.spec.short()}\n{kernel.schedule.short()}\n"
            + (verdict if proof.passed else "FAILED the check"),
            "\n".join(("fused", "separate", "dense")),
            "\n".join(f"{cost.latency_us:.1f}" for cost in c.ways()),
            "\n".join(f"{cost.hbm_bytes / 1e6:.2f}" for cost in c.ways()),
            "\n".join(f"{cost.latency_us / c.fused.latency_us:.2f}x" for cost in c.ways()),
            end_section=True,
        )
    return table
