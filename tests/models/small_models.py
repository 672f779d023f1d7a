"""How a small random transformers model is described, made and called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

RANK = 4
IMAGE, VIDEO, VISION_START, VISION_END = 63, 60, 61, 62  # token ids
Inputs = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class Configuration:
    """One model: its `model_type`, what is laid over the base of its kind, what is expected.

    layers: linears that `nmm.compress` makes low-rank. calls: kernel calls after the passes.
    uses: how often low-rank layers are called in a forward; None: each once. chains: uses that
    became part of a kernel call; None: all. graphs: Dynamo graphs. inputs: what forward gets;
    None: the input of the kind. note: for users, why a number is not what one expects.
    """

    model_type: str
    layers: int
    calls: int
    config: dict[str, Any]
    uses: int | None = None
    chains: int | None = None
    graphs: int = 1
    inputs: Inputs | None = None
    note: str = ""

    @property
    def expected(self) -> dict[str, int]:
        """The counts that the test measures."""
        uses = self.layers if self.uses is None else self.uses
        return {
            "layers": self.layers,
            "uses": uses,
            "chains": uses if self.chains is None else self.chains,
            "calls": self.calls,
            "graphs": self.graphs,
        }


@dataclass(frozen=True)
class Kind:
    """Models that are made and called alike. config: what their configs share."""

    name: str
    rows: tuple[Configuration, ...]
    config: dict[str, Any]
    inputs: Inputs


def make(kind: Kind, row: Configuration) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the dense model with random weights and what its forward is called with.

    A value of None in a row takes a name of the kind's config away.
    """
    import transformers

    torch.manual_seed(0)
    settings = {name: v for name, v in {**kind.config, **row.config}.items() if v is not None}
    config = transformers.AutoConfig.for_model(row.model_type, **settings)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    return model, (row.inputs or kind.inputs)()


def _ids(batch: int = 2, length: int = 6) -> Tensor:
    return torch.arange(3, 3 + batch * length).view(batch, length)


def text() -> dict[str, Tensor]:
    """Two rows of six tokens."""
    return {"input_ids": _ids()}


def text_to_text() -> dict[str, Tensor]:
    """Six tokens for the encoder, four for the decoder."""
    return {**text(), "decoder_input_ids": _ids(length=4)}


def random(name: str, *shape: int, decoder: bool = False) -> Inputs:
    """Return a maker of one random tensor [2, *shape], with four tokens for a decoder."""
    more = {"decoder_input_ids": _ids(length=4)} if decoder else {}
    return lambda: {name: torch.randn(2, *shape), **more}


image = random("pixel_values", 3, 16, 16)


def text_and_image() -> dict[str, Tensor]:
    """Six tokens and an image a row, for models with a tower for each."""
    return {**text(), **image()}


def image_in_text(tokens: int, *images: int) -> Inputs:
    """Return a maker of a prompt in which an image takes the place of so many tokens."""
    ids = torch.tensor([[IMAGE] * tokens + [3, 4, 5, 2]] * 2)
    return lambda: {"input_ids": ids, "pixel_values": torch.randn(2, *images, 3, 16, 16)}
