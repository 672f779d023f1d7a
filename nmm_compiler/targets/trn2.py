"""Trainium 2 (NeuronCore-v3): the default target."""

from nmm_compiler.targets.base import Target, assumed, documented, measured

_SOURCES = {
    "partitions": documented("trainium2_arch: 128 partitions"),
    "sbuf_bytes_per_partition": documented("trainium2_arch: SBUF size over 128 partitions"),
    "sbuf_reserved_bytes_per_partition": measured(
        "nki-library budgets: 16384 B dynamic-DMA scratch, 8 B reserved, 512 B identity"
    ),
    "psum_banks": documented("trainium2_arch: 8 banks of 2 KiB per partition"),
    "psum_bank_bytes_per_partition": documented("trainium2_arch: 2 KiB, 512 fp32 elements"),
    "hbm_bytes_per_second": documented("2.9 TB/s per chip over 8 cores"),
    "stationary_free_max_elements": documented("nki.isa.nc_matmul: stationary free size <= 128"),
    "moving_free_max_elements": documented("nki.isa.nc_matmul: moving free size <= 512"),
    "vector_transpose_max_elements": documented("nki.isa.nc_transpose: 32 x 32 on VectorE"),
    "tensor_clock_hz": documented("trainium2_arch: TensorE clock"),
    "tensor_rows": documented("trainium2_arch: 128 x 128 systolic array"),
    "tensor_columns": documented("trainium2_arch: 128 x 128 systolic array"),
    "fp32_pass_factor": documented("nc_matmul cost table: fp32 takes 4 passes"),
    "fp8_double_row": documented("trainium2_arch: fp8 double row doubles the rate"),
    "tensor_min_interval_cycles": documented("nki_perf_guide: MM interval max(N, 64)"),
    "tensor_interval_overhead_cycles": measured(
        "512-column bf16 matmuls 217 ns back to back, 213 ideal"
    ),
    "tensor_fp32_overhead_cycles": measured("fp32 512-column matmul 859 ns, 853 ideal"),
    "tensor_latency_seconds": measured(
        "kernel-optimization tutorial: fp32 half 600 ns long, 430 ns apart"
    ),
    "stationary_load_speedup": documented("nki_perf_guide: fast LoadStationary up to 4x"),
    "tensor_ramp_seconds": documented(
        "neuron-explorer, Understanding throttling: 50 % to 100 % over about 3 us"
    ),
    "tensor_ramp_start_fraction": documented(
        "neuron-explorer, Understanding throttling: 50 % to 100 % over about 3 us"
    ),
    "vector_clock_hz": documented("trainium2_arch: VectorE clock"),
    "scalar_clock_hz": documented("trainium2_arch: ScalarE clock"),
    "gpsimd_clock_hz": documented("trainium2_arch: GpSimd clock"),
    "engine_min_cycles": documented("instruction cost tables of NKI 0.1: MIN = 64 cycles"),
    "engine_streaming_overhead_cycles": measured(
        "kernel-optimization tutorial profile: 553 ns per 512 columns"
    ),
    "engine_isolated_overhead_cycles": measured("agent-skill example: 672-687 ns per 512 columns"),
    "scalar_isolated_overhead_cycles": measured(
        "nki-dma-overview figures: 4096 columns 3.7 us, 128 columns 0.4 us"
    ),
    "gpsimd_fixed_cycles": documented(
        "instruction cost tables of NKI 0.1: iota, affine_select 150 + N"
    ),
    "vector_fast_modes": documented("trainium2_arch: VectorE performance modes exist"),
    "activation_table_load_seconds": measured("nki-dma-overview figures: about 1.3 us (trn2)"),
    "dma_engines": documented("nki-dma-overview: 16 per core"),
    "dma_queues_per_engine": documented("nki-dma-overview: 16 queues per engine"),
    "dma_bytes_per_second_per_engine": documented("nki-dma-bandwidth-guide: practical rate"),
    "dma_generates_descriptors": documented("nki-dge: descriptors generated on the device"),
    "dma_issue_seconds": measured("CS149 assignment 4: 0.486 us between one-descriptor DMAs"),
    "dma_issue_descriptor_seconds": measured(
        "CS149 assignment 4: 0.61 us between 128-descriptor DMAs; tutorial v2: 0.604 us"
    ),
    "dma_static_issue_seconds": assumed("as trn1, where descriptors are prebuilt"),
    "dma_hardware_issue_seconds": documented("nki-dge: each hwdge instruction takes about 600 ns"),
    "dma_descriptor_seconds": measured(
        "tutorial v2 and v3 packet times: 28 ns for 512 B, 94 ns for 2 KiB"
    ),
    "dma_descriptor_min_seconds": assumed(
        "12-20 ns per further small descriptor of an engine in public runs"
    ),
    "dma_start_latency_seconds": documented("nki-dma-bandwidth-guide: 1300 ns semaphore to start"),
    "dma_stagger_seconds": measured(
        "nki-dma-overview traces: the 16 engines start over about 0.3 us"
    ),
    "dma_transpose_fraction": documented(
        "trainium2_arch: HBM to SBUF at most 90 % of DMA throughput"
    ),
    "dma_transpose_sbuf_fraction": documented(
        "trainium2_arch: SBUF to SBUF at most 50 % of DMA throughput"
    ),
    "dma_transpose_wide_fraction": assumed(
        "half of the 2-byte path: 4-byte elements are moved as two halves"
    ),
    "semaphore_seconds": measured(
        "nki-dma-overview traces: about 0.32 us from DMA end to consumer start"
    ),
    "engine_semaphore_seconds": assumed("about 100 cycles to signal and wake another engine"),
    "kernel_start_stop_seconds": measured(
        "CS149 assignment 4: 15 us for one 128x200 addition, 5 of them work"
    ),
    "vector_gpsimd_share_sbuf": documented("trainium2_arch: concurrency of VectorE and GpSimd"),
    "vector_scalar_share_psum": documented("trainium2_arch: concurrency of VectorE and ScalarE"),
}

