"""Run public NKI kernels from checkouts you have, and compare them with their own references.

    python benchmarks/public_kernels.py --samples nki-samples --library nki-library \
        --docs aws-neuron-sdk

Sources: aws-neuron/nki-samples, aws-neuron/nki-library and aws-neuron/aws-neuron-sdk on GitHub.
The sample kernels are checked against NumPy formulas here; the library's kernels run its own
integration tests: their inputs, their torch or NumPy references, their tolerances, with the
simulator in place of the device. Per kernel: pass, wrong, unsupported, refused (a strict rule),
too slow, too large, or failed (in the kernel's or the test's own code). A kernel passes when some
cases passed and the others were skipped, too slow or too large; "partly" names the worst of them.
Each library test file runs in a process of its own with limits of time and memory: cumsum, rope,
max, rmsnorm_quant, router_topk, topk, qkv, mlp, output_projection, attention_cte and _tkg, rmsnorm
and layernorm; the rest with --all.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import inspect
import io
import itertools
import logging
import math
import multiprocessing
import random
import resource
import signal
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nmm_compiler.errors import KernelFailedError, NmmError, UnsupportedInstructionError
from nmm_compiler.simulator import dtypes
from nmm_compiler.simulator.loader import PrivateModules
from nmm_compiler.simulator.run import simulate

LIBRARY_TESTS = [  # what runs unless --all is given
    "core/cumsum/test_cumsum.py",
    "core/embeddings/test_rope.py",
    "core/embeddings/test_rope_hf.py",
    "core/max/test_cascaded_max.py",
    "core/rmsnorm/test_rmsnorm_quant.py",
    "core/router_topk/test_router_topk.py",
    "core/topk/test_topk.py",
    "core/qkv/test_qkv_cte.py",
    "core/qkv/test_qkv_tkg.py",
    "core/mlp/test_mlp_cte.py",
    "core/mlp/test_mlp_tkg.py",
    "core/output_projection/test_output_proj_cte.py",
    "core/output_projection/test_output_proj_tkg.py",
    "core/attention/test_attention_cte.py",
    "core/attention/test_attention_tkg.py",
    "core/subkernels/test_rmsnorm_tkg.py",
    "core/subkernels/test_layernorm_tkg.py",
]
FURTHER_LIBRARY_TESTS = [
    "core/attention/test_attention_bwd.py",
    "core/attention/test_gen_mask_tkg.py",
    "core/subkernels/test_find_nonzero_indices.py",
    "core/subkernels/test_indexed_flatten.py",
    "core/utils/test_cross_partition_copy.py",
    "core/utils/test_tp_broadcast.py",
    "core/utils/test_tensor_view.py",
    "core/moe/moe_cte/test_moe_cte.py",
    "core/moe/moe_tkg/test_moe_tkg.py",
    "core/moe_block/test_moe_block_tkg.py",
    "experimental/conv/test_conv1d.py",
    "experimental/conv/test_depthwise_conv1d.py",
    "experimental/dynamic_shapes/test_dynamic_elementwise_add.py",
    "experimental/loss/test_cross_entropy_forward.py",
    "experimental/loss/test_cross_entropy_backward.py",
    "experimental/benchmark/test_find_nonzero_indices_with_count.py",
]


class TooSlowError(BaseException):
    """A case ran longer than its time limit."""


class WrongError(Exception):
    """Values, shapes or number of outputs differ from the reference."""


def classify(error: BaseException) -> str:
    if isinstance(error, WrongError):
        return "wrong"
    if isinstance(error, TooSlowError):
        return "too slow"
    causes = (error, error.__cause__)
    if any(isinstance(e, MemoryError) or "DefaultCPUAllocator" in str(e) for e in causes):
        return "too large"
    if type(error).__name__ == "Skipped":
        return "skipped"
    if isinstance(error, UnsupportedInstructionError):
        return "unsupported"
    if isinstance(error, SyntaxError):
        return "syntax error in the checkout"
    if isinstance(error, KernelFailedError):
        cause = error.__cause__
        return "unsupported" if isinstance(cause, ImportError) else "failed"
    return "refused" if isinstance(error, NmmError) else "failed"


def timed(limit: float, function: Callable[[], Any]) -> None:
    """Run `function`; TooSlowError after `limit` seconds."""

    def stop(*_: Any) -> None:
        raise TooSlowError(f"longer than {limit:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        function()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def without_rules(limit: float, run: Callable[[], Any]) -> str:
    """Run a refused case again with strict=False; say what comes out then."""
    Case.strict = False
    try:
        timed(limit, run)
        return "refused, right with strict=False"
    except BaseException as error:  # a table of what goes wrong
        if isinstance(error, KeyboardInterrupt):
            raise
        return "refused" if classify(error) != "wrong" else "refused, wrong with strict=False"
    finally:
        Case.strict = True


# nki-samples and the documentation's examples, with references written here


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


# nki-library, through its own tests


class Case:
    """Stands in for the library's Orchestrator: simulates a kernel and compares its outputs."""

    strict = True

    def __init__(self) -> None:
        self.runs = 0

    def execute(self, arguments: Any, *_: Any, **__: Any) -> None:
        self.runs += 1
        inputs = {
            name.removesuffix(".must_alias_input"): value
            for name, value in (arguments.kernel_input or {}).items()
        }
        target = str(arguments.compiler_input.platform_target)
        grid = arguments.compiler_input.logical_nc_config
        result = simulate(
            arguments.kernel_func, target=target.replace("_a0", ""), grid=grid,
            mode="functional", strict=Case.strict, **inputs,
        )  # fmt: skip
        golden = arguments.validation_args.golden_output
        lazy = hasattr(golden, "golden")
        names = list(golden.output_ndarray if lazy else golden)
        outputs = result.outputs or ()
        if len(outputs) != len(names):
            raise WrongError(f"{len(outputs)} outputs, wanted {len(names)}")
        for name, output in zip(names, outputs, strict=True):
            if lazy:
                if golden.golden is None:
                    continue
                self.compare(name, output, golden.golden[name], golden.output_ndarray[name],
                             arguments.validation_args)  # fmt: skip
            elif not golden[name].validator(output):
                raise WrongError(f"the library's validator of {name} says no")

    @staticmethod
    def compare(name: str, output: Any, wanted: Any, shape: Any, tolerance: Any) -> None:
        if hasattr(wanted, "validator"):
            if not wanted.validator(output):
                raise WrongError(f"the library's validator of {name} says no")
            return
        wanted = np.asarray(wanted)
        if wanted.shape != output.shape:
            raise WrongError(f"{name} has shape {output.shape}, wanted {wanted.shape}")
        actual = output.astype(np.float64)
        reference = wanted.astype(np.asarray(shape).dtype).astype(np.float64)
        scale = np.abs(np.where(np.isfinite(reference), reference, 0)).max(initial=0.0)
        bound = tolerance.absolute_accuracy + tolerance.relative_accuracy * scale
        same = (actual == reference) | (np.isnan(actual) & np.isnan(reference))
        apart = np.where(same, 0.0, np.abs(actual - reference))
        if not (apart <= bound).all():
            raise WrongError(
                f"{name} differs by {np.nanmax(apart):.3g}, allowed {bound:.3g} "
                f"({int((~(apart <= bound)).sum())} of {apart.size} elements)"
            )


