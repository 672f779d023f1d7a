"""A case of the gallery: a spelling on a module with named weights, and what to find in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

K, R, N, B, T = 64, 8, 48, 2, 5


class Conv1D(nn.Module):
    """The transposed linear of GPT-2: weight [inputs, outputs], applied by addmm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * inputs**-0.5)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.1)
        self.outputs = outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = (*x.size()[:-1], self.outputs)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class Holder(nn.Module):
    """Parameters under the names that the cases use, and a forward that is the case."""

    def __init__(self, function: Callable[[Holder, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * shape[0] ** -0.5)

        self.u, self.v = weight(K, R), weight(R, N)
        self.a, self.b = weight(R, K), weight(N, R)  # as nn.Linear stores them
        self.w, self.w2 = weight(N, K), weight(N, R)
        self.s, self.one = nn.Parameter(torch.rand(R) + 0.5), nn.Parameter(torch.tensor(0.7))
        self.c, self.d = weight(R), weight(N)
        self.u2, self.v2 = weight(N, R), weight(R, K)
        self.heads = weight(4, K, R)
        self.conv_a, self.conv_b = weight(R, K, 1), weight(N, R, 1)
        self.conv_a2, self.conv_b2 = weight(R, K, 1, 1), weight(N, R, 1, 1)
        self.gate_a, self.up_a = weight(R, K), weight(R, K)
        self.gate_b, self.up_b = weight(N, R), weight(N, R)
        self.down_a, self.down_b = weight(R, N), weight(K, R)
        self.gain = nn.Parameter(torch.rand(R) + 0.5)
        self.norm_gain = nn.Parameter(torch.rand(K) + 0.5)
        self.first, self.second = nn.Linear(K, R), nn.Linear(R, N)
        self.pair = nn.Sequential(nn.Linear(K, R, bias=False), nn.Dropout(0.1), nn.Linear(R, N))
        self.gpt = nn.Sequential(Conv1D(K, R), Conv1D(R, N))
        self.b64 = nn.Parameter(torch.randn(N, R, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(R))
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


@dataclass(frozen=True)
class Case:
    """A spelling. expect: what to find, "kind kind" or "no:code"; per level where they differ.

    options: those of the rewrite.
    """

    name: str
    function: Callable[[Holder, torch.Tensor], Any]
    expect: str
    other: dict[str, str] = field(default_factory=dict)
    x: Callable[[], torch.Tensor] = lambda: torch.randn(B, T, K)
    train: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def expected(self, level: str) -> str:
        """Return what to find at a level; "n/a" when the level does not have the case."""
        return self.other.get(level, self.expect)


def two_dimensional() -> torch.Tensor:
    return torch.randn(T, K)


CASES: list[Case] = []


def case(expect: str, name: str = "", **more: Any) -> Callable[[Callable[..., Any]], Any]:
    """Add a function to the gallery."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        x = more.pop("x", None)
        shown = name or function.__name__.strip("_")
        extra: dict[str, Any] = {"x": x} if x else {}
        extra["train"] = more.pop("train", False)
        extra["options"] = more.pop("options", {})
        CASES.append(Case(shown, function, expect, dict(more), **extra))
        return function

    return add


def lam(expect: str, name: str, function: Callable[..., Any], **more: Any) -> None:
    """Add a one-line case."""
    case(expect, name, **more)(function)
