"""Small random transformers models of every kind, and how much of each fuses.

`configurations.json` has one row a model, in groups by kind: what is laid over the config of its
kind (`config`, and the sets that `like` names), what is expected, and what its forward gets. The
counts are exact for the transformers version in constraints.txt; `test_models_compiled.py` measures
them, and docs/models.md prints them. A row in which low-rank layers stay out of kernel calls says
why in its note.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from small_models import (
    IMAGE,
    VISION_END,
    VISION_START,
    Configuration,
    Inputs,
    Kind,
    image,
    image_in_text,
    random,
    text,
    text_and_image,
    text_to_text,
)
from torch import Tensor

FILE = Path(__file__).with_name("configurations.json")


def patches_in_text() -> dict[str, Tensor]:
    """A prompt of Qwen's: an image of four by four patches, merged to four tokens."""
    ids = torch.tensor([[VISION_START, *[IMAGE] * 4, VISION_END, 3, 4]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def sound_in_text() -> dict[str, Tensor]:
    """A prompt in which sixteen frames of sound take the place of four tokens."""
    ids = torch.tensor([[IMAGE] * 4 + [3, 4]] * 2)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "input_features": torch.randn(2, 8, 16),
        "feature_attention_mask": torch.ones(2, 16, dtype=torch.long),
    }


def visual_bert_inputs() -> dict[str, Tensor]:
    """Two rows of six tokens, with three regions of an image each."""
    return {
        **text(),
        "visual_embeds": torch.randn(2, 3, 16),
        "visual_attention_mask": torch.ones(2, 3),
        "visual_token_type_ids": torch.ones(2, 3, dtype=torch.long),
    }


def lxmert_inputs() -> dict[str, Tensor]:
    """Two rows of six tokens, with three regions of an image and their places each."""
    return {
        **text(),
        "visual_feats": torch.randn(2, 3, 16),
        "visual_pos": torch.rand(2, 3, 4),
    }


PLAIN = (text, text_to_text, image, text_and_image, patches_in_text, sound_in_text,
         visual_bert_inputs, lxmert_inputs)  # fmt: skip
NAMES = ("text", "text_to_text", "image", *(maker.__name__ for maker in PLAIN[3:]))
MAKERS: dict[str, Inputs] = dict(zip(NAMES, PLAIN, strict=True))


def inputs_of(words: list[Any] | None) -> Inputs | None:
    """Return the maker that a row names: a function, or "random" or "image_in_text" and sizes."""
    if words is None:
        return None
    name, *sizes = words
    if name in MAKERS:
        return MAKERS[name]
    if name == "image_in_text":
        return image_in_text(*sizes)
    shape = [size for size in sizes[1:] if size != "decoder"]
    return random(sizes[0], *shape, decoder=sizes[-1] == "decoder")


def _kinds() -> tuple[Kind, ...]:
    data = json.loads(FILE.read_text(encoding="utf-8"))
    kinds = []
    for kind in data["kinds"]:
        rows = []
        for row in kind["rows"]:
            config = dict(row.pop("config", {}))
            for name in row.pop("like", ()):
                config |= data["sets"][name]
            inputs = inputs_of(row.pop("inputs", None))
            rows.append(Configuration(**row, config=config, inputs=inputs))
        shared = inputs_of(kind["inputs"])
        assert shared is not None
        kinds.append(Kind(kind["name"], tuple(rows), kind["config"], shared))
    return tuple(kinds)


KINDS = _kinds()
MODELS = {row.model_type: (kind, row) for kind in KINDS for row in kind.rows}
