"""Kernels of nki-library, run by the library's own integration tests.

Their inputs, references and tolerances, with the simulator in place of the device.
"""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import math
import random
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet
from public_outcomes import Case, WrongError

from nmm_compiler.simulator.isa.tensor_engine import unpack
from nmm_compiler.simulator.loading.private_modules import PrivateModules
from nmm_compiler.simulator.run import simulate_ranks
from nmm_compiler.simulator.tensors import dtypes


class Orchestrator:
    """Stands in for the library's Orchestrator: simulates a kernel and compares its outputs."""

    trace_mode = None  # of the library's runs: compile, infer

    def __init__(self, target: str = "") -> None:
        self.runs = 0
        self.target = target  # in place of the one that a test asks for

    def execute(self, arguments: Any, *_: Any, **__: Any) -> None:
        self.runs += 1
        given, golden = arguments.kernel_input or {}, arguments.validation_args.golden_output
        ranks = getattr(arguments.inference_args, "collective_ranks", 1) or 1
        asked = arguments.compiler_input
        inputs = []
        for rank in range(ranks):
            own = given.for_rank(rank) if hasattr(given, "for_rank") else given
            own = {n.removesuffix(".must_alias_input"): v for n, v in own.items()}
            inputs.append(without_write_back(own))
        results = simulate_ranks(
            arguments.kernel_func, inputs, mode="functional",
            target=self.target or str(asked.platform_target).replace("_a0", ""),
            grid=asked.logical_nc_config,
        )  # fmt: skip
        for rank, result in enumerate(results):
            own = golden.for_rank(rank) if hasattr(golden, "for_rank") else golden
            self.check(result.outputs or (), own, arguments.validation_args)

    def check(self, outputs: tuple[Any, ...], golden: Any, tolerance: Any) -> None:
        """Compare the outputs of a rank with its golden ones."""
        lazy = hasattr(golden, "output_ndarray")
        shapes = golden.output_ndarray if lazy else golden
        # without a generator the placeholders are the values, or nothing is to be compared
        wanted = golden.golden if lazy else golden
        if len(outputs) != len(shapes):
            raise WrongError(f"{len(outputs)} outputs, wanted {len(shapes)}")
        for name, output in zip(shapes, outputs, strict=True):
            if wanted is not None:
                self.compare(name, output, wanted[name], shapes[name], tolerance)

    @staticmethod
    def compare(name: str, output: Any, wanted: Any, shape: Any, tolerance: Any) -> None:
        if hasattr(wanted, "validator"):
            if not wanted.validator(output):
                raise WrongError(f"the library's validator of {name} says no")
            return
        wanted = np.asarray(wanted)
        if wanted.size != output.size:
            raise WrongError(f"{name} has shape {output.shape}, wanted {wanted.shape}")
        # the library reads the bytes that the device wrote in the shape of its reference
        actual, reference, kind = output.reshape(-1), wanted.reshape(-1), np.asarray(shape).dtype

        def parts() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for at in range(0, wanted.size, _COMPARED_AT_ONCE):
                part = slice(at, at + _COMPARED_AT_ONCE)
                yield (
                    actual[part].astype(np.float64),
                    reference[part].astype(kind).astype(np.float64),
                )

        scale = largest = 0.0
        beyond = 0
        for _, values in parts():
            values = np.abs(values)
            scale = max(scale, values.max(where=np.isfinite(values), initial=0.0))
        bound = tolerance.absolute_accuracy + tolerance.relative_accuracy * scale
        for got, values in parts():
            apart = distances(got, values)
            largest = np.fmax(largest, np.fmax.reduce(apart, initial=0.0))
            beyond += int((~(apart <= bound)).sum())
        if beyond:
            raise WrongError(
                f"{name} differs by {largest:.3g}, allowed {bound:.3g} "
                f"({beyond} of {wanted.size} elements)"
            )


_COMPARED_AT_ONCE = 1 << 22
"""How many elements of an output and its reference are in float64 at a time."""


