"""Layouts of the tensors between kernels: regions, and one assignment over the graph."""