def static_cast(value: Any, dtype: Any) -> np.ndarray:
    found = dtypes.find(dtype)
    return np.asarray(value).astype(found.numpy if found is not None else dtype)


def neuron_dtypes() -> types.ModuleType:
    """Return what the tests use of AWS's neuron_dtypes package, over ml_dtypes."""
    module = types.ModuleType("neuron_dtypes")
    for name, kind in dtypes.ALL.items():
        setattr(module, name, kind.numpy.type if kind.kind != "packed" else kind)
    module.static_cast = static_cast  # type: ignore[attr-defined]
    module.finfo = ml_dtypes.finfo  # type: ignore[attr-defined]
    module.sizeinbytes = lambda d: static_cast(0, d).itemsize  # type: ignore[attr-defined]
    module.is_float_type = lambda d: np.dtype(d).kind in "fV"  # type: ignore[attr-defined]
    return module


class TestModules(PrivateModules):
    """Loads the library's tests; packages of its test machinery that are missing are mocked."""

    __test__ = False

    def import_module(
        self, name: str, globals: Any = None, locals: Any = None,
        fromlist: Any = (), level: int = 0,
    ) -> Any:  # fmt: skip
        try:
            return super().import_module(name, globals, locals, fromlist, level)
        except ModuleNotFoundError as error:
            top = (error.name or "").partition(".")[0]
            if level or top in ("", "nki", "nkilib", "nkilib_src", "test", "torch"):
                raise
            return mock.MagicMock(name=name)


