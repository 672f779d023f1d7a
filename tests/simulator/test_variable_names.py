"""Tensors have the names of the variables that hold them, and print shows their values."""

import numpy as np

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


def test_names_and_printed_values(tmp_path, capsys):
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    run = simulate(f"{path}:kernel", np.full((128, 64), 2.5, np.float32))
    names = [a.name for a in run.trace.allocations.values()]
    assert names == ["x", "weights", "tiles", "tiles", "mine", "out"]
    said = capsys.readouterr().out
    assert said.startswith("NkiTensor('weights', shape=(128, 64), dtype=float32, sbuf)")
    assert "2.5" in said


def test_a_changed_file_has_new_names(tmp_path):
    path = tmp_path / "kernel.py"
    for name in ("first", "second"):
        path.write_text(KERNEL.replace("weights", name))
        run = simulate(f"{path}:kernel", np.ones((128, 64), np.float32))
        assert name in [a.name for a in run.trace.allocations.values()]
