"""Fine-tune a compressed model with Hugging Face's Trainer, save it, load it again.

    python examples/finetune_lowrank.py [DIRECTORY of a causal language model]

Without a directory it makes a small Llama with random weights. A low-rank model is an ordinary
transformers model: the Trainer trains its factors, `save_pretrained` stores them with their ranks.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import nmm_compiler as nmm


def small() -> Any:
    """Return a Llama of two layers and width 64."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(shape)


def main(directory: str | None = None) -> None:
    """Compress, train, save, load."""
    model = small() if directory is None else AutoModelForCausalLM.from_pretrained(directory)
    size = model.config.vocab_size
    # Text that can be learned: each token is the one before it plus one.
    starts = torch.arange(64)[:, None]
    rows = [{"input_ids": ids, "labels": ids} for ids in (starts + torch.arange(32)) % size]
    batches = [{"input_ids": torch.stack([row["input_ids"] for row in rows[:8]])}]
    nmm.compress(model, 0.2, calibration=batches, align=8 if directory is None else None)

    with tempfile.TemporaryDirectory() as out:
        settings = TrainingArguments(
            out, max_steps=20, per_device_train_batch_size=8, learning_rate=3e-3, report_to=[],
            logging_steps=19, save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=settings, train_dataset=rows)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        model.save_pretrained(out)
        loaded = AutoModelForCausalLM.from_pretrained(out)
    kept = loaded.config.quantization_config.saved["ranks"]
    print(f"loss {losses[0]:.3f}; loaded again with {len(kept)} low-rank layers")


if __name__ == "__main__":
    main(*sys.argv[1:2])
