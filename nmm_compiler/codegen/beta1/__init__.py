"""The last step of codegen for NKI Beta 1: an emitted file rewritten as `neuronxcc.nki`."""
