"""Quality of compression: plain, whitened, globally allocated, recovered. `make bench-compress`.

Three parts, each printing one table; exit code 1 when a step of the ladder is not better than the
one before it:
  encoder  all-MiniLM-L6-v2 (trained weights): mean cosine of its sentence embeddings to the
           original's, over held-out sentences; higher is better
  lm       a byte-level Llama trained here from scratch (train_small_lm.py): held-out perplexity;
           lower is better
  llama    a Llama-3.2-1B-shaped model with random bf16 weights: time and memory without calibration
"""

from __future__ import annotations

import argparse
import copy
import itertools
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compress_text import byte_split, manual_sentences, sentences
from rich.console import Console
from rich.table import Table
from train_small_lm import perplexity, train, windows

from nmm_compiler.compress.apply import calibrate, compress
from nmm_compiler.compress.recover import recover

RATIOS = (0.1, 0.2, 0.4)
STEPS = ("plain SVD", "whitened, uniform", "whitened, global", "+ recovery")
SMALL_LM = Path("out/small_lm")
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
    sequential: bool = False,
    **selection: Any,
) -> bool:
    """Print the quality of every step at every ratio; return whether each step improves.

    sequential: also judge sequential calibration. Recovery starts from the global step.
    """
    started = time.monotonic()
    statistics = calibrate(model, batches, **selection)
    table = Table(title=title, title_justify="left")
    table.add_column("ratio")
    table.add_column("removed (uniform, global)")
    for name in (*STEPS[:3], *(["global, sequential"] if sequential else []), STEPS[3]):
        table.add_column(name, justify="right")
    ordered = True
    for ratio in ratios:
        figures, removed = [], []
        for keywords in (
            {"method": "svd", "allocation": "uniform"},
            {"method": "whitened", "allocation": "uniform"},
            {},
        ):
            candidate = copy.deepcopy(model)
            report = compress(
                candidate, ratio, calibration=statistics, align=align, **keywords, **selection
            )
            figures.append(quality(candidate))
            removed.append(report.achieved_ratio)
        if sequential:
            fitted = copy.deepcopy(model)
            compress(fitted, ratio, calibration=batches, align=align, sequential=True, **selection)
            figures.append(quality(fitted))
        recovery = recover(candidate, batches, teacher=model, steps=steps, lr=lr)
        figures.append(quality(candidate))
        sign = 1 if higher_is_better else -1
        rising = all(sign * b > sign * a for a, b in itertools.pairwise(figures))
        ordered &= rising
        table.add_row(
            f"{ratio:g}",
            f"{removed[1]:.3f}, {removed[2]:.3f}",
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
    from nmm_compiler.cli.demo import embed

    model, tokenizer = models.encoder()
    held_out, text = models.sentences(), sentences() + manual_sentences()[:450]
    assert not set(held_out) & set(text)
    # Sentences of one kind lie together: interleave them, so that each batch has both.
    text = [line for start in range(25) for line in text[start::25]]
    options = {"padding": True, "truncation": True, "max_length": 64, "return_tensors": "pt"}
    batches = [dict(tokenizer(text[i : i + 16], **options)) for i in range(0, len(text), 16)]
    judged = dict(tokenizer(held_out, padding=True, return_tensors="pt"))
    original = embed(model, judged)

    def cosine(candidate: torch.nn.Module) -> float:
        return float(torch.cosine_similarity(embed(candidate, judged), original).mean())

    title = f"all-MiniLM-L6-v2: mean cosine to the original, {len(held_out)} held-out sentences"
    return ladder(model, batches, cosine, True, ratios, steps, 1e-4, 32, title, exclude="pooler")


def small_lm(ratios: tuple[float, ...], steps: int) -> bool:
    """The small language model, trained first if it is not there."""
    from transformers import AutoModelForCausalLM

    if (SMALL_LM / "model.safetensors").is_file():
        model = AutoModelForCausalLM.from_pretrained(SMALL_LM, local_files_only=True).eval()
    else:
        model = train(1500)
        model.save_pretrained(SMALL_LM)
    learned, held_out = (windows(part) for part in byte_split())
    batches = learned[:: max(1, len(learned) // 20)][:20]
    title = (
        f"byte-level Llama, held-out perplexity per byte (dense: {perplexity(model, held_out):.4f})"
    )
    return ladder(
        model, batches, lambda m: perplexity(m, held_out), False, ratios, steps, 3e-4, 4, title,
        sequential=True,
    )  # fmt: skip


def llama(ratios: tuple[float, ...], steps: int) -> bool:
    """Time and memory for a Llama-3.2-1B-shaped model, no calibration."""
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
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cpu = time.process_time()
    report = compress(model, 0.2)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(report.summary())
    console.print(
        f"Llama-3.2-1B shape, bf16, 16 layers: {report.seconds:.0f} s on {torch.get_num_threads()} "
        f"threads ({time.process_time() - cpu:.0f} s of CPU time); peak memory {before:.0f} MiB "
        f"before, {after:.0f} MiB with compression (largest matrix in float64: "
        f"{2048 * 8192 * 8 / 2**20:.0f} MiB)"
    )
    return report.seconds <= 480


PARTS = {"encoder": encoder, "lm": small_lm, "llama": llama}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="encoder|lm|llama", help="default: all")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--steps", type=int, default=60, help="recovery steps")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}: pass {', '.join(PARTS)}")
    results = [PARTS[p](tuple(arguments.ratios), arguments.steps) for p in arguments.parts or PARTS]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