def distances(actual: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return |actual - reference|: 0 where both are NaN or the same infinity."""
    same = (actual == reference) | (np.isnan(actual) & np.isnan(reference))
    with np.errstate(invalid="ignore"):  # infinity less infinity
        return np.where(same, 0.0, np.abs(actual - reference))


def without_write_back(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with read-only views of its arrays, one view for each array.

    The library's reference is computed after the kernel and from the same arrays, which a kernel
    that writes to its inputs must not change.
    """
    arrays = {id(v): v for v in inputs.values() if isinstance(v, np.ndarray)}
    views = {identity: array.view() for identity, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return {name: views.get(id(value), value) for name, value in inputs.items()}


def static_cast(value: Any, dtype: Any) -> np.ndarray:
    """Return values in another dtype; x4-packed ones hold four values of the last dimension."""
    array = np.asarray(value)
    before = dtypes.find(array.dtype)
    if before is not None and before.kind == "packed":
        if dtypes.find(dtype) == before:
            return array
        codes = np.ascontiguousarray(array).view(before.numpy)
        array = unpack(codes.reshape(codes.shape[0], -1), before)
        array = array.reshape(*codes.shape[:-1], -1)
    found = dtypes.find(dtype)
    if found is None or found.kind != "packed":
        return array.astype(found.numpy if found is not None else dtype)
    element = np.dtype(getattr(ml_dtypes, found.removesuffix("_x4")))
    limit = float(ml_dtypes.finfo(element).max)
    bits = np.clip(array.astype(np.float32), -limit, limit).astype(element).view(np.uint8)
    fours = bits.reshape(*bits.shape[:-1], -1, 4)
    if found.item_bytes == 4:
        packed = np.ascontiguousarray(fours).view(np.uint32)[..., 0]
    else:
        packed = sum((fours[..., i].astype(np.uint16) & 0xF) << (4 * i) for i in range(4))
    return np.asarray(packed).astype(found.numpy).view(dtypes.PACKED_NUMPY[found])


def neuron_dtypes() -> types.SimpleNamespace:
    """Return what the tests use of AWS's neuron_dtypes package, over ml_dtypes."""
    packed = dtypes.PACKED_NUMPY
    # np.dtype(name), as the package makes it known to NumPy
    np._core.numerictypes.sctypeDict.update(packed)  # type: ignore[attr-defined]
    return types.SimpleNamespace(
        **{name: packed.get(name, kind.numpy.type) for name, kind in dtypes.ALL.items()},
        static_cast=static_cast, finfo=ml_dtypes.finfo,
        sizeinbytes=lambda dtype: static_cast(0, dtype).itemsize,
        is_float_type=lambda dtype: np.dtype(dtype).kind in "fV",
    )  # fmt: skip


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


def draw_blocks_at_once(generators: types.ModuleType) -> None:
    """Replace the library's generator of MX data, whose Python loop over blocks takes minutes.

    The law is the library's: uniform values, and one element of each block of 8 x 4 with the
    largest exponent, so that the scale survives another quantization. The draws are others.
    """
    known = vars(generators)
    by_the_library = known["generate_stabilized_mx_data"]

    def generate(mx_dtype: Any, shape: Any, val_range: float = 1.0) -> tuple[Any, Any, Any]:
        if val_range == 0:
            return by_the_library(mx_dtype, shape, val_range)  # type: ignore[no-any-return]
        rows, columns = shape[0] // 8, shape[1] // 4
        largest = known["get_mx_fp_max"](mx_dtype)
        values = (np.random.random(shape) * 2 - 1) * largest
        at = 8 * np.arange(rows)[:, None] + np.random.randint(0, 7, (rows, columns))
        column = 4 * np.arange(columns) + np.random.randint(0, 3, (rows, columns))
        top = (1 + np.random.random((rows, columns)) / 2) * 2 ** known["get_mx_max_exp"](mx_dtype)
        values[at, column] = top * np.random.choice([-1, 1], (rows, columns))
        data = static_cast(values.astype(np.float32), mx_dtype)
        bound = min(255, int(np.log2(val_range / largest) + 127))
        scale = np.random.randint(max(0, bound - 10), bound + 1, (rows, columns), dtype=np.uint8)
        return known["dequantize_mx_golden"](data, scale), data, scale

    generators.generate_stabilized_mx_data = generate  # type: ignore[attr-defined]


def library_modules(library: Path) -> PrivateModules:
    """Return the library's modules, with stand-ins for what its tests take from elsewhere."""
    private = TestModules([library, library / "src"])
    stand_ins: dict[str, Any] = {
        "neuron_dtypes": neuron_dtypes(),
        "test.utils.test_orchestrator": types.SimpleNamespace(Orchestrator=Orchestrator),
        "allpairspy": types.SimpleNamespace(
            AllPairs=lambda parameters, **_: itertools.product(*parameters)
        ),
        "typing_extensions": types.SimpleNamespace(override=lambda function: function),
    }
    private.modules |= stand_ins
    generators = private.load("test.integration.nkilib.utils.tensor_generators")
    if generators is not None:
        draw_blocks_at_once(generators)
    return private


def range_sets(private: PrivateModules, function: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the positive cases of the library's range harness, the smallest first."""
    harness = private.load("test.utils.ranged_test_harness")
    random.seed(0)
    config = getattr(function, harness.RANGE_TEST_CONFIG_ATTR_KEY)
    both = zip(*harness.RangeTestHarness(config).get_unique_test_cases(), strict=True)
    cases = {name: case for name, case in both if not case.is_negative_test_case}

    def size(name: str) -> tuple[int, str]:
        return math.prod(map(work, cases[name].tensors.values())), name

    return [(name, {"range_test_options": cases[name]}) for name in sorted(cases, key=size)]


def work(sides: dict[str, Any]) -> int:
    """Return the product of the values that are sizes."""
    return math.prod(v for v in sides.values() if isinstance(v, int) and v > 0)


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


def test_id(row: dict[str, Any], number: int) -> str:
    """Return the name that pytest gives to a row of parametrize, which says its sizes."""
    plain = (str, int, float, bool, type(None), enum.Enum)
    return "-".join(
        str(v) if isinstance(v, plain) else getattr(v, "__name__", f"{name}{number}")
        for name, v in row.items()
    )


def mark_sets(mark: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (id, arguments) of one parametrize or coverage_parametrize mark."""
    if mark.name == "parametrize":
        names, single = ParameterSet._parse_parametrize_args(*mark.args[:2])
        values = ParameterSet._parse_parametrize_parameters(mark.args[1], single)
        for i, value in enumerate(values):
            if not left_out(value.marks):
                named = dict(zip(names, value.values, strict=False))
                yield value.id or test_id(named, i), named
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


def left_out(marks: Any) -> bool:
    """Return whether the library does not expect a test or a case to pass."""
    return any(getattr(mark, "name", "") in ("skip", "xfail") for mark in marks)


def library_cases(private: PrivateModules, file: str, limit: int) -> Iterator[Case]:
    """Yield the cases of a test file, at most `limit` of each test."""
    name = "test.integration.nkilib." + file.removesuffix(".py").replace("/", ".")
    module = private.load(name)
    if module is None:
        raise FileNotFoundError(file)
    platforms = private.load("test.utils.common_dataclasses").Platforms  # type: ignore[union-attr]
    given = {
        "is_negative_test_case": False, "collector": mock.MagicMock(),
        "platform_target": platforms.TRN2,
        "request": mock.MagicMock(),
    }  # fmt: skip
    for kind in [v for k, v in vars(module).items() if k.startswith("Test") and inspect.isclass(v)]:
        if kind.__dict__.get("__test__", True) is False:
            continue
        for test, function in inspect.getmembers(kind, inspect.isfunction):
            marks = (*getattr(kind, "pytestmark", ()), *getattr(function, "pytestmark", ()))
            if not test.startswith("test") or left_out(marks):
                continue
            excluded = [
                mark.kwargs.get("exclude", ()) for mark in marks if mark.name == "platforms"
            ]
            newer = any(platforms.TRN2 in some for some in excluded)
            sets = list(itertools.islice(parameter_sets(private, function), limit))
            for label, values in sets or [("", {})]:
                wanted = inspect.signature(function).parameters
                manager = Orchestrator("trn3" if newer else "")
                arguments = {"test_manager": manager, **given, **values}
                if newer:
                    arguments["platform_target"] = platforms.TRN3
                needed = [n for n, p in wanted.items() if p.default is p.empty and n != "self"]
                if arguments.keys() >= set(needed):  # else a test with fixtures of its own
                    arguments = {k: v for k, v in arguments.items() if k in wanted}
                    case = (kind, test, arguments, manager, platforms.TRN3)
                    yield f"{test}[{label}]", functools.partial(run_test, *case)


def run_test(
    kind: Any, test: str, arguments: dict[str, Any], manager: Orchestrator, trn3: Any
) -> None:
    """Run a test of a class with its arguments, on trn3 where it says that it runs nowhere else."""
    try:
        getattr(kind(), test)(**arguments)
    except BaseException as error:  # pytest's Skipped is one
        if "only supported on TRN3" not in str(error):
            raise
        manager.target = "trn3"
        getattr(kind(), test)(**{**arguments, "platform_target": trn3})
    if not manager.runs:
        pytest.skip("a negative case: it ends before a kernel runs")
