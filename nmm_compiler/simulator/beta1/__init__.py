"""NKI Beta 1, the dialect of `import neuronxcc.nki`: translated to the current instructions.

A Beta 1 kernel runs as Python under its own stand-ins (`modules.py`). Only this package knows the
differences to the current dialect: tiles that instructions return instead of fill (`pending.py`),
index expressions and masks (`index.py`), tensors with block dimensions (`tensor.py`), launch grids
(`kernel.py`). Instructions, memory, data, traces and timing are those of the simulator. Names,
signatures and result rules are data, in `nki_api/beta1_table.py`.
"""
