"""Changes the graph: the editor, fused calls, their operands, and the strides of results."""
