"""Other people's NKI Beta 1 kernels (`import neuronxcc.nki`), each checked by its own reference.

Nothing of them is kept here: a checkout, or a bare clone and a commit, is unpacked into a temporary
folder. AWS's documentation and samples bring unit tests, AccelOpt's NKIBench NumPy functions,
Autocomp a harness per kernel; those decide what is right, except for NeuronMM, which is compared
with float64 here. `public_kernels.py --dialect neuronxcc` prints the table.
"""

from __future__ import annotations

import math
import re
import subprocess
import tarfile
import tempfile
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from public_examples import example_cases
from public_library import parameter_sets, work
from public_outcomes import Case, WrongError

from nmm_compiler.codegen.check_against_float64 import random_arrays
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.linear.specs import GatedMLPUpSpec, LowRankSpec, MatmulSpec
from nmm_compiler.simulator.loading.loader import load_file
from nmm_compiler.simulator.loading.private_modules import PrivateModules
from nmm_compiler.simulator.run import simulate

_FOLDER = tempfile.TemporaryDirectory(prefix="beta1-")
LOW_RANK, TUTORIAL = "fused_three_mm_XTUV", "nki_matmul_fully_optimized_"
PAPER_KERNELS = (LOW_RANK, "fused_mlp_up_T", TUTORIAL)
_BF16 = 0.0016
_SLACK = 1.5
Sizes = tuple[int, int, int, int]
LOOSE = {
    "test_activation": "its reference keeps float32 where the kernel asks for bfloat16, as AWS's "
    "simulator of that version did",
}
"""Unit tests whose reference is not what the documentation says, with the reason."""
DOCS_COMMIT = "1db4d74e"  # SDK 2.26, the last documentation of Beta 1 alone
SAMPLES_COMMIT = "fc5c69f"  # the last commit of nki-samples that is all Beta 1


def scratch() -> Path:
    """Return a new folder that goes with the process."""
    return Path(tempfile.mkdtemp(dir=_FOLDER.name))


def unpacked(clone: Path, commit: str, folder: str = "") -> Path:
    """Return a folder with the files of a clone at `commit`; a checkout without git as it is."""
    if not commit or not ((clone / ".git").exists() or (clone / "HEAD").is_file()):
        return clone
    command = ["git", "-C", str(clone), "archive", commit, *([folder] if folder else [])]
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    target = scratch()
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(target, filter="data")
    return target


def _raise(error: BaseException) -> None:
    raise error


def _unit_test(test: Any) -> None:
    try:
        test.debug()
    except AssertionError as error:
        # a test compares classes; ours is a subclass of the one that it wants
        if not str(error).endswith("OutOfBoundsError'> != <class 'IndexError'>"):
            raise WrongError(str(error)) from error


def _cases_of_files(
    origin: str, folder: Path, load: Callable[[Path], Any], cases: Callable[[str, type], Any]
) -> Iterator[Case]:
    """Yield the cases of all classes of a folder's tests; an error as a case of its file."""
    for path in sorted(folder.glob("test_*.py")):
        try:
            module = load(path)
        except NmmError as error:
            yield f"{origin}: {path.stem}", partial(_raise, error)
            continue
        for kind in vars(module).values():
            if isinstance(kind, type):
                yield from cases(path.stem, kind)


def documented_cases(folder: Path) -> Iterator[Case]:
    """Yield the unit tests of `nki/test` of AWS's documentation, and its tutorials."""

    def cases(file: str, kind: type) -> Iterator[Case]:
        loader = unittest.defaultTestLoader
        for test in (
            loader.loadTestsFromTestCase(kind) if issubclass(kind, unittest.TestCase) else ()
        ):
            name = test.id().rpartition(".")[2]
            if name not in LOOSE:
                yield f"docs: {name} ({file})", partial(_unit_test, test)

    yield from _cases_of_files("docs", folder / "nki" / "test", load_file, cases)
    for name, run in example_cases(folder / "nki" / "examples"):
        yield f"docs: {name}", run


