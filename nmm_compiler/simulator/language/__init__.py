"""The stand-in `nki.language`: functions that allocate tensors and issue instructions."""
