"""Predicts the latency of kernels and whole models: fused, as separate products, and dense."""
