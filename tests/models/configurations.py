"""Small random transformers models of every kind, and how much of each fuses.

`configurations.json` has one row a model, in groups by kind: what is laid over the config of its
kind (`config`, and the sets that `like` names), what is expected, and what its forward gets: for
each name the numbers, or how they are made and their shape. The counts are exact for the
transformers version in constraints.txt; `test_models_compiled.py` measures them, and docs/models.md
prints them. A row in which low-rank layers stay out of kernel calls says why in its note.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RANK = 4
MADE = {
    "ids": lambda batch, length: torch.arange(3, 3 + batch * length).view(batch, length),
    "randn": torch.randn,
    "rand": torch.rand,
    "ones": lambda *shape: torch.ones(shape, dtype=torch.long),
}


@dataclass(frozen=True)
class Configuration:
    """One model: its `model_type`, its config and inputs, what is expected.

    layers: linears that `nmm.compress` makes low-rank. calls: kernel calls after the passes.
    uses: how often low-rank layers are called in a forward; None: each once. chains: uses that
    became part of a kernel call; None: all. graphs: Dynamo graphs. note: for users, why a number
    is not what one expects.
    """

    kind: str
    model_type: str
    layers: int
    calls: int
    config: dict[str, Any]
    inputs: dict[str, list[Any]]
    uses: int | None = None
    chains: int | None = None
    graphs: int = 1
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


def tensor(said: list[Any]) -> Tensor:
    """Return the tensor of these numbers, or one that is made."""
    return MADE[said[0]](*said[1:]) if isinstance(said[0], str) else torch.tensor(said)


def make(row: Configuration) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the dense model with random weights and what its forward is called with."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(row.model_type, **row.config)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    return model, {name: tensor(said) for name, said in row.inputs.items()}


def read_rows() -> dict[str, Configuration]:
    """Return the rows by `model_type`; a value of None takes a name of the kind's config away."""
    data = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    rows = {}
    for kind in data["kinds"]:
        for row in kind["rows"]:
            config = kind["config"] | row.pop("config", {})
            for name in row.pop("like", ()):
                config |= data["sets"][name]
            given = {name: value for name, value in config.items() if value is not None}
            row = {"kind": kind["name"], "inputs": kind["inputs"], "config": given, **row}
            rows[row["model_type"]] = Configuration(**row)
    return rows


MODELS = read_rows()
