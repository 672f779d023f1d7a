"""Trainium 1 (NeuronCore-v2): a simulation and timing target.

NKI 0.3 and later no longer run on this hardware (its pages name trn2 and trn3 only), so kernels for
trn1 are simulated and timed here and are not meant to be deployed.
"""

from nmm_compiler.targets.base import Target, assumed, documented, measured

_SOURCES = {
    "partitions": documented("trainium_inferentia2_arch: 128 partitions"),
    "sbuf_bytes_per_partition": documented(
        "trainium_inferentia2_arch: SBUF size over 128 partitions"
    ),
    "sbuf_reserved_bytes_per_partition": documented("NKI 0.1 notes: 176 KiB of 192 KiB usable"),
    "psum_banks": documented("trainium_inferentia2_arch: 8 banks of 2 KiB per partition"),
    "psum_bank_bytes_per_partition": documented(
        "trainium_inferentia2_arch: 2 KiB, 512 fp32 elements"
    ),
    "hbm_bytes_per_second": documented("trn1: 820 GB/s per chip over 2 cores"),
    "stationary_free_max_elements": documented("nki.isa.nc_matmul: stationary free size <= 128"),
    "moving_free_max_elements": documented("nki.isa.nc_matmul: moving free size <= 512"),
    "vector_transpose_max_elements": documented("nki.isa.nc_transpose: 32 x 32 on VectorE"),
    "tensor_clock_hz": documented("trainium_inferentia2_arch: TensorE clock"),
    "tensor_rows": documented("trainium_inferentia2_arch: 128 x 128 systolic array"),
    "tensor_columns": documented("trainium_inferentia2_arch: 128 x 128 systolic array"),
    "fp32_pass_factor": documented("nc_matmul cost table: fp32 takes 4 passes"),
    "fp8_double_row": documented(
        "trainium_inferentia2_arch: fp8 double row not on this generation"
    ),
    "tensor_min_interval_cycles": documented("nki_perf_guide: MM interval max(N, 64)"),
    "tensor_interval_overhead_cycles": measured(
        "bf16 matmuls at most 212 ns against 183 ideal; part of it dependence"
    ),
    "tensor_fp32_overhead_cycles": measured(
        "fp32 512-column matmul about 853 ns against 731 ideal"
    ),
    "tensor_latency_seconds": documented("trainium_inferentia2_arch: MM_INIT_LATENCY, 64 cycles"),
    "stationary_load_speedup": documented("nki_perf_guide: fast LoadStationary up to 4x"),
    "tensor_ramp_seconds": documented("no clock ramp is documented for this generation"),
    "tensor_ramp_start_fraction": documented("no clock ramp is documented for this generation"),
    "vector_clock_hz": documented("trainium_inferentia2_arch: VectorE clock"),
    "scalar_clock_hz": documented("trainium_inferentia2_arch: ScalarE clock"),
    "gpsimd_clock_hz": documented("trainium_inferentia2_arch: GpSimd clock"),
    "engine_min_cycles": documented("instruction cost tables of NKI 0.1: MIN = 64 cycles"),
    "engine_streaming_overhead_cycles": measured(
        "fused_mamba tutorial profile: 931 ns for a tensor_tensor of 2 x 512 columns"
    ),
    "engine_isolated_overhead_cycles": documented(
        "trainium_inferentia2_arch: 100 cycles when the previous result is an operand"
    ),
    "scalar_isolated_overhead_cycles": measured(
        "nki_perf_guide figure 16: 264-cycle interval, less the 64-cycle minimum"
    ),
    "gpsimd_fixed_cycles": documented(
        "instruction cost tables of NKI 0.1: iota, affine_select 150 + N"
    ),
    "vector_fast_modes": documented(
        "trainium_inferentia2_arch: VectorE performance modes not on this generation"
    ),
    "activation_table_load_seconds": assumed("as trn2"),
    "dma_engines": documented("nki-dma-overview: 16 per core"),
    "dma_queues_per_engine": documented("nki-dma-overview: 16 queues per engine"),
    "dma_bytes_per_second_per_engine": documented("nki-dma-bandwidth-guide: practical rate"),
    "dma_generates_descriptors": documented(
        "trainium2_arch: before trn2 descriptors are prebuilt by the host"
    ),
    "dma_issue_seconds": assumed("as trn2: descriptors written by GpSimd software"),
    "dma_issue_descriptor_seconds": assumed("as trn2: descriptors written by GpSimd software"),
    "dma_static_issue_seconds": measured(
        "CS149 assignment 4: 0.357 us for 1, 0.33 us for 128 descriptors"
    ),
    "dma_hardware_issue_seconds": assumed("no hardware DGE on this generation; as trn2"),
    "dma_descriptor_seconds": assumed("as trn2"),
    "dma_descriptor_min_seconds": assumed("as trn2"),
    "dma_start_latency_seconds": documented("nki-dma-bandwidth-guide: 1300 ns semaphore to start"),
    "dma_stagger_seconds": assumed("as trn2"),
    "dma_transpose_fraction": assumed("nki_perf_guide: much slower than a plain load; no figure"),
    "dma_transpose_sbuf_fraction": assumed("as dma_transpose_fraction"),
    "dma_transpose_wide_fraction": assumed("as dma_transpose_fraction"),
    "semaphore_seconds": assumed("as trn2: nki-dma-overview traces"),
    "engine_semaphore_seconds": assumed("about 100 cycles to signal and wake another engine"),
    "kernel_start_stop_seconds": measured(
        "CS149 assignment 4: 19 us for one 128x200 addition, 5 of them work"
    ),
    "vector_gpsimd_share_sbuf": documented(
        "trainium_inferentia2_arch: concurrency of VectorE and GpSimd"
    ),
    "vector_scalar_share_psum": documented(
        "trainium_inferentia2_arch: concurrency of VectorE and ScalarE"
    ),
}

