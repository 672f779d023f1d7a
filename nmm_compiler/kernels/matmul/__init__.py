"""Dense products: what (spec.py), how (schedule.py), the NKI kernel, the torch op."""

from nmm_compiler.kernels.matmul.spec import MatmulSpec as MatmulSpec
