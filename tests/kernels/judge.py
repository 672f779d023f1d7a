"""What the tests of kernels share: results held to float64, and schedules of each way to share."""

import numpy as np

from nmm_compiler.cli.kernels import make_spec
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import compare, prove, random_arrays
from nmm_compiler.codegen.choose import rank, simulated
from nmm_compiler.targets import get


def spec_of(line):
    """Return the spec of a line, as `nmm kernel` takes it without dashes: "matmul m=8 k=16 n=32".

    Of a field that is there twice the last value counts.
    """
    family, *fields = line.split()
    return make_spec(family, [f"--{field}" for field in fields])


def several(value):
    return value if isinstance(value, tuple) else (value,)


def within(spec, arrays, results):
    """Return whether results are within the bounds of a spec, for its operands."""
    limits = spec.reference(*arrays), spec.error_bound(*arrays), spec.typical_error(*arrays)
    return compare(spec.short(), several(results), *map(several, limits)).passed


def in_float64(arrays):
    return tuple(np.asarray(array, np.float64) for array in arrays)


def best_of_each_split(spec):
    """Return a legal schedule of each way of sharing a kernel, without timing any."""
    best = {}
    for choice in rank(spec, get("trn2")):
        best.setdefault(choice.schedule.split, choice.schedule)
    return best


def first_us(spec, target="trn2"):
    """Return the simulated time of the schedule that the closed form puts first, and no other."""
    chip = get(target)
    return simulated(spec, rank(spec, chip)[0].schedule, chip)[0]


def first_kernel(spec, target="trn2"):
    """Return the kernel of the schedule that the closed form puts first, without timing any."""
    return build_kernel(spec, target, rank(spec, get(target))[0].schedule)


def prove_right(kernel, seed=0):
    """Prove an emitted kernel against float64."""
    proof = prove(kernel, seed)
    assert proof.passed, f"{proof}\n{kernel.spec}\n{kernel.schedule}\n{kernel.path}"


def prove_every_split(spec, splits):
    """Prove a kernel of each way of sharing, which must be these."""
    schedules = best_of_each_split(spec)
    assert set(schedules) == splits
    for schedule in schedules.values():
        prove_right(build_kernel(spec, "trn2", schedule))


def run_with_index(spec, index, schedule=None):
    """Return the operands and the results of a kernel for this index."""
    arrays = list(random_arrays(spec))
    place = [tensor.name for tensor in spec.inputs()].index("index")
    arrays[place] = np.asarray(index, np.int32)
    kernel = build_kernel(spec, "trn2", schedule)
    return arrays, kernel.simulate(*arrays, mode="functional").outputs
