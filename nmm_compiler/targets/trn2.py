"""Trainium 2 (NeuronCore-v3): the default target."""

from nmm_compiler.targets.base import Target, assumed, documented, measured

TARGET = Target.of(
    "trn2",
    generation="gen3",
    summary="Trainium 2, NeuronCore-v3",
    instances=("trn2",),
    physical_cores_per_logical_core=documented(
        2, "logical-neuroncore-config: LNC 2 is the default"
    ),
    nki_beta_1=documented(True, "NKI FAQ of SDK 2.26: Inf2, Trn1, Trn1n and Trn2"),
    # Memories
    partitions=documented(
        128, "trainium_inferentia2_arch, trainium2_arch, trainium3_arch: 128 partitions"
    ),
    sbuf_bytes_per_partition=documented(
        224 * 1024, "trainium2_arch: SBUF size over 128 partitions"
    ),
    sbuf_reserved_bytes_per_partition=measured(
        16384 + 8 + 512,
        "nki-library budgets: 16384 B dynamic-DMA scratch, 8 B reserved, 512 B identity",
    ),
    psum_banks=documented(
        8,
        "trainium_inferentia2_arch, trainium2_arch, trainium3_arch: 8 banks of 2 KiB per partition",
    ),
    psum_bank_bytes_per_partition=documented(
        2048, "trainium_inferentia2_arch, trainium2_arch, trainium3_arch: 2 KiB, 512 fp32 elements"
    ),
    hbm_bytes_per_second=documented(362e9, "2.9 TB/s per chip over 8 cores"),
    hbm_bytes=documented(12 * 2**30, "trainium2_arch: 96 GiB per chip over 8 cores"),
    collective_points=measured(
        ((4, 8 << 10, 15.1), (4, 16 << 20, 183.0), (64, 8 << 10, 17.6), (64, 16 << 20, 185.0)),
        "all-reduce TP4 8 KiB 13.3 us and 1.8 us trigger; 64 ranks 17.5 us and 100 GB/s",
    ),
    # Tile limits
    moving_free_max_elements=documented(512, "nki.isa.nc_matmul: moving free size <= 512"),
    # TensorE
    tensor_clock_hz=documented(2.4e9, "trainium2_arch, trainium3_arch: TensorE clock"),
    tensor_columns=documented(
        128, "trainium_inferentia2_arch, trainium2_arch, trainium3_arch: 128 x 128 systolic array"
    ),
    fp32_pass_factor=documented(4.0, "nc_matmul cost table: fp32 takes 4 passes"),
    fp8_double_row=documented(
        True, "trainium2_arch, trainium3_arch: fp8 double row doubles the rate"
    ),
    tensor_min_interval_cycles=documented(64, "nki_perf_guide: MM interval max(N, 64)"),
    tensor_interval_overhead_cycles=measured(
        9, "512-column bf16 matmuls 217 ns back to back, 213 ideal"
    ),
    tensor_fp32_overhead_cycles=measured(16, "fp32 512-column matmul 859 ns, 853 ideal"),
    tensor_fp32_min_columns=measured(
        128, "isolated instruction probes: fp32 matmuls issue every 4 max(N, 128) + 24 cycles"
    ),
    tensor_latency_seconds=measured(
        0.203e-6, "isolated instruction probes: a bf16 matmul completes 203 ns after its columns"
    ),
    stationary_load_speedup=documented(4.0, "nki_perf_guide: fast LoadStationary up to 4x"),
    tensor_ramp_seconds=measured(
        3.7e-6, "device profiles: starts 427 ns apart, 217 ns after 3.5 to 3.9 us of work"
    ),
    tensor_ramp_start_fraction=documented(
        0.5, "neuron-explorer, Understanding throttling: 50 % to 100 % over about 3 us"
    ),
    # VectorE, ScalarE, GpSimd
    vector_clock_hz=documented(0.96e9, "trainium2_arch: VectorE clock"),
    scalar_clock_hz=documented(1.2e9, "trainium2_arch, trainium3_arch: ScalarE clock"),
    gpsimd_clock_hz=documented(1.2e9, "trainium2_arch, trainium3_arch: GpSimd clock"),
    engine_min_cycles=documented(64, "instruction cost tables of NKI 0.1: MIN = 64 cycles"),
    engine_streaming_overhead_cycles=measured(
        20, "kernel-optimization tutorial profile: 553 ns per 512 columns"
    ),
    engine_isolated_overhead_cycles=measured(
        150, "isolated instruction probes: 153 to 160 ns beyond the elements"
    ),
    scalar_isolated_overhead_cycles=measured(
        228, "isolated instruction probes: copies take 190 ns beyond the elements"
    ),
    scalar_operand_read_cycles=measured(
        108, "isolated instruction probes: 78 to 100 ns per bias or scale tile"
    ),
    gpsimd_fixed_cycles=documented(
        150, "instruction cost tables of NKI 0.1: iota, affine_select 150 + N"
    ),
    vector_fast_modes=documented(
        True, "trainium2_arch, trainium3_arch: VectorE performance modes exist"
    ),
    vector_two_input_passes=measured(
        1.0, "isolated instruction probes: two fp32 inputs in SBUF take 1.042 ns per element"
    ),
    vector_reciprocal_cycles=measured(6.0, "isolated instruction probes: 6.249 ns per element"),
    vector_memset_cycles=measured(
        0.8, "isolated instruction probes: memset of fp32 takes 58 + 0.832 ns per element"
    ),
    wide_stride_bytes=documented(16, "trainium_inferentia2_arch: strides of 16 B and more"),
    wide_stride_factor=measured(
        2.0, "device profile: 1,024 ScalarE copies 632 us, with a stride of 32 B 1,138 us"
    ),
    unset_engine_prefers_scalar=measured(
        False, "agent-skill example: all 256 copies out of PSUM on VectorE, 174 us"
    ),
    beta1_product_awaits_load=measured(
        True, "voyager-compiler: two norms with a product take 4,114 and 8,466 us, not a quarter"
    ),
    activation_table_load_seconds=measured(1.3e-6, "nki-dma-overview figures: about 1.3 us (trn2)"),
    # DMA
    dma_engines=documented(16, "nki-dma-overview: 16 per core"),
    dma_bytes_per_second_per_engine=documented(23e9, "nki-dma-bandwidth-guide: practical rate"),
    dma_generates_descriptors=documented(True, "nki-dge: descriptors generated on the device"),
    dma_transposes=documented(True, "nki.isa.dma_transpose: trn2 and newer"),
    dma_issue_seconds=measured(
        0.485e-6, "CS149 assignment 4: 0.486 us between one-descriptor DMAs"
    ),
    dma_issue_descriptor_seconds=measured(
        0.95e-9, "CS149 assignment 4: 0.61 us between 128-descriptor DMAs; tutorial v2: 0.604 us"
    ),
    dma_static_issue_seconds=measured(
        0.6e-6, "isolated instruction probes: loads issue every 599 ns, stores every 609"
    ),
    dma_hardware_issue_seconds=documented(
        0.6e-6, "nki-dge: each hwdge instruction takes about 600 ns"
    ),
    dma_software_gpsimd_seconds=measured(
        50e-9, "device profiles: 31 to 75 ns of GpSimd per software-generated DMA"
    ),
    dma_descriptor_seconds=measured(
        6e-9, "tutorial v2 and v3 packet times: 28 ns for 512 B, 94 ns for 2 KiB"
    ),
    dma_descriptor_min_seconds=assumed(
        15e-9, "12-20 ns per further small descriptor of an engine in public runs"
    ),
    dma_short_row_bytes=measured(
        512, "device profiles: packets of 256 B 41 ns (17 from hardware), of 512 B 27 ns"
    ),
    dma_short_row_seconds=measured(
        41e-9, "device profiles: packets of 256 B 41 ns (17 from hardware), of 512 B 27 ns"
    ),
    dma_read_latency_fraction=measured(
        0.305, "isolated instruction probes: a load's payload takes 1.305 of its ideal time"
    ),
    dma_start_latency_seconds=documented(
        1.3e-6, "nki-dma-bandwidth-guide: 1300 ns semaphore to start"
    ),
    dma_stagger_seconds=measured(
        0.3e-6, "nki-dma-overview traces: the 16 engines start over about 0.3 us"
    ),
    dma_transpose_fraction=documented(
        0.9, "trainium2_arch: HBM to SBUF at most 90 % of DMA throughput"
    ),
    dma_transpose_sbuf_fraction=documented(
        0.5, "trainium2_arch: SBUF to SBUF at most 50 % of DMA throughput"
    ),
    dma_transpose_wide_fraction=assumed(
        0.45, "half of the 2-byte path: 4-byte elements are moved as two halves"
    ),
    semaphore_seconds=measured(
        0.32e-6, "nki-dma-overview traces: about 0.32 us from DMA end to consumer start"
    ),
    engine_semaphore_seconds=assumed(0.1e-6, "about 100 cycles to signal and wake another engine"),
    kernel_start_stop_seconds=measured(
        10e-6, "CS149 assignment 4: 15 us for one 128x200 addition, 5 of them work"
    ),
    # What one engine's use of a memory shuts out
    vector_gpsimd_share_sbuf=documented(
        False, "trainium2_arch, trainium3_arch: concurrency of VectorE and GpSimd"
    ),
    vector_scalar_share_psum=documented(
        False, "trainium2_arch, trainium3_arch: concurrency of VectorE and ScalarE"
    ),
    # What instructions may do
    absent_instructions=documented(
        ("activate2", "exponential", "nc_matmul_mx", "quantize_mx", "rand2"),
        "nki.isa: the page of each instruction names its generations",
    ),
    absent_forms=documented(
        (
            "dma priority",
            "nc_matmul of float8_e4m3fn",
            "tensor indirection (.indirect)",
            "nl.abs_max, nl.abs_min, nl.square, nl.relu on the ALU",
            "rand_get_state(dst in PSUM)",
            "rand_get_state(engine=vector)",
            "rand_set_state(engine=vector)",
        ),
        "nki.isa, NkiTensor, nki.api.shared and the notes of 0.4: what only newer targets have",
    ),
    tensor_transpose_mode=documented(
        True, "trainium2_arch, Built-in Transpose Support: trn2 and newer"
    ),
    device_loops=documented(True, "nki.language.fori_loop: trn2 and newer, from NKI 0.6"),
    float8_kernels=documented(True, "nki.isa.nc_matmul: fp8 operands at twice the rate"),
    matmul_tile_min_elements=documented(
        32, "nki.isa.nc_matmul: row tiles of 64, of 32 on trn2 and newer"
    ),
    matmul_psum_banks=documented(
        1, "nki.isa.nc_matmul: N up to 512; on trn3 up to 4096 in fp32, 8192 in bf16"
    ),
    matmul_bfloat16_sums=documented(False, "nki.isa.nc_matmul: dst is fp32; fp32 or bf16 on trn3"),
    matmul_adds_to_written_psum=documented(
        False,
        "nki.isa.nc_matmul: accumulating onto what another engine wrote is undefined before trn3",
    ),
    scalar_tensor_copy=documented(True, "nki.isa.tensor_copy: ScalarE on trn2 and newer"),
    scalar_all_operators=documented(
        False, "nki.isa.tensor_scalar: ScalarE takes (multiply, add), multiply or add on trn2"
    ),
    scalar_fast_modes=documented(
        False, "trainium3_arch: ScalarE copies and scales 16-bit data twice as fast"
    ),
    vector_fast_float8=documented(
        False, "trainium3_arch: VectorE performance modes take 8-bit floats"
    ),
)
