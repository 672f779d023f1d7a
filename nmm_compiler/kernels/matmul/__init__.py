"""Dense products: the spec, the schedule, the NKI kernel, the torch op."""

from nmm_compiler.kernels.matmul.spec import MatmulSpec as MatmulSpec