def sample_cases(folder: Path) -> Iterator[Case]:
    """Yield the tutorials of nki-samples and the numeric unit tests of its reference kernels."""
    for name, run in example_cases(folder / "src" / "nki_samples" / "tutorials"):
        yield f"samples: {name}", run
    units = folder / "test" / "unit"
    private = PrivateModules([units, folder / "src"])

    def cases(_: str, kind: type) -> Iterator[Case]:
        for name, test in vars(kind).items() if kind.__name__.startswith("Test") else ():
            if name.startswith("test_") and "numer" in name and callable(test):
                given = min((row for _, row in parameter_sets(private, test)), key=work)
                yield f"samples: {name[5:]}", partial(test, None, simulation_only=True, **given)

    yield from _cases_of_files("samples", units, lambda path: private.load(path.stem), cases)
    for name in ("maxpooling", "interpolate_bilinear_fwd", "interpolate_trilinear_fwd", "matmul"):
        path = folder / "contributed" / f"{name}.py"
        if path.is_file():
            yield f"contributed: {name}", lambda path=path: load_file(path).check_correct()


def bench_cases(folder: Path) -> Iterator[Case]:
    """Yield NKIBench: each kernel with the NumPy function that its name points to."""
    for path in sorted((folder / "NKIBench" / "kernels").glob("*.py")):
        stem = path.stem.rpartition("_")[0]
        references = sorted((folder / "NKIBench" / "reference").glob(f"{stem}_numpy_*.py"))
        yield f"NKIBench: {stem}", partial(_bench, path, references[0])


