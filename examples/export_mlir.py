"""One factorized layer in the three MLIR forms, each fused kernel as a call.

    python examples/export_mlir.py

Needs torch-mlir: pip install 'nmm-compiler[mlir]'
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import nmm_compiler as nmm


class Layer(nn.Module):
    """A linear that was factorized, x -> (x u) v + b, and a residual around it."""

    def __init__(self, features: int = 256, rank: int = 64) -> None:
        super().__init__()
        self.down = nn.Linear(features, rank, bias=False)
        self.up = nn.Linear(rank, features)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x))


def forms() -> dict[str, str]:
    """Return the MLIR text of each form."""
    layer = Layer().to(torch.bfloat16).eval()
    x = torch.randn(128, 256, dtype=torch.bfloat16)
    found = {}
    for dialect in ("torch", "linalg", "stablehlo"):
        # sources=False: declarations only; leave it out to get an NKI file per kernel as well
        module = nmm.export_mlir(layer, (x,), dialect=dialect, kernels="call", sources=False)
        found[dialect] = module.text
    return found


if __name__ == "__main__":
    for dialect, text in forms().items():
        print(f"// ---- {dialect} ----")
        print(text)