TARGET = Target(
    name="trn2",
    generation="gen3",
    summary="Trainium 2, NeuronCore-v3",
    partitions=128,
    sbuf_bytes_per_partition=224 * 1024,
    sbuf_reserved_bytes_per_partition=16384 + 8 + 512,
    psum_banks=8,
    psum_bank_bytes_per_partition=2048,
    hbm_bytes_per_second=362e9,
    stationary_free_max_elements=128,
    moving_free_max_elements=512,
    vector_transpose_max_elements=32,
    tensor_clock_hz=2.4e9,
    tensor_rows=128,
    tensor_columns=128,
    fp32_pass_factor=4.0,
    fp8_double_row=True,
    tensor_min_interval_cycles=64,
    tensor_interval_overhead_cycles=9,
    tensor_fp32_overhead_cycles=16,
    tensor_latency_seconds=0.17e-6,
    stationary_load_speedup=4.0,
    tensor_ramp_seconds=3e-6,
    tensor_ramp_start_fraction=0.5,
    vector_clock_hz=0.96e9,
    scalar_clock_hz=1.2e9,
    gpsimd_clock_hz=1.2e9,
    engine_min_cycles=64,
    engine_streaming_overhead_cycles=20,
    engine_isolated_overhead_cycles=140,
    scalar_isolated_overhead_cycles=345,
    gpsimd_fixed_cycles=150,
    vector_fast_modes=True,
    activation_table_load_seconds=1.3e-6,
    dma_engines=16,
    dma_queues_per_engine=16,
    dma_bytes_per_second_per_engine=23e9,
    dma_generates_descriptors=True,
    dma_issue_seconds=0.485e-6,
    dma_issue_descriptor_seconds=0.95e-9,
    dma_static_issue_seconds=0.35e-6,
    dma_hardware_issue_seconds=0.6e-6,
    dma_descriptor_seconds=6e-9,
    dma_descriptor_min_seconds=15e-9,
    dma_start_latency_seconds=1.3e-6,
    dma_stagger_seconds=0.3e-6,
    dma_transpose_fraction=0.9,
    dma_transpose_sbuf_fraction=0.5,
    dma_transpose_wide_fraction=0.45,
    semaphore_seconds=0.32e-6,
    engine_semaphore_seconds=0.1e-6,
    kernel_start_stop_seconds=10e-6,
    vector_gpsimd_share_sbuf=False,
    vector_scalar_share_psum=False,
    sources=_SOURCES,
)
