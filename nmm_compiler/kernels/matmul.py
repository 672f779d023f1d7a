"""`MatmulSpec` under its earlier path."""

from nmm_compiler.kernels.linear.specs import MatmulSpec as MatmulSpec
