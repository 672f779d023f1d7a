"""Exports the rewritten graph as MLIR, each fused kernel as one call; see docs/mlir.md."""
