"""See docs/mlir.md: the rewritten graph as MLIR, each fused kernel one call."""
