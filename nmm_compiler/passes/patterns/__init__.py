"""Rules made of two PyTorch functions: the pattern's graph, how it is found, and its proof."""