def library_modules(library: Path) -> PrivateModules:
    private = TestModules([library, library / "src"])
    private.shadows = frozenset({"test"})
    private.modules["neuron_dtypes"] = neuron_dtypes()
    manager = types.ModuleType("test.utils.test_orchestrator")
    manager.Orchestrator = Case  # type: ignore[attr-defined]
    private.modules["test.utils.test_orchestrator"] = manager
    allpairs = types.ModuleType("allpairspy")
    allpairs.AllPairs = lambda parameters, **_: itertools.product(*parameters)  # type: ignore[attr-defined]
    private.modules["allpairspy"] = allpairs
    harness = types.ModuleType("typing_extensions")
    harness.override = lambda f: f  # type: ignore[attr-defined]
    private.modules.setdefault("typing_extensions", harness)
    return private


def range_sets(private: PrivateModules, function: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the positive cases of the library's range harness, the smallest first."""
    harness = private.load("test.utils.ranged_test_harness")
    assert harness is not None
    random.seed(0)
    config = getattr(function, harness.RANGE_TEST_CONFIG_ATTR_KEY)
    names, cases = harness.RangeTestHarness(config).get_unique_test_cases()
    ranked = sorted(
        (
            (
                math.prod(v for d in case.tensors.values() for v in d.values()
                          if isinstance(v, int) and v > 0),
                name, case,
            )
            for name, case in zip(names, cases, strict=True)
            if not case.is_negative_test_case
        ),
        key=lambda entry: entry[:2],
    )  # fmt: skip
    return [(name, {"range_test_options": case}) for _, name, case in ranked]


def parameter_sets(private: PrivateModules, function: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (id, arguments): the product of a test's parametrize marks."""
    choices = [list(mark_sets(mark)) for mark in getattr(function, "pytestmark", ())]
    if "range_test_options" in inspect.signature(function).parameters:
        choices.append(range_sets(private, function))
    for combination in itertools.product(*[c for c in choices if c]):
        yield (
            "-".join(label for label, _ in combination),
            {k: v for _, row in combination for k, v in row.items()},
        )


def mark_sets(mark: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (id, arguments) of one parametrize or coverage_parametrize mark."""
    if mark.name == "parametrize":
        names, values = mark.args[0], mark.args[1]
        single = isinstance(names, str) and "," not in names
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else names
        for i, value in enumerate(values):
            label = getattr(value, "id", None) or str(i)
            row = value.values if type(value).__name__ == "ParameterSet" else value
            if single and type(value).__name__ != "ParameterSet":
                row = (row,)
            yield label, dict(zip(names, row, strict=False))
    elif mark.name == "coverage_parametrize":
        choices = {
            k: getattr(v, "values", v)
            for k, v in mark.kwargs.items()
            if isinstance(getattr(v, "values", v), (list, tuple)) and k != "ids"
        }
        check = mark.kwargs.get("filter")
        for combination in itertools.islice(itertools.product(*choices.values()), 400):
            row = dict(zip(choices, combination, strict=True))
            if check is not None:
                accepted = inspect.signature(check).parameters
                star = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
                try:
                    verdict = check(**(row if star else {k: row.get(k) for k in accepted}))
                except TypeError:
                    verdict = None  # a filter for other parameters than these
                if getattr(verdict, "name", "VALID") == "INVALID":
                    continue
            yield "-".join(str(v) for v in combination), row


def library_cases(
    private: PrivateModules, file: str, limit: int
) -> Iterator[tuple[str, Callable[[], Any]]]:
    name = "test.integration.nkilib." + file.removesuffix(".py").replace("/", ".")
    module = private.load(name)
    if module is None:
        raise FileNotFoundError(file)
    platforms = private.load("test.utils.common_dataclasses").Platforms  # type: ignore[union-attr]
    given = {
        "is_negative_test_case": False, "collector": None, "platform_target": platforms.TRN2,
        "request": mock.MagicMock(),
    }  # fmt: skip
    for kind in [v for k, v in vars(module).items() if k.startswith("Test") and inspect.isclass(v)]:
        if kind.__dict__.get("__test__", True) is False:
            continue
        for test, function in inspect.getmembers(kind, inspect.isfunction):
            if not test.startswith("test"):
                continue
            sets = list(itertools.islice(parameter_sets(private, function), limit))
            for label, values in sets or [("", {})]:
                wanted = inspect.signature(function).parameters
                manager = Case()
                arguments = {"test_manager": manager, **given, **values}
                arguments = {k: v for k, v in arguments.items() if k in wanted}
                if any(
                    p.default is p.empty and n not in arguments and n != "self"
                    for n, p in wanted.items()
                ):
                    continue  # a test that needs fixtures of its own

                def run(
                    kind: Any = kind, test: str = test, arguments: Any = arguments,
                    manager: Case = manager,
                ) -> None:  # fmt: skip
                    getattr(kind(), test)(**arguments)
                    if not manager.runs:
                        raise RuntimeError("the test ran no kernel")

                yield f"{test}[{label}]", run


@dataclasses.dataclass(frozen=True)
class Row:
    """A kernel's row of the table."""

    name: str
    result: str
    good: int
    count: int
    seconds: float
    problem: str


def run_cases(
    name: str, cases: list[tuple[str, Callable[[], Any]]], seconds: float,
    say: Callable[[str], None],
) -> Iterator[Row]:  # fmt: skip
    """Run the cases, each for at most `seconds`; yield the row as it stands after each."""
    good, worst, problem, start = 0, "pass", "", time.perf_counter()
    if not cases:
        yield Row(name, "no cases", 0, 0, 0.0, "")
    for label, run in cases:
        text = ""
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the kernels' own prints
                timed(seconds, run)
            good += 1
            outcome = "pass"
        except BaseException as error:  # a table of what goes wrong
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = classify(error)
            text = f"{label}: {type(error).__name__}: {error}"[:400]
        if outcome == "refused":
            outcome = without_rules(seconds, run)
        if outcome != "pass" and (
            worst in ("pass", "skipped", "too slow", "too large")
            or (outcome == "wrong" and worst != "wrong")
        ):
            worst, problem = outcome, text
        say(f"{name} {label}: {outcome} {text[:300]}")
        passed = good and worst in ("pass", "skipped", "too slow", "too large")
        verdict = "pass" if passed else f"partly: {worst}" if good else worst
        yield Row(name, verdict, good, len(cases), time.perf_counter() - start, problem)


def syntax_errors(library: Path) -> list[Row]:
    """Return a row for each kernel file of the checkout that is no Python."""
    rows = []
    for path in sorted((library / "src").rglob("*.py")):
        try:
            ast.parse(path.read_text(encoding="utf-8"), str(path))
        except SyntaxError as error:
            name = f"library: {path.relative_to(library / 'src')}"
            problem = f"line {error.lineno}: {error.msg}"
            rows.append(Row(name, "syntax error in the checkout", 0, 0, 0.0, problem))
    return rows


def apart(
    name: str, gib: int, limit: float, rows: Callable[[], Iterator[Row]]
) -> Row:  # fmt: skip
    """Return the last of `rows()`, run in a process of its own with limits on memory and time."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (gib << 30, gib << 30))
        try:
            for row in rows():
                sender.send(row)
        except Exception as error:  # the checkout's own files
            sender.send(Row(name, classify(error), 0, 0, 0.0, f"{type(error).__name__}: {error}"))
        sender.send(None)

    process = context.Process(target=child)
    start = time.perf_counter()
    process.start()
    sender.close()
    row, why = Row(name, "too slow", 0, 0, 0.0, ""), f"stopped after {limit:.0f} s"
    try:
        while receiver.poll(max(start + limit - time.perf_counter(), 0)):
            message = receiver.recv()
            if message is None:
                why = ""
                break
            row = message
    except EOFError:
        process.join()
        why = f"the process ended with code {process.exitcode} (memory limit {gib} GiB?)"
    if process.is_alive() and why:
        process.kill()
    process.join()
    if why:
        problem = "; ".join(p for p in (row.problem, why) if p)
        row = dataclasses.replace(row, seconds=time.perf_counter() - start, problem=problem)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=Path, help="checkout of aws-neuron/nki-samples")
    parser.add_argument("--library", type=Path, help="checkout of aws-neuron/nki-library")
    parser.add_argument("--docs", type=Path, help="checkout of aws-neuron/aws-neuron-sdk")
    parser.add_argument("--only", default="", help="run names that contain this")
    parser.add_argument("--all", action="store_true", help="all library tests known to run")
    parser.add_argument("--cases", type=int, default=1, help="cases per library test")
    parser.add_argument("--seconds", type=float, default=6, help="time limit of one case")
    parser.add_argument("--file-seconds", type=float, default=30, help="of one library test file")
    parser.add_argument("--gib", type=int, default=6, help="memory limit of each process")
    parser.add_argument("--verbose", action="store_true", help="one row per case")
    options = parser.parse_args()
    if not (options.samples or options.library or options.docs):
        parser.error("give --samples, --library or --docs")
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    console = Console(width=None if sys.stdout.isatty() else 160)

    def say(text: str) -> None:
        if options.verbose:
            console.print("  " + text, markup=False)

    rows: list[Row] = []
    folders = []
    if options.samples:
        folders.append(("samples", options.samples / "src" / "nki_samples" / "tutorials"))
    if options.docs:
        folders.append(("docs", options.docs / "nki" / "examples"))
    for origin, folder in folders:
        for name, run in itertools.chain(
            matmul_cases(folder), example_cases(folder), mx_cases(folder)
        ):
            if options.only in name:
                rows += run_cases(f"{origin}: {name}", [("", run)], options.seconds, say)
    if options.library:
        library = options.library.resolve()
        rows += syntax_errors(library)
        for file in LIBRARY_TESTS + (FURTHER_LIBRARY_TESTS if options.all else []):
            if options.only not in file:
                continue
            name = f"library: {file}"

            def cases(file: str = file, name: str = name) -> Iterator[Row]:
                with contextlib.redirect_stdout(io.StringIO()):  # loggers keep the one they find
                    found = list(library_cases(library_modules(library), file, options.cases))
                yield from run_cases(name, found, options.seconds, say)

            rows.append(apart(name, options.gib, options.file_seconds, cases))
    table = Table(title="Public kernels in the simulator (strict)")
    for column in ("kernel", "result", "cases passed", "seconds", "first problem"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            row.name, row.result, f"{row.good} of {row.count}" if row.count else "",
            f"{row.seconds:.1f}", escape(row.problem),
        )  # fmt: skip
    console.print(table)
    tally = collections.Counter(row.result.partition(",")[0] for row in rows)
    console.print("; ".join(f"{count} {result}" for result, count in tally.most_common()))


if __name__ == "__main__":
    main()
