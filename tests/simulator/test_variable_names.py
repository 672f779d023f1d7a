"""Tensors have the names of the variables that hold them, and print shows their values."""

import numpy as np
import pytest

from nmm_compiler.simulator.run import simulate

KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def kernel(x):
    tiles = []
    weights = nl.ndarray(
        (128, 64),
        dtype=nl.float32,
        buffer=nl.sbuf,
    )
    for _ in range(2):
        tiles.append(nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf))
    named = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf, name="mine")
    for tile in (weights, tiles[0], tiles[1], named):
        nisa.dma_copy(dst=tile, src=x)
    print(weights)
    out = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=weights)
    return out
"""


@pytest.mark.parametrize("name", ["weights", "first"])
def test_names_and_printed_values(tmp_path_factory, capsys, name):
    path = tmp_path_factory.getbasetemp() / "kernel.py"  # the file of before, changed
    path.write_text(KERNEL.replace("weights", name))
    run = simulate(f"{path}:kernel", np.full((128, 64), 2.5, np.float32))
    names = [a.name for a in run.trace.allocations.values()]
    assert names == ["x", name, "tiles", "tiles", "mine", "out"]
    said = capsys.readouterr().out
    assert said.startswith(f"NkiTensor({name!r}, shape=(128, 64), dtype=float32, sbuf)")
    assert "2.5" in said
