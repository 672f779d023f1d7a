"""The golden modules: one small model per dialect, and inline once.

`python tests/mlir/mlir_golden.py` writes them anew.
"""

from pathlib import Path

from mlir_models import one

from nmm_compiler.mlir.export import export_mlir

GOLDENS = ("torch", "linalg", "stablehlo", "stablehlo_inline")


def golden_text(name: str) -> str:
    """Return the module that the golden `name` holds."""
    dialect, _, mode = name.partition("_")
    model, inputs = one()
    made = export_mlir(model, inputs, dialect=dialect, kernels=mode or "call", sources=False)
    return made.text.rstrip("\n") + "\n"


if __name__ == "__main__":
    directory = Path(__file__).parent / "golden"
    directory.mkdir(exist_ok=True)
    for golden in GOLDENS:
        (directory / f"{golden}.mlir").write_text(golden_text(golden))
