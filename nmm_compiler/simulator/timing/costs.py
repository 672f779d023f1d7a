"""The cost of a compute instruction: how long it holds its engine, and when its result is ready.

`(interval, latency)` in microseconds: the engine can start the next instruction after `interval`;
a consumer waits for `latency`. The difference is the fixed pipeline overhead, which back-to-back
independent instructions hide and dependent ones pay. Cycle counts follow the cost tables of
NKI 0.1 (N = elements per partition), vector performance modes those of the trn2 architecture
guide. The number of partitions in use never matters.
"""

from __future__ import annotations

from collections.abc import Callable

from nmm_compiler.simulator.trace import Access, Instruction
from nmm_compiler.targets import Target

Cost = tuple[float, float]

_US = 1e6
_SIXTEEN_BIT = frozenset({"bfloat16", "float16"})
_EIGHT_BIT_FLOAT = frozenset({"float8_e4m3", "float8_e4m3fn", "float8_e5m2"})


def elements(instruction: Instruction) -> int:
    """Return N: the most elements per partition that any tensor operand walks."""
    count = 1
    for access in instruction.reads:
        count = max(count, access.elements_per_partition)
    for access in instruction.writes:
        count = max(count, access.elements_per_partition)
    return count


def tensor_dtype(instruction: Instruction) -> str:
    """Return the dtype that sets the rate of a product: float32 if an operand is, of any two."""
    dtypes = [access.dtype for access in instruction.reads]
    return "float32" if "float32" in dtypes else dtypes[-1]


def _inner_contiguous(access: Access) -> bool:
    for step, count in reversed(access.pattern):
        if count > 1:
            return step == access.item_bytes
    return True


def _inner_stride_bytes(access: Access) -> int:
    for step, count in reversed(access.pattern):
        if count > 1:
            return abs(step)
    return access.item_bytes


