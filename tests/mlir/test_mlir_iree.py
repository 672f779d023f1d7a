"""Inline modules compiled and run by IREE on the CPU are as near to float64 as eager is."""

import copy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from mlir_models import MODELS, Inputs, eager, exported, one, run_in_iree
from torch import nn

from nmm_compiler.mlir.export import export_mlir

pytest.importorskip("torch_mlir")
pytest.importorskip("iree.compiler")
pytest.importorskip("iree.runtime")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def assert_as_right_as_eager(computed: np.ndarray, model: nn.Module, inputs: Inputs) -> None:
    """Another order of the same sums: within four times eager's own distance from float64.

    And one rounding of the largest number, for a distance that happens to be small.
    """
    exact = eager(copy.deepcopy(model).double(), {n: x.double() for n, x in inputs.items()}).numpy()
    result = eager(model, inputs)
    distance = np.abs(result.double().numpy() - exact).max()
    bound = 4.0 * distance + torch.finfo(result.dtype).eps * np.abs(exact).max()
    assert np.abs(computed - exact).max() <= bound
    # the bound must be able to fail: it is far below the size of the result
    assert bound < 0.1 * np.abs(exact).max()


# The tests below run float32 in both dialects.
QUICK = [("llama_mlp", "bfloat16", "linalg"), ("lora", "bfloat16", "stablehlo")]


def cases() -> list[Any]:
    """Every model, dtype and dialect; two run by default."""
    return [
        pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.long])
        for one in product(("llama_mlp", "bert_layer", "lora"), DTYPES, ("linalg", "stablehlo"))
    ]


@pytest.mark.parametrize(("name", "dtype", "dialect"), cases())
def test_inline_modules_equal_eager(name: str, dtype: str, dialect: str) -> None:
    model, inputs = MODELS[name](DTYPES[dtype])
    module = exported(name, dialect, "inline", DTYPES[dtype])
    assert module.kernels
    assert_as_right_as_eager(run_in_iree(module, model, inputs), model, inputs)


def test_one_dynamic_module_serves_many_token_counts_without_its_weights() -> None:
    model, inputs = one()
    module = export_mlir(
        model, inputs, dialect="linalg", kernels="inline", weights="resources", sources=False,
        dynamic_shapes={"x": {0: torch.export.Dim("tokens", max=4096)}},
    )  # fmt: skip
    for tokens in (1, 7, 300):
        x = {"x": torch.randn(tokens, 16)}
        assert_as_right_as_eager(run_in_iree(module, model, x), model, x)


def test_columns_between_kernels_compute_the_same() -> None:
    from test_mlir_export import columns

    model = columns()
    inputs = {"x": torch.randn(4, 16)}
    module = export_mlir(model, inputs, dialect="stablehlo", kernels="inline", sources=False)
    assert_as_right_as_eager(run_in_iree(module, model, inputs), model, inputs)
