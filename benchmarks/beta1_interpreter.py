"""Run emitted NKI Beta 1 kernels in an interpreter that is not ours: triton-viz's NKI interpreter.

What it covers, and is used for here: tensors and their views (basic and nl.arange indices,
reshape, broadcast_to), comparisons of nl.arange, nl.ndarray, nl.zeros, nl.load, nl.store,
nl.matmul, nl.copy, nl.multiply, the unary functions, and its rewriting of loads and stores. What it
lacks is in `interpreter` and `_isa`: dtypes and memories, which it takes from neuronxcc, ranges
other than from 0, nl.ds, and nki.isa, whose functions are said here in terms of its own. Its gelu
is the tanh one; it knows no fp8, and fp32 has no DMA transposes.

Needs a clone of github.com/Deep-Learning-Profiling-Tools/triton-viz; nothing of it is installed.

Usage: python benchmarks/beta1_interpreter.py CHECKOUT [--target trn1]
"""

from __future__ import annotations

import importlib
import operator
import sys
import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import typer
from beta1_kernels import unpacked
from kernel_specs import listed

from nmm_compiler.codegen.build import Kernel, build_kernel
from nmm_compiler.codegen.check_against_float64 import Proof, prove
from nmm_compiler.options import Options


def interpreter(checkout: Path) -> tuple[Any, Any]:
    """Return triton-viz's interpreter and its transformer, imported from a clone."""
    folder = unpacked(checkout, "HEAD", "triton_viz")
    for name in ("triton_viz", "triton_viz.core"):  # without their doors, which want an install
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
    for name in ("nki", "nki.language", "nki.isa"):
        sys.modules[f"neuronxcc.{name}"] = types.ModuleType(f"neuronxcc.{name}")
    nki, nl, nisa = (sys.modules[f"neuronxcc.{n}"] for n in ("nki", "nki.language", "nki.isa"))
    sys.modules["neuronxcc"] = types.ModuleType("neuronxcc")
    sys.modules["neuronxcc"].nki, nki.language, nki.isa = nki, nl, nisa
    memories = {name: name for name in ("sbuf", "psum", "hbm", "shared_hbm")}
    ranges = {"static_range": range, "sequential_range": range}
    dtypes = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "par_dim": int}
    vars(nl).update(dtypes | memories | ranges | {"broadcast_to": None})
    nl.ds = lambda start, size: slice(start, start + size)
    found = importlib.import_module("triton_viz.core.simulation.nki")
    found.nki_patch_lang()
    nl.affine_range = range  # its own takes no start
    nl.add, nl.subtract = operator.add, operator.sub
    nl.maximum = lambda x, least: found.nki_builder.relu(x + -least) + least
    nl.minimum = lambda x, most: x - found.nki_builder.relu(x - most)
    vars(nisa).update(_isa(found))
    return found, importlib.import_module("triton_viz.core.frontend.nki_transform")