class ComputeCosts:
    """Costs of TensorE, VectorE, ScalarE and GpSimd instructions on one target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._tensor: dict[tuple[object, ...], tuple[Cost, object]] = {}
        self._other: dict[tuple[object, ...], tuple[Cost, object]] = {}
        self._clock_us = {
            "tensor": _US / target.tensor_clock_hz,
            "vector": _US / target.vector_clock_hz,
            "scalar": _US / target.scalar_clock_hz,
            "gpsimd": _US / target.gpsimd_clock_hz,
            "sync": _US / target.gpsimd_clock_hz,
        }
        self._column_load_us = self._clock_us["tensor"] / target.stationary_load_speedup

    def tensor(self, instruction: Instruction) -> Cost:
        """Return the cost of a matmul or a transpose on TensorE, at full clock."""
        reads, attributes = instruction.reads, instruction.attributes
        moving = reads[-1]
        # equal attributes are one dictionary; the memory keeps it alive, so that its id stays its
        key: tuple[object, ...] = (
            id(attributes), instruction.op, reads[0].dtype, moving.dtype, moving.pattern,
        )  # fmt: skip
        if len(reads) > 2:
            key += tuple(access.dtype for access in reads)
        known = self._tensor.get(key)
        if known is None:
            cost = self._tensor_cost(instruction, tensor_dtype(instruction))
            known = self._tensor[key] = cost, attributes
        return known[0]

    def _tensor_cost(self, instruction: Instruction, dtype: str) -> Cost:
        """MultiplyMoving issues every max(N, 64) cycles; fp32 takes four passes.

        The next LoadStationary runs behind it at up to four times the speed, so it shows only when
        the stationary tile has more than four times the columns of the moving one. fp32 also pays
        for a short contraction and for moving columns that are more than 8 bytes apart.
        """
        target = self.target
        attributes = instruction.attributes
        moving = attributes.get("n") or elements(instruction)
        stationary = attributes.get("m") or target.stationary_free_max_elements
        columns = max(moving, target.tensor_min_interval_cycles)
        columns = max(columns, stationary / target.stationary_load_speedup)
        if dtype == "float32":
            transpose = attributes.get("is_transpose") or instruction.op == "nc_transpose"
            factor = target.fp32_pass_factor
            if transpose and target.tensor_transpose_mode:
                factor /= 2.0
            elif attributes.get("k", target.partitions) <= target.tensor_fp32_short_rows:
                factor *= target.tensor_fp32_short_factor
            elif attributes.get("onezero"):
                factor /= 2.0  # an operand of ones and zeros needs no low half
            if not transpose and _skips_elements(instruction):
                factor *= target.wide_stride_factor
            columns = max(columns, target.tensor_fp32_min_columns)
            cycles = factor * columns + target.tensor_fp32_overhead_cycles
        else:
            cycles = columns + target.tensor_interval_overhead_cycles
        interval = cycles * self._clock_us["tensor"]
        return interval, interval + target.tensor_latency_seconds * _US

    def stationary_load_us(self, instruction: Instruction) -> float:
        """Return the time of a LoadStationary that no MultiplyMoving hides."""
        stationary = instruction.attributes.get("m") or self.target.stationary_free_max_elements
        return stationary * self._column_load_us

    def other(self, instruction: Instruction, engine: str = "") -> Cost:
        """Return the cost of an instruction of any engine but TensorE.

        engine: where the compiler has placed it, by default where the trace says.
        """
        attributes = instruction.attributes
        key: list[object] = [instruction.op, engine or instruction.engine, id(attributes)]
        for accesses in (instruction.reads, instruction.writes):
            for access in accesses:
                key += access.memory, access.pattern, access.dtype
            key.append(None)
        known = self._other.get(tuple(key))
        if known is None:
            cost = self._other_cost(instruction, engine or instruction.engine)
            known = self._other[tuple(key)] = cost, attributes
        return known[0]

    def _other_cost(self, instruction: Instruction, engine: str) -> Cost:
        """No instruction issues sooner than 64 cycles after the one before it."""
        target = self.target
        clock = self._clock_us.get(engine, self._clock_us["sync"])
        if engine == "sync" or not (instruction.reads or instruction.writes):
            cycles = 0.0
        else:
            rule = RULES.get(instruction.op, _one_pass)
            cycles = rule(target, instruction, engine, elements(instruction))
            if self._wide_stride(instruction):
                cycles *= target.wide_stride_factor
        interval = max(
            cycles + target.engine_streaming_overhead_cycles, float(target.engine_min_cycles)
        )
        latency = max(cycles + _pipeline_cycles(target, instruction, engine), interval)
        return interval * clock, latency * clock

    def _wide_stride(self, instruction: Instruction) -> bool:
        accesses = (*instruction.reads, *instruction.writes)
        least = self.target.wide_stride_bytes
        return any(a.memory != "hbm" and _inner_stride_bytes(a) >= least for a in accesses)


def _skips_elements(instruction: Instruction) -> bool:
    """Return whether the moving columns of a product are more than two elements apart."""
    moving = instruction.reads[-1]
    return _inner_stride_bytes(moving) > 2 * moving.item_bytes


def _pipeline_cycles(target: Target, instruction: Instruction, engine: str) -> float:
    """Return the cycles between the last element and its result.

    Nothing is read for a memset. ScalarE reads each bias and scale tile first, and every function
    but a copy reads a bias, given or not.
    """
    if not instruction.reads:
        return float(target.engine_min_cycles)
    if engine != "scalar":
        return float(target.engine_isolated_overhead_cycles)
    small = sum(a.elements_per_partition == 1 for a in instruction.reads[1:])
    if instruction.attributes.get("function", "copy") not in _COPIES:
        small = max(small, 1)
    return float(target.scalar_isolated_overhead_cycles + small * target.scalar_operand_read_cycles)


_COPIES = frozenset({"copy", "identity", "multiply", "add", ""})


def _fast_mode(target: Target, instruction: Instruction, engine: str) -> float:
    """Return how many elements a cycle VectorE copies or scales per partition.

    trn2 architecture guide: 512 elements a cycle (4 per partition) with 16-bit operands in SBUF
    and a contiguous innermost dimension; 2 if not contiguous, or with one side in PSUM and
    contiguous; 256 (2 per partition) with other operands in SBUF. Probes say that an output
    wider than the input gets none of it. trn3 adds 8-bit floats.
    """
    if not target.vector_fast_modes or engine not in ("vector", "scalar"):
        return 1.0
    tensors = [
        a
        for a in (*instruction.reads, *instruction.writes)
        if a.elements_per_partition > 1 or a in instruction.writes
    ]
    small = set(_SIXTEEN_BIT)
    if target.vector_fast_float8:
        small |= _EIGHT_BIT_FLOAT
    if any(a.dtype not in small for a in tensors):
        sizes = [a.item_bytes for a in tensors]
        plain = all(a.memory == "sbuf" and _inner_contiguous(a) for a in tensors)
        return 2.0 if engine == "vector" and plain and sizes[-1] <= sizes[0] else 1.0
    contiguous = all(_inner_contiguous(a) for a in tensors)
    in_psum = sum(a.memory == "psum" for a in tensors)
    if engine == "scalar":  # trn3: two elements a cycle on 16-bit data
        return 2.0 if target.scalar_fast_modes else 1.0
    if in_psum == 0:
        return 4.0 if contiguous else 2.0
    return 2.0 if in_psum == 1 and contiguous else 1.0


def _one_pass(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    return float(n)


def _copy(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    return n / _fast_mode(target, instruction, engine)


def _reducing(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    """One pass, and 64 cycles to read the accumulators out if it reduces on the way."""
    extra = target.engine_min_cycles if instruction.attributes.get("reduces") else 0
    return float(n + extra)


def _always_reducing(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    return float(n + target.engine_min_cycles)


def _two_inputs(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    """Two operands share one SBUF port: a pass each, or one when one streams from PSUM.

    All of them 16-bit in SBUF: half of that.
    """
    passes = target.vector_two_input_passes if engine == "vector" else 2.0
    wide = [a for a in instruction.reads if a.elements_per_partition > 1]
    if len(wide) < 2 or sum(a.memory == "psum" for a in wide) == 1:
        return float(n)
    operands = (*instruction.reads, *instruction.writes)
    if engine == "vector" and all(
        a.dtype in _SIXTEEN_BIT and (passes > 1.0 or a.memory == "sbuf") for a in operands
    ):
        return passes * n / 2.0
    return passes * n


def _scan(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    return 2.0 * n


def _reduce(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    operands = (*instruction.reads, *instruction.writes)
    if instruction.attributes.get("function") in ("add", "max", "maximum") and all(
        a.dtype in _SIXTEEN_BIT for a in operands
    ):
        return n / 2.0
    return float(n)


def _memset(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    if all(a.dtype in _SIXTEEN_BIT for a in instruction.writes):
        return float(n) if instruction.attributes.get("nonzero") else n / 2.0
    return target.vector_memset_cycles * n if engine == "vector" else float(n)


def _reciprocal(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    return target.vector_reciprocal_cycles * n if engine == "vector" else float(n)


def _aggregate(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    return 13.0 * n / 3.0


def _gpsimd_fixed(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    return float(target.gpsimd_fixed_cycles + n)


def _local_gather(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    """Each index costs 28 + 4 e cycles for e elements, shared by elements narrower than 4 bytes.

    nki.isa.local_gather: 150 + n e / C cycles for n indices of e elements, C = ((28 + 4 e) / (4 e))
    / min(4 / bytes, e). The page divides by C, which falls with e, and says that longer runs gather
    faster; both hold only if C is cycles per element, so this multiplies.
    """
    attributes = instruction.attributes
    count, run = attributes.get("indices", n), attributes.get("elements", 1)
    item = instruction.reads[0].item_bytes
    each = (28.0 + 4.0 * run) / (4.0 * run) / min(4.0 / item, run)
    return target.gpsimd_fixed_cycles + count * run * each


def _predicated(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    if any(a.memory == "psum" for a in instruction.reads):
        return float(n)
    return target.vector_two_input_passes * n


def _topk(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    return 4.0 * n + float(instruction.attributes.get("k", 8))


def _partition_reduce(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    """GpSimd walks its 16 partitions one after another, then combines 8 cores."""
    return float(target.gpsimd_fixed_cycles + 16 * n)


RULES: dict[str, Callable[[Target, Instruction, str, int], float]] = {
    "tensor_copy": _copy,
    "tensor_scalar": _copy,
    "tensor_scalar_reduce": _always_reducing,
    "activation": _reducing,
    "tensor_tensor": _two_inputs,
    "scalar_tensor_tensor": _two_inputs,
    "select_reduce": _two_inputs,
    "tensor_tensor_scan": _scan,
    "tensor_reduce": _reduce,
    "memset": _memset,
    "reciprocal": _reciprocal,
    "bn_aggr": _aggregate,
    "iota": _gpsimd_fixed,
    "affine_select": _gpsimd_fixed,
    "local_gather": _local_gather,
    "tensor_copy_predicated": _predicated,
    "tensor_partition_reduce": _partition_reduce,
    "topk": _topk,
}
