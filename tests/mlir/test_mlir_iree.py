"""Inline modules compiled and run by IREE on the CPU equal eager within derived bounds."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from mlir_bounds import error_bound
from mlir_models import MODELS, eager, exported, one, run_in_iree
from torch import nn

from nmm_compiler.mlir.export import export_mlir
from nmm_compiler.mlir.program import export_program

pytest.importorskip("torch_mlir")
pytest.importorskip("iree.compiler")
pytest.importorskip("iree.runtime")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def bound_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Exact output, and how far an evaluation in the model's dtype may be from it."""
    program = export_program(model, (), inputs, None, "args")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = [state[a.name] if a.kind == "weight" else inputs[a.name] for a in program.arguments]
    exact, bound = error_bound(program.graph, values)
    return exact.numpy(), bound.numpy()


def cases() -> list[Any]:
    """Every model, dtype and dialect; one of the large model runs by default, of the others two.

    Those two have both dtypes and both dialects, paired the other way round for each model.
    """
    found = []
    for name, dtype, dialect in product(
        ("llama_mlp", "bert_layer", "lora"), DTYPES, ("linalg", "stablehlo")
    ):
        crossed = (name == "llama_mlp") == (dialect == "linalg")
        slow = crossed == (dtype == "float32") or (name, dtype) == ("bert_layer", "bfloat16")
        marks = [pytest.mark.long] if slow else []
        found.append(pytest.param(name, dtype, dialect, marks=marks))
    return found


@pytest.mark.parametrize(("name", "dtype", "dialect"), cases())
def test_inline_modules_equal_eager(name: str, dtype: str, dialect: str) -> None:
    model, inputs = MODELS[name](DTYPES[dtype])
    module = exported(name, dialect, "inline", DTYPES[dtype])
    assert module.kernels
    exact, bound = bound_of(model, inputs)
    computed = run_in_iree(module, model, inputs)
    expected = eager(model, inputs).double().numpy()
    assert np.all(np.abs(computed - exact) <= bound)
    assert np.all(np.abs(computed - expected) <= 2 * bound)
    # the bound must be able to fail: it is far below the size of the result
    assert bound.max() < 0.1 * np.abs(exact).max()


def test_weights_as_resources_run_without_them() -> None:
    model, inputs = one()
    module = export_mlir(model, inputs, dialect="linalg", kernels="inline", weights="resources")
    exact, bound = bound_of(model, inputs)
    assert np.all(np.abs(run_in_iree(module, model, inputs) - exact) <= bound)


def test_one_dynamic_module_serves_many_token_counts() -> None:
    model, inputs = one()
    shapes = {"x": {0: torch.export.Dim("tokens", max=4096)}}
    module = export_mlir(model, inputs, dialect="linalg", kernels="inline", dynamic_shapes=shapes)
    for tokens in (1, 7, 300):
        x = {"x": torch.randn(tokens, 16)}
        exact, bound = bound_of(model, x)
        assert np.all(np.abs(run_in_iree(module, model, x) - exact) <= bound)


def test_columns_between_kernels_compute_the_same() -> None:
    from test_mlir_export import columns

    model = columns()
    inputs = {"x": torch.randn(4, 16)}
    module = export_mlir(model, inputs, dialect="stablehlo", kernels="inline")
    x = inputs["x"].double()
    u, v, p, q = (w.detach().double() for w in (model.u, model.v, model.p, model.q))
    exact = (x @ u.T @ v.T @ p.T @ q.T).numpy()
    # four contractions of at most 16 terms in float32, each with one rounding of its result
    size = (x.abs() @ u.T.abs() @ v.T.abs() @ p.T.abs() @ q.T.abs()).numpy()
    bound = 4 * (16 + 1) * 2.0**-24 * size
    assert np.all(np.abs(run_in_iree(module, model, inputs) - exact) <= bound)
