"""Tensors: dtypes, storage and its capacity, strided and indirect views, registers."""
