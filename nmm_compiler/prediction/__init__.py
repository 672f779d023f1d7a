"""What a model is predicted to take: fused, as separate products, and dense."""
