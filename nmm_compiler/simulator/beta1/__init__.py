"""NKI Beta 1, the dialect of `import neuronxcc.nki`: a front end to the current instructions.

A Beta 1 kernel runs as Python under its own stand-ins (`modules.py`, with its launch grids). Only
this package knows the differences to the current dialect: index expressions and masks (`index.py`),
tiles that instructions return instead of fill and block dimensions (`tensor.py`), arguments
(`instructions.py` and `language.py`). The tensor, the rows of the instructions, memory,
data, traces and timing are those of the simulator. Names and signatures are data (`table.py`).
"""
