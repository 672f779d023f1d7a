"""Train a small byte-level language model from scratch on text that ships with Python.

    python benchmarks/train_small_lm.py out/small_lm [--steps 1500]

It exists to have a trained decoder without a download: a Llama of 3 layers and width 64, small
enough to use every rank it has. The result is saved with save_pretrained; `benchmarks/compress.py`
trains it when it is missing.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from compress_text import byte_split
from rich.progress import Progress

LENGTH = 128
BATCH = 16


def config() -> Any:
    """Return the model's shape: 3 layers, width 64, inner 192, bytes as tokens."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip


def windows(data: bytes, batch: int = BATCH) -> list[dict[str, torch.Tensor]]:
    """Return consecutive windows of LENGTH bytes as batches of `input_ids`."""
    ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    rows = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
    return [{"input_ids": piece} for piece in rows.split(batch)]


@torch.no_grad()
def perplexity(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> float:
    """Return exp of the mean next-byte cross entropy."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        ids = batch["input_ids"]
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        total += float(
            torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
        )
        count += logits.shape[0]
    return math.exp(total / count)


def train(steps: int, seed: int = 0) -> Any:
    """Return the trained model."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(config())
    data = torch.frombuffer(bytearray(byte_split()[0]), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 4e-3, total_steps=steps, pct_start=0.1
    )
    model.train()
    with Progress() as progress:
        task = progress.add_task("training", total=steps)
        for _ in range(steps):
            starts = torch.randint(0, len(data) - LENGTH - 1, (BATCH,))
            ids = torch.stack([data[s : s + LENGTH] for s in starts.tolist()])
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.update(
                task, advance=1, description=f"training, loss {float(loss.detach()):.3f}"
            )
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    arguments = parser.parse_args()
    started = time.monotonic()
    model = train(arguments.steps)
    model.save_pretrained(arguments.directory)
    held_out = perplexity(model, windows(byte_split()[1]))
    print(f"{arguments.directory}: {arguments.steps} steps in {time.monotonic() - started:.0f} s, "
          f"held-out perplexity per byte {held_out:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
