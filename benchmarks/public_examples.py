"""Kernels of nki-samples and of the documentation, with references written here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from public_outcomes import Case, WrongError

from nmm_compiler.simulator.loading.private_modules import PrivateModules
from nmm_compiler.simulator.run import simulate
from nmm_compiler.simulator.tensors import dtypes

BF16 = ml_dtypes.bfloat16


def close(actual: np.ndarray, wanted: np.ndarray, terms: int = 1) -> None:
    """Check values of sums of `terms` products, for the rounding of the output's dtype."""
    if actual.shape != wanted.shape:
        raise WrongError(f"shape {actual.shape}, wanted {wanted.shape}")
    if actual.dtype.kind in "iu":
        if not np.array_equal(actual, wanted):
            raise WrongError("integers differ")
        return
    unit = float(ml_dtypes.finfo(actual.dtype).eps)
    bound = 2 * unit * np.abs(wanted) + 4 * terms * 2.0**-24 * max(float(np.abs(wanted).max()), 1)
    if actual.dtype == np.dtype(BF16):
        bound = bound + unit * np.sqrt(terms)
    excess = np.abs(actual.astype(np.float64) - wanted) - bound
    if not (excess <= 0).all():
        raise WrongError(f"largest error above its bound by {np.nanmax(excess):.3g}")


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(dtype)


MATMULS = {
    "nki_matmul_basic_": (128, 64, 512), "nki_matmul_tiled_": (1024, 512, 1024),
    "nki_matmul_hoist_load_": (1024, 512, 1024),
    "nki_matmul_block_free_dimension_": (1024, 512, 1024),
    "nki_matmul_fully_optimized_": (1024, 2048, 1024),
}  # fmt: skip
"""Kernels of the tutorial on matrix products, with k, m and n."""


def example_cases(folder: Path) -> Iterator[Case]:
    """Yield the tutorials that have a file under `folder`; but for products, by `import nki`."""
    x4 = normal(4, 8, 8)
    ints = np.arange(60, dtype=np.int8).reshape(5, 12)
    a, b = normal(256, 1024), normal(256, 1024)
    delta, u, big_a, big_b, big_c = mamba_inputs()
    table: list[tuple[str, str, tuple[Any, ...], Callable[[], Any]]] = [
        (
            "average_pool2d/average_pool2d_nki_kernels.py", "tensor_avgpool_kernel", (x4, 2),
            lambda: x4.reshape(4, 4, 2, 4, 2).mean((2, 4)),
        ),
        (
            "transpose2d/transpose2d_nki_kernels.py", "tensor_transpose2D_kernel_",
            (ints, (3, 4)), lambda: ints.reshape(5, 3, 4).transpose(0, 2, 1).reshape(5, 12),
        ),
        (
            "tensor_addition/tensor_addition_nki_kernels.py", "nki_tensor_add", (a, b),
            lambda: a + b,
        ),
        *[
            (
                "fused_mamba/mamba_nki_kernels.py", name, (delta, u, big_a, big_b, big_c),
                lambda: mamba(delta, u, big_a, big_b, big_c),
            )
            for name in ("mamba_v1", "mamba_v2", "mamba_v3")
        ],
        ("layout-pass.py", "tensor_exp_kernel_", (a[:128, :512],), lambda: np.exp(a[:128, :512])),
        (
            "index-case-1.py", "tensor_split_kernel_", (a[:4, :5],),
            lambda: (a[:4, :5:2], a[:4, 1:5:2]),
        ),
        (
            "index-case-3.py", "tensor_maxpool_kernel_", (x4, 2),
            lambda: x4.reshape(4, 4, 2, 4, 2).max((2, 4)),
        ),
        (
            "getting_started_baremetal.py", "nki_tensor_add_kernel", (a[:4], b[:4]),
            lambda: a[:4] + b[:4],
        ),
    ]  # fmt: skip
    for file, name, arrays, wanted in table:
        path = folder / file
        text = path.read_text() if path.is_file() else ""
        if "import nki" in text.replace("import neuronxcc.nki", ""):
            run = functools.partial(_example, f"{path}:{name}", arrays, wanted, 2048)
            yield f"{Path(file).parent.name or Path(file).stem} {name}", run
    path = folder / "matrix_multiplication" / "matrix_multiplication_nki_kernels.py"
    for name, (k, m, n) in MATMULS.items() if path.is_file() else ():
        left, right = normal(k, m, dtype=BF16), normal(k, n, dtype=BF16)
        product = functools.partial(np.matmul, left.T.astype(np.float64), right.astype(np.float64))
        run = functools.partial(_example, f"{path}:{name}", (left, right), product, k)
        yield f"matmul {name}", run


