"""A target: one frozen record of hardware numbers, with the unit in every field name.

Each number has an entry in `sources` that says whether it is documented, measured or assumed, and
where it comes from. A target is data: its methods only combine its own fields. All figures are per
core, since one kernel runs on one NeuronCore.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

Kind = Literal["documented", "measured", "assumed"]


class Source(NamedTuple):
    """Where a number comes from; `where` names a public page or a public measurement."""

    kind: Kind
    where: str


class Known(NamedTuple):
    """A number and its source, as a target's file writes them."""

    value: Any
    source: Source


def _known(kind: Kind, value: Any, where: str) -> Known:
    """Return a number and its source."""
    return Known(value, Source(kind, where))


documented = functools.partial(_known, "documented")  # printed by AWS
measured = functools.partial(_known, "measured")  # by somebody on hardware, and published
assumed = functools.partial(_known, "assumed")  # derived, or assumed; `where` says how


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One NeuronCore generation."""

    name: str
    generation: str
    summary: str
    instances: tuple[str, ...]  # families of EC2 instances that hold such cores
    physical_cores_per_logical_core: int  # by default; the runtime can be set otherwise
    nki_beta_1: bool  # NKI Beta 1, neuronxcc.nki, compiles for it

    # Memories
    partitions: int
    sbuf_bytes_per_partition: int
    sbuf_reserved_bytes_per_partition: int
    psum_banks: int
    psum_bank_bytes_per_partition: int
    hbm_bytes_per_second: float
    hbm_bytes: int
    collective_points: tuple[tuple[int, int, float], ...]

    # Tile limits
    moving_free_max_elements: int

    # TensorE
    tensor_clock_hz: float
    tensor_columns: int
    fp32_pass_factor: float
    fp8_double_row: bool
    tensor_min_interval_cycles: int
    tensor_interval_overhead_cycles: int
    tensor_fp32_overhead_cycles: int
    tensor_fp32_min_columns: int
    tensor_latency_seconds: float
    stationary_load_speedup: float
    tensor_ramp_seconds: float
    tensor_ramp_start_fraction: float

    # VectorE, ScalarE, GpSimd
    vector_clock_hz: float
    scalar_clock_hz: float
    gpsimd_clock_hz: float
    engine_min_cycles: int
    engine_streaming_overhead_cycles: int
    engine_isolated_overhead_cycles: int
    scalar_isolated_overhead_cycles: int
    scalar_operand_read_cycles: int
    gpsimd_fixed_cycles: int
    vector_fast_modes: bool
    vector_two_input_passes: float
    vector_reciprocal_cycles: float
    vector_memset_cycles: float
    wide_stride_bytes: int
    wide_stride_factor: float
    unset_engine_prefers_scalar: bool
    beta1_product_awaits_load: bool
    activation_table_load_seconds: float

    # DMA
    dma_engines: int
    dma_bytes_per_second_per_engine: float
    dma_generates_descriptors: bool
    dma_transposes: bool
    dma_issue_seconds: float
    dma_issue_descriptor_seconds: float
    dma_static_issue_seconds: float
    dma_hardware_issue_seconds: float
    dma_software_gpsimd_seconds: float
    dma_descriptor_seconds: float
    dma_descriptor_min_seconds: float
    dma_short_row_bytes: int
    dma_short_row_seconds: float
    dma_read_latency_fraction: float
    dma_start_latency_seconds: float
    dma_stagger_seconds: float
    dma_transpose_fraction: float
    dma_transpose_sbuf_fraction: float
    dma_transpose_wide_fraction: float
    semaphore_seconds: float
    engine_semaphore_seconds: float
    kernel_start_stop_seconds: float

    # Engines that cannot use a memory at the same time
    vector_gpsimd_share_sbuf: bool
    vector_scalar_share_psum: bool

    # Rules for instructions; nki.isa names those that a generation lacks
    absent_instructions: tuple[str, ...]
    absent_forms: tuple[str, ...]
    tensor_transpose_mode: bool
    device_loops: bool
    float8_kernels: bool
    matmul_tile_min_elements: int
    matmul_psum_banks: int
    matmul_bfloat16_sums: bool
    matmul_adds_to_written_psum: bool
    scalar_tensor_copy: bool
    scalar_all_operators: bool
    scalar_fast_modes: bool
    vector_fast_float8: bool

    sources: Mapping[str, Source] = dataclasses.field(repr=False, hash=False, compare=False)

    def __post_init__(self) -> None:
        text = ("name", "generation", "summary", "instances", "sources")
        numbers = {f.name for f in dataclasses.fields(self)} - set(text)
        missing, extra = numbers - set(self.sources), set(self.sources) - numbers
        if missing or extra:
            raise ValueError(
                f"target {self.name}: sources lack {sorted(missing)} and name {sorted(extra)}, "
                "which are no fields; give every number exactly one source"
            )

    @classmethod
    def of(cls, name: str, **given: Any) -> Self:
        """Return a target from its texts, and its numbers that each stand beside their source.

        Raises TypeError for a field that is missing or unknown.
        """
        values = {f: v.value if isinstance(v, Known) else v for f, v in given.items()}
        sources = {f: v.source for f, v in given.items() if isinstance(v, Known)}
        return cls(name=name, sources=sources, **values)

    def variant(self, name: str, **given: Any) -> Self:
        """Return another generation: its texts, and the numbers that differ.

        A documented number that is not given also holds for the other generation; a measured or
        assumed one becomes an assumption there.
        """
        here = Source("assumed", f"as {self.name}")
        carried = {
            field: Known(getattr(self, field), source if source.kind == "documented" else here)
            for field, source in self.sources.items()
        }
        return self.of(name, **{**carried, **given})

    def goes_by(self, word: str) -> bool:
        """Return whether AWS's tools use `word` for this hardware ("trn2", "gen3")."""
        return word in (self.name, self.generation, *self.instances)

    @property
    def sbuf_usable_bytes_per_partition(self) -> int:
        """Bytes of each partition that a kernel may allocate."""
        return self.sbuf_bytes_per_partition - self.sbuf_reserved_bytes_per_partition

    @property
    def memory_bytes_per_second(self) -> float:
        """The rate that HBM traffic can reach: the lower of the core's HBM share and of all its
        DMA engines at their practical rate."""
        by_dma = self.dma_engines * self.dma_bytes_per_second_per_engine
        return min(self.hbm_bytes_per_second, by_dma)

    def peak_flops_per_second(self, dtype: str = "bfloat16") -> float:
        """Return dense TensorE FLOP/s for operands of `dtype`."""
        bf16 = 2.0 * self.partitions * self.tensor_columns * self.tensor_clock_hz
        if dtype == "float32":
            return bf16 / self.fp32_pass_factor
        if dtype.startswith("mx"):
            return bf16 * 4.0
        if dtype.startswith("float8") and self.fp8_double_row:
            return bf16 * 2.0
        return bf16

    def __str__(self) -> str:
        return f"{self.name} ({self.summary})"
