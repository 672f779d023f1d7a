"""Rules made of two PyTorch functions: reads the pattern, finds it, replaces it."""