def _example(kernel: str, arrays: tuple[Any, ...], wanted: Callable[[], Any], terms: int) -> None:
    outputs = simulate(kernel, *arrays, mode="functional").outputs or ()
    references = wanted()
    references = references if isinstance(references, tuple) else (references,)
    for output, reference in zip(outputs, references, strict=True):
        close(output, reference, terms)


def mx_cases(folder: Path) -> Iterator[Case]:
    """Yield the MXFP tutorial's kernels (trn3), with the tutorial's own golden functions."""
    path = folder / "mxfp-matmul" / "mx_kernels.py"
    if not path.is_file():
        return
    for kind in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"):
        yield f"mx offline {kind}", functools.partial(_mx_product, path, kind, True)
        yield f"mx on device {kind}", functools.partial(_mx_product, path, kind, False)
    for how in ("tensor_copy", "dma"):
        yield f"mx strided {how}", functools.partial(_mx_strided, path, how)


def _mx_product(path: Path, kind: str, offline: bool) -> None:
    golden: Any = PrivateModules([path.parent]).load("mx_cpu_utils")
    np.random.seed(0)
    dtype = getattr(ml_dtypes, kind)
    other = dtype if offline else ml_dtypes.float8_e4m3fn
    _, _, a, a_scale = golden.generate_stabilized_mx_data(dtype, (128, 512))
    wide, _, b, b_scale = golden.generate_stabilized_mx_data(other, (128, 2048))
    if offline:
        name, given = "kernel_offline_quantized_mx_matmul", [b, b_scale]
    else:
        name, given = "kernel_on_device_quantize_matmul_mx", [wide.astype(BF16)]
        b, b_scale = golden.quantize_mx_golden(wide, other)
    types = [dtypes.ALL[f"{kind}_x4"], *([] if offline else [dtypes.ALL["float8_e4m3fn_x4"]])]
    result = simulate(f"{path}:{name}", a, a_scale, *given, *types, target="trn3",
                      mode="functional")  # fmt: skip
    wanted = golden.nc_matmul_mx_golden(a, b, a_scale, b_scale, dtype, other)
    if not np.allclose(result.output.astype(np.float32), wanted, rtol=5e-2, atol=5e-2):
        raise WrongError("outside the tutorial's tolerance, rtol = atol = 0.05")


def _mx_strided(path: Path, how: str) -> None:
    a, b = normal(512, 128, dtype=BF16), normal(512, 512, dtype=BF16)
    result = simulate(
        f"{path}:kernel_copy_strided_quantize_matmul_mx", a, b, dtypes.ALL["float8_e4m3fn_x4"],
        how == "tensor_copy", target="trn3", mode="functional",
    )  # fmt: skip
    x, y = a.astype(np.float64), b.astype(np.float64)
    # two factors rounded to 3 mantissa bits, the largest of a block to 2, and bfloat16
    bound = 2.2 * 2.0**-3 * (np.abs(x).T @ np.abs(y))
    if not (np.abs(result.output - x.T @ y) <= bound).all():
        raise WrongError("outside the rounding of MXFP8")


def mamba_inputs() -> tuple[np.ndarray, ...]:
    batch, channels, states, length = 1, 256, 16, 512
    r = np.random.default_rng(1)
    delta = 0.1 * np.abs(r.standard_normal((batch, channels, length), dtype=np.float32))
    u = r.standard_normal((batch, channels, length), dtype=np.float32)
    a = -np.abs(r.standard_normal((channels, states), dtype=np.float32))
    b, c = (r.standard_normal((batch, states, length), dtype=np.float32) for _ in range(2))
    return delta, u, a, b, c


def mamba(
    delta: np.ndarray, u: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> np.ndarray:
    decay = np.exp(delta[:, :, None, :].astype(np.float64) * a[None, :, :, None])
    drive = (delta * u)[:, :, None, :] * b[:, None].astype(np.float64)
    state = np.zeros(decay.shape[:3])
    out = np.zeros(delta.shape)
    for i in range(delta.shape[2]):
        state = decay[..., i] * state + drive[..., i]
        out[..., i] = (state * c[:, None, :, i]).sum(2)
    return out
