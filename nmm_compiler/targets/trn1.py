"""Trainium 1 (NeuronCore-v2).

Kernels for it run as NKI Beta 1 (`dialect="neuronxcc"`), under Neuron SDK 2.27 and older. The pages
of NKI 0.3 and later name trn2 and trn3 as supported, though `nki.jit` and the simulator of NKI 0.6
still take trn1. Other figures are those of trn2.
"""

from nmm_compiler.targets.base import assumed, documented, measured
from nmm_compiler.targets.trn2 import TARGET as TRN2

TARGET = TRN2.variant(
    "trn1",
    generation="gen2",
    summary="Trainium 1, NeuronCore-v2",
    instances=("trn1", "inf2"),
    physical_cores_per_logical_core=documented(1, "NeuronCore-v2 has no logical cores of several"),
    # Memories
    sbuf_bytes_per_partition=documented(
        192 * 1024, "trainium_inferentia2_arch: SBUF size over 128 partitions"
    ),
    sbuf_reserved_bytes_per_partition=documented(
        16 * 1024, "NKI 0.1 notes: 176 KiB of 192 KiB usable"
    ),
    hbm_bytes_per_second=documented(410e9, "trn1: 820 GB/s per chip over 2 cores"),
    hbm_bytes=documented(16 * 2**30, "trn1: 32 GiB per chip over 2 cores"),
    collective_points=measured(
        tuple(
            (ranks, size, us)
            for size, row in (
                (1 << 10, (2.1, 6.3, 7.1, 9.1)),
                (64 << 10, (3.5, 11.6, 11.7, 12.5)),
                (1 << 20, (18.7, 70.0, 60.0, 64.0)),
                (32 << 20, (585.0, 893.0, 934.0, 575.0)),
            )
            for ranks, us in zip((2, 8, 16, 32), row, strict=True)
        ),
        "nccom-test all-reduce, (ranks, bytes, us)",
    ),
    # TensorE
    tensor_clock_hz=documented(2.8e9, "trainium_inferentia2_arch: TensorE clock"),
    fp8_double_row=documented(
        False, "trainium_inferentia2_arch: fp8 double row not on this generation"
    ),
    tensor_interval_overhead_cycles=measured(
        12, "bf16 matmuls at most 212 ns against 183 ideal; part of it dependence"
    ),
    tensor_fp32_overhead_cycles=measured(
        340, "fp32 512-column matmul about 853 ns against 731 ideal"
    ),
    tensor_fp32_min_columns=documented(64, "nki_perf_guide: MM interval max(N, 64)"),
    tensor_latency_seconds=documented(
        64 / 2.8e9, "trainium_inferentia2_arch: MM_INIT_LATENCY, 64 cycles"
    ),
    tensor_ramp_seconds=documented(0.0, "no clock ramp is documented for this generation"),
    tensor_ramp_start_fraction=documented(1.0, "no clock ramp is documented for this generation"),
    # VectorE, ScalarE, GpSimd
    vector_clock_hz=documented(1.12e9, "trainium_inferentia2_arch: VectorE clock"),
    scalar_clock_hz=documented(1.4e9, "trainium_inferentia2_arch: ScalarE clock"),
    gpsimd_clock_hz=documented(1.4e9, "trainium_inferentia2_arch: GpSimd clock"),
    engine_streaming_overhead_cycles=measured(
        20, "fused_mamba tutorial profile: 931 ns for a tensor_tensor of 2 x 512 columns"
    ),
    engine_isolated_overhead_cycles=documented(
        100, "trainium_inferentia2_arch: 100 cycles when the previous result is an operand"
    ),
    scalar_isolated_overhead_cycles=measured(
        200, "nki_perf_guide figure 16: 264-cycle interval, less the 64-cycle minimum"
    ),
    scalar_operand_read_cycles=assumed(0, "part of the measured overhead"),
    vector_fast_modes=documented(
        False, "trainium_inferentia2_arch: VectorE performance modes not on this generation"
    ),
    vector_two_input_passes=documented(
        2.0, "instruction cost tables of NKI 0.1: 2N unless one input is in PSUM or all are bf16"
    ),
    vector_reciprocal_cycles=measured(
        3.0, "NKIBench profiles of silu and adamw: VectorE's time less that of tensor_tensor"
    ),
    wide_stride_factor=documented(
        2.0, "trainium_inferentia2_arch: strides of 16 B and more halve SBUF and PSUM bandwidth"
    ),
    vector_memset_cycles=documented(1.0, "instruction cost tables of NKI 0.1: memset N"),
    unset_engine_prefers_scalar=measured(
        True, "NKIBench profiles: copies and tensor_scalar are ScalarE's, VectorE idles in matmul"
    ),
    beta1_product_awaits_load=measured(
        False, "NKIBench profiles: the weights of both norms with a product are loaded once"
    ),
    # DMA
    dma_bytes_per_second_per_engine=documented(17e9, "nki-dma-bandwidth-guide: practical rate"),
    dma_generates_descriptors=documented(
        False, "trainium2_arch: before trn2 descriptors are prebuilt by the host"
    ),
    dma_transposes=documented(False, "nki.isa.dma_transpose: trn2 and newer"),
    dma_issue_seconds=assumed(0.5e-6, "as trn2: descriptors written by GpSimd software"),
    dma_issue_descriptor_seconds=assumed(1e-9, "as trn2: descriptors written by GpSimd software"),
    dma_static_issue_seconds=measured(
        0.35e-6, "CS149 assignment 4: 0.357 us for 1, 0.33 us for 128 descriptors"
    ),
    dma_hardware_issue_seconds=assumed(0.6e-6, "no hardware DGE on this generation; as trn2"),
    dma_short_row_seconds=assumed(15e-9, "as dma_descriptor_min_seconds"),
    dma_transpose_fraction=assumed(0.1, "nki_perf_guide: much slower than a plain load; no figure"),
    dma_transpose_sbuf_fraction=assumed(0.1, "as dma_transpose_fraction"),
    dma_transpose_wide_fraction=assumed(0.1, "as dma_transpose_fraction"),
    kernel_start_stop_seconds=measured(
        14e-6, "CS149 assignment 4: 19 us for one 128x200 addition, 5 of them work"
    ),
    # What one engine's use of a memory shuts out
    vector_gpsimd_share_sbuf=documented(
        True, "trainium_inferentia2_arch: concurrency of VectorE and GpSimd"
    ),
    vector_scalar_share_psum=documented(
        True, "trainium_inferentia2_arch: concurrency of VectorE and ScalarE"
    ),
    # What instructions may do
    absent_instructions=documented(
        (
            "activate2",
            "core_barrier",
            "exponential",
            "nc_matmul_mx",
            "nki.collectives.all_reduce",
            "nonzero_with_count",
            "quantize_mx",
            "rand2",
            "rand_get_state",
            "rand_set_state",
            "range_select",
            "sendrecv",
        ),
        "nki.isa: the page of each instruction names its generations",
    ),
    absent_forms=documented(
        (
            "activation with a number as bias",
            "activation(nl.reciprocal) with bias",
            "dma priority",
            "nc_matmul of float8_e4m3fn",
            "nl.abs_max, nl.abs_min, nl.square, nl.relu on the ALU",
            "rng(engine=gpsimd)",
            "tensor indirection (.indirect)",
            "tensor_scalar(engine=scalar)",
        ),
        "nki.isa, nki.api.shared and the release notes of 0.4: what only newer targets have",
    ),
    device_loops=assumed(True, "as trn2; no current toolchain runs trn1"),
    float8_kernels=assumed(False, "fp8 is no faster than bf16 there; kernels leave it out"),
    tensor_transpose_mode=documented(
        False, "trainium2_arch, Built-in Transpose Support: trn2 and newer"
    ),
    matmul_tile_min_elements=documented(
        64, "nki.isa.nc_matmul: row tiles of 64, of 32 on trn2 and newer"
    ),
    scalar_tensor_copy=documented(False, "nki.isa.tensor_copy: ScalarE on trn2 and newer"),
)
