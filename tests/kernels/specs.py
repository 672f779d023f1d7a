"""Random kernel specs for the property tests: sizes around the tile limits, every field varied."""

from hypothesis import strategies as st

from nmm_compiler.kernels.base import ACTIVATIONS
from nmm_compiler.kernels.gated_mlp import GatedMLPSpec, GatedMLPUpSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.matmul import MatmulSpec

# Around 1, the partition count and PSUM's 512 columns, and sizes that divide nothing.
_EDGES = (1, 2, 3, 17, 31, 64, 100, 127, 128, 129, 200, 255, 256, 257, 300, 384)
sizes = st.one_of(st.sampled_from(_EDGES), st.integers(1, 400))
tokens = st.one_of(st.sampled_from((1, 2, 5, 16, 33, 127, 128, 130, 513, 600)), st.integers(1, 300))
outputs = st.one_of(sizes, st.sampled_from((511, 512, 513, 700, 1030)))
layouts = st.sampled_from(("row", "col"))
dtypes = st.sampled_from(("bfloat16", "float16", "float32"))
activations = st.sampled_from(ACTIVATIONS)
scales = st.sampled_from((1.0, 0.5, 2.0, -1.75))
ranks = st.one_of(st.just(0), sizes)

_common = {
    "m": tokens,
    "k": sizes,
    "n": outputs,
    "dtype": dtypes,
    "x_layout": layouts,
    "out_layout": layouts,
    "activation": activations,
}

SPECS = {
    "lowrank": st.builds(
        LowRankSpec,
        **_common,
        r=sizes,
        u_layout=layouts,
        v_layout=layouts,
        w_layout=layouts,
        bias=st.booleans(),
        base=st.booleans(),
        scale=scales,
    ),
    "matmul": st.builds(MatmulSpec, **_common, w_layout=layouts, bias=st.booleans()),
    "gated_mlp_up": st.builds(
        GatedMLPUpSpec,
        **_common,
        gate_r=ranks,
        up_r=ranks,
        weight_layout=layouts,
        gate_bias=st.booleans(),
        up_bias=st.booleans(),
    ),
    "gated_mlp": st.builds(
        GatedMLPSpec,
        **_common,
        gate_r=ranks,
        up_r=ranks,
        down_r=ranks,
        weight_layout=layouts,
        gate_bias=st.booleans(),
        up_bias=st.booleans(),
        down_bias=st.booleans(),
    ),
}
