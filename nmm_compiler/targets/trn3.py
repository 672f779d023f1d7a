"""Trainium 3 (NeuronCore-v4). No public measurement calibrates this target yet; where AWS prints no
number, trn2's is assumed, and `sources` says so.
"""

from nmm_compiler.targets.base import assumed, documented
from nmm_compiler.targets.trn2 import TARGET as TRN2

TARGET = TRN2.variant(
    "trn3",
    generation="gen4",
    summary="Trainium 3, NeuronCore-v4",
    instances=("trn3",),
    physical_cores_per_logical_core=documented(2, "trainium3: logical cores as on Trainium2"),
    nki_beta_1=documented(False, "NKI FAQ of SDK 2.26: Inf2, Trn1, Trn1n and Trn2"),
    # Memories
    sbuf_bytes_per_partition=documented(
        256 * 1024, "trainium3_arch: SBUF size over 128 partitions"
    ),
    hbm_bytes_per_second=documented(588e9, "4.7 TB/s per chip (trainium3_arch) over 8 cores"),
    hbm_bytes=documented(18 * 2**30, "trainium3_arch: 144 GiB per chip over 8 cores"),
    # TensorE
    # VectorE, ScalarE, GpSimd
    vector_clock_hz=documented(1.2e9, "trainium3_arch: VectorE clock"),
    # DMA
    dma_bytes_per_second_per_engine=documented(33e9, "nki-dma-bandwidth-guide: practical rate"),
    dma_hardware_issue_seconds=assumed(0.6e-6, "as trn2"),
    dma_transpose_fraction=assumed(0.9, "as trn2"),
    dma_transpose_sbuf_fraction=assumed(0.5, "as trn2"),
    # What instructions may do
    absent_instructions=documented(
        (),
        "nki.isa: the page of each instruction names its generations",
    ),
    absent_forms=documented((), "the newest generation has every documented form"),
    matmul_psum_banks=documented(
        8, "nki.isa.nc_matmul: N up to 512; on trn3 up to 4096 in fp32, 8192 in bf16"
    ),
    matmul_bfloat16_sums=documented(True, "nki.isa.nc_matmul: dst is fp32; fp32 or bf16 on trn3"),
    matmul_adds_to_written_psum=documented(
        True,
        "nki.isa.nc_matmul: accumulating onto what another engine wrote is undefined before trn3",
    ),
    scalar_all_operators=documented(
        True, "nki.isa.tensor_scalar: ScalarE takes (multiply, add), multiply or add on trn2"
    ),
    scalar_fast_modes=documented(
        True, "trainium3_arch: ScalarE copies and scales 16-bit data twice as fast"
    ),
    vector_fast_float8=documented(
        True, "trainium3_arch: VectorE performance modes take 8-bit floats"
    ),
)
