"""Quality and cost of compression. `make bench-compress`.

Parts, each under 25 minutes on two free cores; exit code 1 when a part does not hold what it says:
  encoder      all-MiniLM-L6-v2 (trained weights): mean cosine of its sentence embeddings to the
               original's, over held-out sentences; each step of the ladder has to be better
  smollm-R     SmolLM2-135M at ratio R, 0 for the dense model: perplexity of every method
               (`compress_lm.py`); resumable, one (method, ratio) at a time
  corrected    few-bit weights with low-rank branches: perplexity over that in 16 bits, of
               SmolLM2-135M and of a decoder trained here (`compress_corrected.py`); resumable
  llama        a Llama-3.2-1B-shaped model with random bf16 weights, without calibration: at most 8
               minutes
  llama-data   the same calibrated with 16 x 512 random tokens, compressed at 0.2: at most 30
               minutes of CPU time and 14 GiB
"""

from __future__ import annotations

import argparse
import copy
import itertools
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from compress_text import embed, encoder_batches
from rich.console import Console
from rich.table import Table

from nmm_compiler.lowrank_models.apply import calibrate, compress
from nmm_compiler.lowrank_models.recover import recover

RATIOS = (0.1, 0.2, 0.4)
STEPS = ("plain SVD", "whitened", "two-sided", "+ recovery")
LM_RATIOS = (0, 0.05, 0.1, 0.2, 0.4)
console = Console(width=110)


def ladder(
    model: torch.nn.Module,
    batches: list[Any],
    quality: Callable[[torch.nn.Module], float],
    higher_is_better: bool,
    ratios: tuple[float, ...],
    steps: int,
    lr: float,
    align: int,
    title: str,
    **selection: Any,
) -> bool:
    """Print the quality of every step at every ratio; return whether each step improves."""
    started = time.monotonic()
    statistics = calibrate(model, batches, **selection)
    table = Table(title=title, title_justify="left")
    table.add_column("ratio")
    table.add_column("removed (uniform, by loss)")
    for name in STEPS:
        table.add_column(name, justify="right")
    ordered = True
    for ratio in ratios:
        figures, removed = [], []
        for keywords in (
            {"method": "svd"},
            {"method": "whitened", "calibration": statistics},
            {"method": "two-sided", "calibration": statistics},
        ):
            candidate = copy.deepcopy(model)
            report = compress(candidate, ratio, align=align, **keywords, **selection)
            figures.append(quality(candidate))
            removed.append(report.achieved_ratio)
        recovery = recover(candidate, batches, teacher=model, steps=steps, lr=lr)
        figures.append(quality(candidate))
        sign = 1 if higher_is_better else -1
        rising = all(sign * b > sign * a for a, b in itertools.pairwise(figures))
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


def encoder(ratios: tuple[float, ...], steps: int) -> bool:
    """The trained sentence encoder."""
    from nmm_compiler.cli import models

    model, tokenizer = models.with_weights(models.ENCODER)
    batches, judged = encoder_batches(tokenizer)
    original = embed(model, judged)

    def cosine(candidate: torch.nn.Module) -> float:
        return float(torch.cosine_similarity(embed(candidate, judged), original).mean())

    title = f"all-MiniLM-L6-v2: mean cosine to the original, {len(original)} held-out sentences"
    return ladder(model, batches, cosine, True, ratios, steps, 1e-4, 32, title, exclude="pooler")


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


def smollm(ratio: float, methods: list[str], fresh: bool) -> bool:
    """SmolLM2-135M at one ratio."""
    import compress_lm

    compress_lm.run(ratio, methods, fresh)
    return True


def corrected(models: list[str], forms: list[str], fresh: bool) -> bool:
    """Few-bit weights with branches."""
    import compress_corrected

    return compress_corrected.run(models, forms, fresh)


PARTS = (
    "encoder", *(f"smollm-{ratio:g}" for ratio in LM_RATIOS), "corrected", "llama", "llama-data",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default all")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="of the encoder")
    parser.add_argument("--steps", type=int, default=60, help="the encoder's recovery steps")
    parser.add_argument("--methods", nargs="+", default=[], help="of smollm; default all")
    parser.add_argument("--models", nargs="+", default=[], help="of corrected; default all")
    parser.add_argument("--forms", nargs="+", default=[], help="of corrected; default all")
    parser.add_argument("--fresh", action="store_true", help="measure known entries anew")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}: pass {', '.join(PARTS)}")
    results = []
    for part in arguments.parts or PARTS:
        if part.startswith("smollm-"):
            ratio = float(part.removeprefix("smollm-"))
            results.append(smollm(ratio, arguments.methods, arguments.fresh))
        elif part == "corrected":
            results.append(corrected(arguments.models, arguments.forms, arguments.fresh))
        elif part == "encoder":
            results.append(encoder(tuple(arguments.ratios), arguments.steps))
        else:
            results.append(llama(data=part == "llama-data"))
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
