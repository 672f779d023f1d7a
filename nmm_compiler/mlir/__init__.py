"""Exports the rewritten graph as MLIR, each fused kernel as one call; see docs/mlir.md."""

DIALECTS = ("torch", "linalg", "stablehlo")
MODES = ("call", "inline")
WEIGHTS = ("args", "resources")
