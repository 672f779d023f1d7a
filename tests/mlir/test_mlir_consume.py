"""A toolchain's side, as docs/mlir.md tells it: find the kernel, load its file, pass the operands.

Everything here is read from the saved files: types from the MLIR text, the rest from the manifest.
The NKI file runs in the simulator, the meaning comes from the torch op.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlir_models import MODELS, lora_call

import nmm_compiler.ops.registration  # noqa: F401  (defines torch.ops.nmm)
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.mlir.export import export_mlir
from nmm_compiler.simulator.run import simulate

pytest.importorskip("torch_mlir")


def operand_shapes(text: str, name: str) -> list[tuple[int, ...]]:
    """Read the shapes of a kernel's operands from its declaration."""
    declared = re.search(rf"func\.func private @{name}\((.*?)\) ->", text)
    assert declared is not None
    found = re.findall(r"tensor<([\dx]+)xf32>", declared.group(1))
    return [tuple(int(size) for size in shape.split("x")) for shape in found]


def run_launch(folder: Path, launch: dict[str, Any], operands: list[np.ndarray]) -> np.ndarray:
    """Run the NKI file of a launch in the simulator on the operands that it names."""
    (source,) = launch["sources"]
    x, *rest = [operands[number] for number in launch["operands"]]
    if launch["spec"]["x_layout"] == "row":
        x = x.reshape(-1, x.shape[-1])
    (function,) = re.findall(r"@nki\.jit\ndef (\w+)\(", (folder / source["file"]).read_text())
    return simulate(f"{folder / source['file']}:{function}", x, *rest, mode="functional").output


@pytest.mark.parametrize("name", ["lora_call", "llama_mlp"])
def test_the_saved_kernels_compute_what_the_calls_mean(name: str, tmp_path: Path) -> None:
    model, inputs = lora_call() if name == "lora_call" else MODELS[name]()
    export_mlir(model, inputs, dialect="linalg").save(tmp_path / "model.mlir")
    text = (tmp_path / "model.mlir").read_text()
    manifest = json.loads((tmp_path / "model.manifest.json").read_text())
    assert manifest["kernels"]
    generator = np.random.default_rng(0)
    for kernel in manifest["kernels"]:
        shapes = operand_shapes(text, kernel["name"])
        operands = [
            generator.standard_normal(shape, dtype=np.float32) / np.float32(math.sqrt(shape[-1]))
            for shape in shapes
        ]
        (launch,) = kernel["launches"]
        spec = FAMILIES[launch["family"]].spec_class.from_dict(launch["spec"])
        computed = run_launch(tmp_path, launch, operands)
        ordered = [operands[number] for number in launch["operands"]]
        ordered[0] = ordered[0].reshape(spec.inputs()[0].shape)
        bound = spec.error_bound(*ordered)
        assert np.all(np.abs(computed - spec.reference(*ordered)) <= bound)
        if name == "lora_call":
            x, u, v, bias, w = operands
            exact = x.astype(np.float64) @ w + 2.0 * (x @ u.T.astype(np.float64)) @ v.T + bias
            assert np.all(np.abs(computed - exact) <= bound)
