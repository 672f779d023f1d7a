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


def cases() -> list[Any]:
    """Every model, dtype and dialect; of the small models two run by default.

    Those two have both dtypes and both dialects, paired the other way round for each model.
    """
    found = []
    for name, dtype, dialect in product(
        ("llama_mlp", "bert_layer", "lora"), DTYPES, ("linalg", "stablehlo")
    ):
        crossed = (name == "llama_mlp") == (dialect == "linalg")
        slow = crossed == (dtype == "float32") or name == "bert_layer"
        marks = [pytest.mark.long] if slow else []
        found.append(pytest.param(name, dtype, dialect, marks=marks))
    return found


@pytest.mark.parametrize(("name", "dtype", "dialect"), cases())
def test_inline_modules_equal_eager(name: str, dtype: str, dialect: str) -> None:
    model, inputs = MODELS[name](DTYPES[dtype])
    module = exported(name, dialect, "inline", DTYPES[dtype])
    assert module.kernels
    assert_as_right_as_eager(run_in_iree(module, model, inputs), model, inputs)


def test_weights_as_resources_run_without_them() -> None:
    model, inputs = one()
    module = export_mlir(model, inputs, dialect="linalg", kernels="inline", weights="resources")
    assert_as_right_as_eager(run_in_iree(module, model, inputs), model, inputs)


def test_one_dynamic_module_serves_many_token_counts() -> None:
    model, inputs = one()
    shapes = {"x": {0: torch.export.Dim("tokens", max=4096)}}
    module = export_mlir(model, inputs, dialect="linalg", kernels="inline", dynamic_shapes=shapes)
    for tokens in (1, 7, 300):
        x = {"x": torch.randn(tokens, 16)}
        assert_as_right_as_eager(run_in_iree(module, model, x), model, x)


def test_columns_between_kernels_compute_the_same() -> None:
    from test_mlir_export import columns

    model = columns()
    inputs = {"x": torch.randn(4, 16)}
    module = export_mlir(model, inputs, dialect="stablehlo", kernels="inline")
    assert_as_right_as_eager(run_in_iree(module, model, inputs), model, inputs)