TARGET = Target(
    name="trn1",
    generation="gen2",
    summary="Trainium 1, NeuronCore-v2, simulation and timing only",
    partitions=128,
    sbuf_bytes_per_partition=192 * 1024,
    sbuf_reserved_bytes_per_partition=16 * 1024,
    psum_banks=8,
    psum_bank_bytes_per_partition=2048,
    hbm_bytes_per_second=410e9,
    stationary_free_max_elements=128,
    moving_free_max_elements=512,
    vector_transpose_max_elements=32,
    tensor_clock_hz=2.8e9,
    tensor_rows=128,
    tensor_columns=128,
    fp32_pass_factor=4.0,
    fp8_double_row=False,
    tensor_min_interval_cycles=64,
    tensor_interval_overhead_cycles=12,
    tensor_fp32_overhead_cycles=340,
    tensor_latency_seconds=64 / 2.8e9,
    stationary_load_speedup=4.0,
    tensor_ramp_seconds=0.0,
    tensor_ramp_start_fraction=1.0,
    vector_clock_hz=1.12e9,
    scalar_clock_hz=1.4e9,
    gpsimd_clock_hz=1.4e9,
    engine_min_cycles=64,
    engine_streaming_overhead_cycles=20,
    engine_isolated_overhead_cycles=100,
    scalar_isolated_overhead_cycles=200,
    gpsimd_fixed_cycles=150,
    vector_fast_modes=False,
    activation_table_load_seconds=1.3e-6,
    dma_engines=16,
    dma_queues_per_engine=16,
    dma_bytes_per_second_per_engine=17e9,
    dma_generates_descriptors=False,
    dma_issue_seconds=0.5e-6,
    dma_issue_descriptor_seconds=1e-9,
    dma_static_issue_seconds=0.35e-6,
    dma_hardware_issue_seconds=0.6e-6,
    dma_descriptor_seconds=6e-9,
    dma_descriptor_min_seconds=15e-9,
    dma_start_latency_seconds=1.3e-6,
    dma_stagger_seconds=0.3e-6,
    dma_transpose_fraction=0.1,
    dma_transpose_sbuf_fraction=0.1,
    dma_transpose_wide_fraction=0.1,
    semaphore_seconds=0.32e-6,
    engine_semaphore_seconds=0.1e-6,
    kernel_start_stop_seconds=14e-6,
    vector_gpsimd_share_sbuf=True,
    vector_scalar_share_psum=True,
    sources=_SOURCES,
)
