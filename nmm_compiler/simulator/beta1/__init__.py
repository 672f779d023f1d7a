"""NKI Beta 1, the dialect of `import neuronxcc.nki`: translated to the current instructions.

A Beta 1 kernel runs as Python under stand-ins of its own (`modules.py`). What differs from the
current dialect lives here and nowhere else: tiles that instructions return instead of fill
(`pending.py`), index expressions and masks (`index.py`), tensors with block dimensions
(`tensor.py`), launch grids (`kernel.py`). Instructions, memory, data, traces and timing are the
simulator's own. Names, signatures and what a call returns are data, `nki_api/beta1_table.py`.
"""