def _bench(path: Path, reference: Path) -> None:
    np.random.seed(42)
    task = load_file(reference)
    inputs = task.get_inputs()
    wanted = task.forward(*inputs)
    kernels = [k for k in vars(load_file(path)) if k in ("kernel", "optimized_kernel")]
    result = simulate(
        f"{path}:{kernels[0]}", *task.transform_to_nki_inputs(inputs), mode="functional"
    )
    outputs = result.outputs or ()
    got = task.transform_nki_outputs(outputs if len(outputs) > 1 else outputs[0], wanted)
    for mine, theirs in zip(got, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        # AccelOpt's own measure: the largest difference over the largest value
        scale = float(np.abs(theirs).max())
        error = float(np.abs(np.asarray(mine, np.float64) - theirs).max()) / scale
        if not error <= 2e-5:
            raise WrongError(f"largest difference {error:.2e} of the largest value, 2e-05 allowed")


def autocomp_cases(folder: Path) -> Iterator[Case]:
    """Yield Autocomp's starting kernels in their harnesses, and its optimized examples alone."""
    for group in ("trn-tutorial-nki1", "trn-advanced-nki1"):
        for harness in sorted((folder / "harnesses" / group).glob("*.py")):
            number = harness.stem.partition("_")[0]
            for solution in (folder / "sols" / group).glob(f"{number}_*.py"):
                run = partial(_harness, harness, solution)
                yield f"Autocomp: {solution.stem} ({group})", run


def _harness(harness: Path, solution: Path) -> None:
    text = harness.read_text("utf-8").replace("# SUBSTITUTE HERE", solution.read_text("utf-8"), 1)
    path = scratch() / f"{solution.stem}.py"
    path.write_text(text, "utf-8")
    module = load_file(path)
    reference = re.search(r"^\s+\w+ = test_nki\((\w+), solution\)", text, re.M)
    name = reference.group(1) if reference else "ref"
    if not module.test_nki(getattr(module, name), module.solution):
        raise WrongError("the harness says that the results differ")


def paper_kernel(path: Path, name: str, sizes: Sizes) -> None:
    """Run a kernel with its authors' blocks on two targets; WrongError if float64 says otherwise.

    sizes: tokens, features, rank, outputs; the matmul has no rank.

    What is expected of the error's norm: bf16 rounds with a relative error of about 0.0016 (uniform
    in the last place, over all mantissas). A kernel adds the sums of its blocks of a contraction in
    bf16; of B blocks, the j-th such sum is about sqrt(j / B) of the whole, so that all roundings
    together are sqrt((B + 1) / 2) of one. The roundings of x u, and of the product with v, are
    independent; silu passes an error on by its derivative. A kernel passes with 1.5 times that, and
    with no single element further away than its bound.
    """
    m, k, r, n = sizes
    spec: Any = {
        LOW_RANK: LowRankSpec(m=m, k=k, r=r, n=n, x_layout="col"),
        TUTORIAL: MatmulSpec(m=m, k=k, n=n, x_layout="col"),
    }.get(name, GatedMLPUpSpec(m=m, k=k, r=r, n=n, out_layout="col"))
    arrays = random_arrays(spec)
    chosen = dict(getattr(load_file(path), f"get_{name}_params", lambda tokens: {})(m))
    wanted = spec.reference(*arrays)
    largest = float(np.abs(wanted).max())
    blocks = 1 + max(k, r) // 512  # partial sums that are rounded to bfloat16
    largest_bound = 2.0**-8 * (blocks + 4) * math.sqrt(2)
    norm_bound = _SLACK * _expected_error(name, sizes, chosen, arrays)
    for target in ("trn1", "trn2"):
        run = simulate(f"{path}:{name}", *arrays, target=target, named=chosen)
        off = run.output.astype(np.float64) - wanted
        errors = (
            ("largest error", float(np.abs(off).max()) / largest, largest_bound),
            ("norm", float(np.linalg.norm(off) / np.linalg.norm(wanted)), norm_bound),
        )
        beyond = [f"{what} {error:.2g} (bound {bound:.2g})" for what, error, bound in errors
                  if not error <= bound]  # fmt: skip
        if beyond:  # a share of NaN is
            raise WrongError(f"{target}: {', '.join(beyond)}")


def _expected_error(
    name: str, sizes: Sizes, chosen: dict[str, int], arrays: tuple[np.ndarray, ...]
) -> float:
    """Return the relative norm of the error that is expected of a kernel's result."""
    _, k, r, _ = sizes
    if name == TUTORIAL:
        in_blocks = [(k, max(1, min(8, k // 128)))]
    else:
        in_blocks = [(k, chosen["M_tiles_in_block"]), (r, chosen["r_tiles_in_block"])]
    squares = [(math.ceil(length / (128 * tiles)) + 1) / 2 for length, tiles in in_blocks]
    each = _BF16 * math.sqrt(sum(squares))
    if name in (TUTORIAL, LOW_RANK):
        return each
    x, gate_u, gate_v, up_u, up_v = (array.astype(np.float64) for array in arrays)
    gate, up = x @ gate_u @ gate_v, x @ up_u @ up_v
    share = 1 / (1 + np.exp(-gate))
    result = gate * share * up
    of_gate = share * (1 + gate * (1 - share)) * gate * up  # silu'(gate) gate up
    norms = [float(np.linalg.norm(a)) for a in (of_gate, result, result)]
    each_of = (each, each, _BF16)  # the last: silu, the product and the result, at most this
    total = math.sqrt(sum((e * n) ** 2 for e, n in zip(each_of, norms, strict=True)))
    return total / norms[1]


def neuronmm_cases(folder: Path) -> Iterator[Case]:
    """Yield the paper's kernels at Llama 3.2 1B's up projection and at a ragged shape."""
    path = folder / "test_speedup.py"
    for name in PAPER_KERNELS:
        for sizes in ((128, 2048, 1280, 8192), (300, 1000, 200, 700)):
            said = "x".join(map(str, sizes))
            yield f"NeuronMM: {name} {said}", partial(paper_kernel, path, name, sizes)


def all_cases(**clones: Path | None) -> Iterator[Case]:
    """Yield the cases of the clones that are given, of those that SOURCES names."""
    for name, (cases, *packed) in SOURCES.items():
        if clone := clones[name]:
            yield from cases(unpacked(clone, *packed))


SOURCES: dict[str, tuple[Any, ...]] = {
    "neuronmm": (neuronmm_cases, "HEAD", "test_speedup.py"),
    "docs": (documented_cases, DOCS_COMMIT, "nki"),
    "samples": (sample_cases, SAMPLES_COMMIT),
    "accelopt": (bench_cases, "HEAD", "NKIBench"),
    "autocomp": (autocomp_cases, "HEAD"),
}
"""Of each clone its cases, the commit that is run, and the folder or file that is needed."""
