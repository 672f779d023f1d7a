"""Quality and cost of compression. `make bench-compress`.

Parts, each under 25 minutes on two free cores; exit code 1 when a part does not hold what it says:
  encoder      all-MiniLM-L6-v2 (trained weights): mean cosine of its sentence embeddings to the
               original's, over held-out sentences; each step of the ladder has to be better
  smollm-R     SmolLM2-135M at ratio R, 0 for the dense model: perplexity of every method
               (`compress_quality.py`); resumable, one (method, ratio) at a time
  corrected    few-bit weights with low-rank branches: perplexity of SmolLM2-135M over that in 16
               bits, and an encoder's cosine (`compress_quality.py`); resumable
  llama        a Llama-3.2-1B-shaped model with random bf16 weights, without calibration: at most 8
               minutes
  llama-data   the same calibrated with 16 x 512 random tokens, compressed at 0.2: at most 30
               minutes of CPU time and 14 GiB
"""

from __future__ import annotations

import copy
import itertools
import resource
import sys
import time

import compress_quality
import torch
import typer
from compress_quality import embed, encoder_batches
from rich.console import Console
from rich.table import Table

from nmm_compiler.cli import models
from nmm_compiler.lowrank_models.apply import calibrate, compress
from nmm_compiler.lowrank_models.recover import recover

STEPS = {"plain SVD": "svd", "whitened": "whitened", "two-sided": "two-sided"}
LM_RATIOS = (0, 0.05, 0.1, 0.2, 0.4)
PARTS = (
    "encoder", *(f"smollm-{ratio:g}" for ratio in LM_RATIOS), "corrected", "llama", "llama-data",
)  # fmt: skip
console = Console(width=110)


def encoder(ratios: list[float], steps: int) -> bool:
    """Print the quality of every step at every ratio; return whether each step improves."""
    model, tokenizer = models.with_weights(models.ENCODER)
    batches, judged = encoder_batches(tokenizer)
    original, started, ordered = embed(model, judged), time.monotonic(), True
    statistics = calibrate(model, batches, exclude="pooler")
    title = f"{models.ENCODER}: mean cosine to the original, {len(original)} held-out sentences"
    heads = ("ratio", "removed (uniform, by loss)", *STEPS, "+ recovery")
    table = Table(*heads, title=title, title_justify="left")

    def cosine(candidate: torch.nn.Module) -> float:
        return float(torch.cosine_similarity(embed(candidate, judged), original).mean())

    for ratio in ratios:
        figures, removed = [], []
        for method in STEPS.values():
            candidate = copy.deepcopy(model)
            data = None if method == "svd" else statistics
            report = compress(
                candidate, ratio, align=32, method=method, calibration=data, exclude="pooler"
            )
            figures.append(cosine(candidate))
            removed.append(report.achieved_ratio)
        recovery = recover(candidate, batches, teacher=model, steps=steps, lr=1e-4)
        figures.append(cosine(candidate))
        rising = all(after > before for before, after in itertools.pairwise(figures))
        ordered &= rising
        table.add_row(
            f"{ratio:g}",
            f"{removed[0]:.3f}, {removed[2]:.3f}",
            *(f"{figure:.4f}" for figure in figures),
            style=None if rising else "red",
        )
        console.print(f"ratio {ratio:g}: {recovery.summary()}", markup=False)
    console.print(table)
    console.print(
        f"{statistics.tokens} calibration tokens, {time.monotonic() - started:.0f} s; each step "
        f"{'is' if ordered else 'is NOT'} better than the one before it at each ratio"
    )
    return ordered


def llama(data: bool) -> bool:
    """Time and memory for a Llama-3.2-1B-shaped model; data: with calibration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(shape).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02, generator=generator)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(shape)  # its buffers were empty
    batches = None
    if data:
        rows = torch.randint(shape.vocab_size, (16, 1, 512), generator=generator)
        batches = [{"input_ids": ids} for ids in rows]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cpu = time.process_time()
    report = compress(model, 0.2, calibration=batches)
    cpu = time.process_time() - cpu
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(report.summary())
    console.print(
        f"Llama-3.2-1B shape, bf16, 16 layers: {report.seconds:.0f} s on {torch.get_num_threads()} "
        f"threads ({cpu:.0f} s of CPU time); peak memory {before:.0f} MiB before, {after:.0f} MiB "
        f"with compression (largest matrix in float64: {2048 * 8192 * 8 / 2**20:.0f} MiB)"
    )
    return cpu <= 1800 and after <= 14 * 1024 if data else report.seconds <= 480


def main(
    parts: list[str] = typer.Argument(None, help=f"{', '.join(PARTS)}; default all"),  # noqa: B008
    ratios: list[float] = [0.1, 0.2, 0.4],  # noqa: B006
    steps: int = 60,
    methods: list[str] = [],  # noqa: B006
    model_names: list[str] = typer.Option([], "--models"),  # noqa: B008
    forms: list[str] = [],  # noqa: B006
    fresh: bool = False,
) -> None:
    """Measure quality and cost of compression.

    RATIOS and recovery STEPS are the encoder's, METHODS smollm's, MODELS and FORMS of corrected:
    all if not given, and each may be repeated. FRESH measures known entries anew.
    """
    if unknown := set(parts or ()) - set(PARTS):
        raise typer.BadParameter(f"unknown part {min(unknown)}: pass {', '.join(PARTS)}")
    held = []
    for part in parts or PARTS:
        if part.startswith("smollm-"):
            ratio = float(part.removeprefix("smollm-"))
            held.append(compress_quality.run_methods(ratio, methods, fresh))
        elif part == "corrected":
            held.append(compress_quality.run_forms(model_names, forms, fresh))
        elif part == "encoder":
            held.append(encoder(ratios, steps))
        else:
            held.append(llama(data=part == "llama-data"))
    sys.exit(not all(held))


if __name__ == "__main__":
    typer.run(main)