def _isa(viz: Any) -> dict[str, Any]:
    """Return functions of nki.isa in terms of the interpreter's own."""
    builder = viz.nki_builder

    def activation(
        op: Any, data: Any, bias: Any = None, scale: Any = 1.0, dtype: Any = None
    ) -> Any:
        scaled = builder.multiply(data, scale)
        return op(scaled if bias is None else scaled + bias)

    def tensor_scalar(
        data: Any, op0: Any, operand0: Any, op1: Any = None, operand1: Any = None, dtype: Any = None
    ) -> Any:
        first = op0(data, operand0)
        return first if op1 is None else op1(first, operand1)

    def scalar_tensor_tensor(
        data: Any, op0: Any, operand0: Any, op1: Any, operand1: Any, dtype: Any = None
    ) -> Any:
        return op1(op0(data, operand0), operand1)

    def affine_select(pred: Any, on_true_tile: Any, on_false_value: float, dtype: Any) -> Any:
        assert pred.shape == on_true_tile.shape
        return viz.NDArray(value=np.where(pred.data, on_true_tile.data, on_false_value))

    def tensor_reduce(
        op: Any, data: Any, axis: int, negate: bool = False, dtype: Any = None
    ) -> Any:
        total = (np.sum if op is operator.add else np.max)(data.data, axis)
        rows = total if total.ndim > 1 else total.reshape(len(total), 1)
        return viz.NDArray(value=-rows if negate else rows)

    slices = viz.NDArray.__getitem__

    def with_place(array: Any, keys: Any) -> Any:
        """Slice; the result knows where it is from, since one by nl.arange is a copy."""
        made = slices(array, keys)
        given = keys if isinstance(keys, tuple) else (keys,)
        plain = (key.data if isinstance(key, viz.NDArray) else key for key in given)
        made.place = array.data, tuple(plain)
        return made

    viz.NDArray.__getitem__ = with_place

    def dma_copy(dst: Any, src: Any) -> None:
        memory, keys = dst.place
        memory[keys] = src.data

    return {
        "activation": activation,
        "dma_copy": dma_copy,
        "affine_select": affine_select,
        "tensor_reduce": tensor_reduce,
        "tensor_scalar": tensor_scalar,
        "scalar_tensor_tensor": scalar_tensor_tensor,
        "tensor_tensor": lambda data1, data2, op, dtype=None, engine=None: op(data1, data2),
        "reciprocal": lambda data, dtype: builder.reciprocal(data),
        "tensor_copy": lambda src, engine=None, dtype=None: builder.copy(src),
        "nc_matmul": lambda stationary, moving, **hints: builder.matmul(
            stationary, moving, transpose_x=True
        ),
        "nc_transpose": lambda data, engine=None: builder.load_transpose2d(data),
        "memset": lambda shape, value, dtype: viz.NDArray(value=np.full(shape, value, dtype)),
        "vector_engine": "vector",
        "tensor_engine": "tensor",
        "scalar_engine": "scalar",
        "gpsimd_engine": "gpsimd",
    }


def run(kernel: Kernel, viz: Any, transform: Any) -> Proof:
    """Compare what a kernel computes in the interpreter with float64."""

    def simulate(*arrays: np.ndarray, mode: str) -> Any:
        viz.nki_builder.shared_hbm_arrays = {}
        scope: dict[str, Any] = {}
        code = compile(transform.transform_code(kernel.source), f"{kernel.name}.py", "exec")
        exec(code, scope)  # noqa: S102  (a kernel that this process has emitted)
        results = scope[kernel.name](*(viz.NDArray(value=array.copy()) for array in arrays))
        several = results if isinstance(results, tuple) else (results,)
        return types.SimpleNamespace(outputs=tuple(one.data for one in several))

    interpreted: Any = types.SimpleNamespace(name=kernel.name, spec=kernel.spec, simulate=simulate)
    return prove(interpreted, seed=5)


def main(checkout: Path, target: str = "trn1") -> None:
    """Build every kernel, run it in the interpreter, print a line each; 1 unless all are right.

    CHECKOUT: a clone of triton-viz.
    """
    plain, small = Options(cache="off"), Options(cache="off", instruction_budget=100)
    kernels = [
        build_kernel(spec, target, dialect="neuronxcc", options=options)
        for table, options in (("interpreted", plain), ("looped", small))
        for _, spec in listed(table, dtype="float32")
    ]
    viz, transform = interpreter(checkout)
    good = True
    for kernel in kernels:
        proof = run(kernel, viz, transform)
        good &= proof.passed
        schedule = kernel.schedule.to_dict()
        loop = ", a loop" if schedule.get("m_loop") or schedule.get("loop") else ""
        said = "right" if proof.passed else "WRONG"
        print(f"{kernel.spec}{loop}: {said}, {100 * proof.max_bound_share:.1f} % of its bound")
    sys.exit(not good)


if __name__ == "__main__":
    typer.run(main)
