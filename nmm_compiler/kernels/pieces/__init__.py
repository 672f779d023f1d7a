"""NKI building blocks that kernels of several families share."""
