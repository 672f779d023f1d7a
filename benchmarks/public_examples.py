"""Kernels of nki-samples and of the documentation, with references written here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from public_outcomes import WrongError

from nmm_compiler.simulator.loading.private_modules import PrivateModules
from nmm_compiler.simulator.run import simulate
from nmm_compiler.simulator.tensors import dtypes


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
    if actual.dtype == np.dtype(ml_dtypes.bfloat16):
        bound = bound + unit * np.sqrt(terms)
    excess = np.abs(actual.astype(np.float64) - wanted) - bound
    if not (excess <= 0).all():
        raise WrongError(f"largest error above its bound by {np.nanmax(excess):.3g}")


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(dtype)


def matmul_cases(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    path = folder / "matrix_multiplication" / "matrix_multiplication_nki_kernels.py"
    if not path.is_file():
        return
    for name, shape in (
        ("nki_matmul_basic_", (128, 64, 512)),
        ("nki_matmul_tiled_", (1024, 512, 1024)),
        ("nki_matmul_hoist_load_", (1024, 512, 1024)),
        ("nki_matmul_block_free_dimension_", (1024, 512, 1024)),
        ("nki_matmul_fully_optimized_", (1024, 2048, 1024)),
    ):

        def run(name: str = name, shape: tuple[int, int, int] = shape) -> None:
            k, m, n = shape
            a, b = normal(k, m, dtype=ml_dtypes.bfloat16), normal(k, n, dtype=ml_dtypes.bfloat16)
            wanted = a.astype(np.float64).T @ b.astype(np.float64)
            close(simulate(f"{path}:{name}", a, b, mode="functional").output, wanted, k)

        yield f"matmul {name}", run


def mx_cases(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the MXFP tutorial's kernels (trn3), with the tutorial's own golden functions."""
    folder = folder / "mxfp-matmul"
    path = folder / "mx_kernels.py"
    if not path.is_file():
        return
    golden = PrivateModules([folder]).load("mx_cpu_utils")
    kinds = {
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e5m2": ml_dtypes.float8_e5m2,
        "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
    }

    def check(output: np.ndarray, wanted: np.ndarray) -> None:
        if not np.allclose(output.astype(np.float32), wanted, rtol=5e-2, atol=5e-2):
            raise WrongError("outside the tutorial's tolerance, rtol = atol = 0.05")

    def offline(kind: str) -> None:
        np.random.seed(0)
        _, _, a, a_scale = golden.generate_stabilized_mx_data(kinds[kind], (128, 512))  # type: ignore[union-attr]
        _, _, b, b_scale = golden.generate_stabilized_mx_data(kinds[kind], (128, 2048))  # type: ignore[union-attr]
        name = f"{path}:kernel_offline_quantized_mx_matmul"
        result = simulate(name, a, a_scale, b, b_scale, dtypes.ALL[f"{kind}_x4"],
                          target="trn3", mode="functional")  # fmt: skip
        wanted = golden.nc_matmul_mx_golden(a, b, a_scale, b_scale, kinds[kind], kinds[kind])  # type: ignore[union-attr]
        check(result.output, wanted)

    def on_device(kind: str) -> None:
        np.random.seed(0)
        _, _, a, a_scale = golden.generate_stabilized_mx_data(kinds[kind], (128, 512))  # type: ignore[union-attr]
        data, _, _, _ = golden.generate_stabilized_mx_data(kinds["float8_e4m3fn"], (128, 2048))  # type: ignore[union-attr]
        x4 = dtypes.ALL[f"{kind}_x4"], dtypes.float8_e4m3fn_x4
        name = f"{path}:kernel_on_device_quantize_matmul_mx"
        result = simulate(name, a, a_scale, data.astype(ml_dtypes.bfloat16), *x4, target="trn3",
                          mode="functional")  # fmt: skip
        b, b_scale = golden.quantize_mx_golden(data, kinds["float8_e4m3fn"])  # type: ignore[union-attr]
        wanted = golden.nc_matmul_mx_golden(  # type: ignore[union-attr]
            a, b, a_scale, b_scale, kinds[kind], kinds["float8_e4m3fn"]
        )
        check(result.output, wanted)

    def strided(use_tensor_copy: bool) -> None:
        a, b = (
            normal(512, 128, dtype=ml_dtypes.bfloat16),
            normal(512, 512, dtype=ml_dtypes.bfloat16),
        )
        name = f"{path}:kernel_copy_strided_quantize_matmul_mx"
        result = simulate(name, a, b, dtypes.float8_e4m3fn_x4, use_tensor_copy, target="trn3",
                          mode="functional")  # fmt: skip
        x, y = a.astype(np.float64), b.astype(np.float64)
        # two factors rounded to 3 mantissa bits, the largest of a block to 2, and bfloat16
        bound = 2.2 * 2.0**-3 * (np.abs(x).T @ np.abs(y))
        if not (np.abs(result.output - x.T @ y) <= bound).all():
            raise WrongError("outside the rounding of MXFP8")

    for kind in kinds:
        yield f"mx offline {kind}", lambda kind=kind: offline(kind)  # type: ignore[misc]
        yield f"mx on device {kind}", lambda kind=kind: on_device(kind)  # type: ignore[misc]
    for flag in (True, False):
        how = "tensor_copy" if flag else "dma"
        yield f"mx strided {how}", lambda flag=flag: strided(flag)  # type: ignore[misc]


def example_cases(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the other tutorials that have a file under `folder` and use `import nki`."""
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
        if not path.is_file() or "import nki" not in path.read_text().replace(
            "import neuronxcc.nki", ""
        ):
            continue

        def run(
            path: Path = path,
            name: str = name,
            arrays: tuple[Any, ...] = arrays,
            wanted: Callable[[], Any] = wanted,
        ) -> None:
            outputs = simulate(f"{path}:{name}", *arrays, mode="functional").outputs or ()
            references = wanted()
            references = references if isinstance(references, tuple) else (references,)
            for output, reference in zip(outputs, references, strict=True):
                close(output, reference, 2048)

        yield f"{Path(file).parent.name or Path(file).stem} {name}", run


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
