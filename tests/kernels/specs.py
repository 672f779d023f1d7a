"""Random kernel specs for the property tests: sizes around the tile limits, every field varied."""

import dataclasses

from hypothesis import strategies as st

from nmm_compiler.kernels.attention import AttentionSpec
from nmm_compiler.kernels.base import ACTIVATIONS
from nmm_compiler.kernels.experts import ExpertsSpec
from nmm_compiler.kernels.linear.corrected import CorrectedMLPSpec, CorrectedSpec
from nmm_compiler.kernels.linear.specs import (
    AdaptersSpec,
    GatedMLPSpec,
    GatedMLPUpSpec,
    LowRankSharedSpec,
    LowRankSpec,
    MatmulSpec,
)

# Around 1, the partition count and PSUM's 512 columns, and sizes that divide nothing.
_EDGES = (1, 2, 3, 17, 31, 64, 100, 127, 128, 129, 200, 255, 256, 257, 300, 384)
sizes = st.one_of(st.sampled_from(_EDGES), st.integers(1, 400))
tokens = st.one_of(st.sampled_from((1, 2, 5, 16, 33, 127, 128, 130, 513, 600)), st.integers(1, 300))
outputs = st.one_of(sizes, st.sampled_from((511, 512, 513, 700, 1030)))
layouts = st.sampled_from(("row", "col"))
dtypes = st.sampled_from(("bfloat16", "float16", "float32"))
FP8 = "float8_e4m3"
activations = st.sampled_from(ACTIVATIONS)
scales = st.sampled_from((1.0, 0.5, 2.0, -1.75))
ranks = st.one_of(st.just(0), sizes)

_common = {
    "m": tokens,
    "k": sizes,
    "n": outputs,
    "x_layout": layouts,
    "out_layout": layouts,
    "activation": activations,
}
_fp8 = {
    "dtype": st.just(FP8),
    "scales": st.sampled_from(("tensor", "channel")),
    "out_dtype": st.sampled_from((None, "float32", "float16")),
}
_wide_x = {"x_dtype": st.sampled_from(("bfloat16", "float16"))}
# fp8 contractions of several tiles, which double_row pairs
_long = {"k": st.one_of(sizes, st.integers(400, 1100))}
_lowrank = {
    "r": sizes,
    "u_layout": layouts,
    "v_layout": layouts,
    "bias": st.booleans(),
    "scale": scales,
}
_up = {
    "gate_r": ranks,
    "up_r": ranks,
    "weight_layout": layouts,
    "gate_bias": st.booleans(),
    "up_bias": st.booleans(),
}
_adapters = {
    "r": st.sampled_from((1, 8, 16, 33, 64)),
    "groups": st.sampled_from((1, 3, 8, 20)),
    "u_layout": layouts,
    "v_layout": layouts,
    "w_layout": layouts,
    "bias": st.booleans(),
    "base": st.booleans(),
}


def _formats(spec_class, fields, plain_fields=None):
    """Return specs of plain operands, and of fp8 weights with an x of either format."""
    plain = {**_common, **fields, **(plain_fields or {}), "dtype": dtypes}
    return st.one_of(
        st.builds(spec_class, **plain),
        st.builds(spec_class, **{**_common, **_long, **fields, **_fp8}),
        st.builds(spec_class, **{**_common, **_long, **fields, **_fp8, **_wide_x}),
    )


_small = st.one_of(st.sampled_from((1, 3, 64, 127, 128, 129, 200, 256)), st.integers(1, 300))
_pairs = st.lists(
    st.tuples(_small, st.lists(outputs, min_size=1, max_size=3).map(tuple)), min_size=1, max_size=4
).map(tuple)


@st.composite
def shared(draw):
    """Several pairs of factors; every result has its own bias, activation and layout."""
    pairs = draw(_pairs)
    count = sum(len(ns) for _, ns in pairs)

    def each(values):
        return draw(st.tuples(*[values] * count))

    formats = draw(st.sampled_from(({"dtype": dtypes}, _fp8, _fp8 | _wide_x)))
    return LowRankSharedSpec(
        m=draw(tokens),
        k=draw(sizes),
        pairs=pairs,
        **{name: draw(values) for name, values in formats.items()},
        x_layout=draw(layouts),
        u_layout=draw(layouts),
        v_layout=draw(layouts),
        bias=each(st.booleans()),
        activation=each(activations),
        out_layout=each(layouts),
    )


_inner = {
    "r": sizes,
    "u_layout": layouts,
    "v_layout": layouts,
    "bias": st.booleans(),
    "inner_activation": activations,
    "inner_bias": st.booleans(),
    "base": st.booleans(),
}


@st.composite
def attention(draw):
    """Prefills and decode steps, masked in every way, with and without RoPE."""
    causal = draw(st.booleans())
    m = draw(st.one_of(st.integers(1, 16), st.sampled_from((100, 127, 128, 129, 200, 300))))
    context = m + draw(st.sampled_from((0, 1, 63, 128, 200, 385, 1000)))
    k_layout = draw(layouts)
    return AttentionSpec(
        m=m,
        context=context,
        kv_heads=(kv_heads := draw(st.integers(1, 2))),
        heads=kv_heads * draw(st.integers(1, 3)),
        batch=draw(st.integers(1, 2)),
        d=draw(st.sampled_from((16, 40, 64, 80, 96, 128, 192, 256))),
        dtype=draw(dtypes),
        causal=causal,
        window=draw(st.sampled_from((0, 1, 50, 128, 300))) if causal else 0,
        soft_cap=draw(st.sampled_from((0.0, 0.0, 3.0, 50.0))),
        scale=draw(st.sampled_from((None, 1.0))),
        k_layout=k_layout,
        rope=draw(st.sampled_from(("none", "q", "qk" if k_layout == "row" else "q"))),
    )


@st.composite
def ended(draw, specs):
    """Specs of products, half of them of the norm of x, half of them with a residual."""
    spec = draw(specs)
    norm = "none" if spec.dtype == FP8 else draw(st.sampled_from(("none", "none", "rms", "layer")))
    gain = norm != "none" and draw(st.booleans())
    return dataclasses.replace(
        spec,
        norm=norm,
        norm_gain=gain,
        norm_offset=draw(st.sampled_from((0.0, 1.0))),
        norm_bias=norm == "layer" and draw(st.booleans()),
        norm_eps=draw(st.sampled_from((1e-6, 1e-3))),
        residual=spec.adds_residual and draw(st.booleans()),
    )


@st.composite
def corrected(draw, spec_class):
    """Few-bit weights with and without branches: contractions of whole and of ragged 512s."""
    weight = draw(st.sampled_from(("mxfp4", "mxfp8", "mxfp8_e5m2", "fp8")))
    k = draw(st.sampled_from((128, 512, 640, 1024, 2176)))
    mlp = spec_class is CorrectedMLPSpec
    norm = "none" if weight == "fp8" or k % 512 else draw(st.sampled_from(("none", "rms", "layer")))
    fields = {"down": draw(st.booleans())} if mlp else {"bias": draw(st.booleans())}
    n = st.sampled_from((512, 1024)) if mlp else st.integers(1, 600).map(lambda half: 2 * half)
    several = not mlp and draw(st.booleans())
    ns = tuple(draw(st.lists(n, min_size=2, max_size=3))) if several else draw(n)
    spec = spec_class(
        m=draw(tokens), k=k, n=ns, weight=weight, norm=norm,
        norm_gain=norm != "none" and draw(st.booleans()),
        dtype=draw(st.sampled_from(("bfloat16", "float16"))),
        x_layout=draw(layouts), out_layout=draw(layouts), activation=draw(activations), **fields,
    )  # fmt: skip
    # those of the least linear: its bytes are to be saved, in 8 bits by ranks below 0.24 of a side
    rank = draw(st.integers(0, (min(spec.n) if several else spec.n) // 5))
    residual = spec.adds_residual and draw(st.booleans())
    return dataclasses.replace(spec, rank=min(rank, 160, k // 5), residual=residual)


@st.composite
def experts(draw):
    """Gated MLPs that an index chooses, plain and clamped."""
    groups = draw(st.sampled_from((1, 2, 5, 9, 130)))
    clamped = draw(st.booleans())
    return ExpertsSpec(
        m=draw(st.sampled_from((1, 2, 5, 17, 64, 136))),
        k=draw(st.sampled_from((1, 64, 128, 200, 256, 320))),
        n=draw(st.sampled_from((1, 24, 64, 128, 150, 256))),
        groups=groups,
        top_k=draw(st.integers(1, min(groups, 4))),
        dtype=draw(dtypes),
        weight_layout=draw(layouts),
        halves=draw(st.sampled_from(("joined", "interleaved"))),
        activation=draw(activations),
        gate_up_bias=draw(st.booleans()),
        down_bias=draw(st.booleans()),
        **({"limit": 7.0, "slope": 1.702, "plus": 1.0} if clamped else {}),
    )


SPECS = {
    "experts": experts(),
    "attention": attention(),
    "lowrank_shared": ended(shared()),
    "lowrank": ended(
        st.one_of(
            _formats(LowRankSpec, _lowrank, {"base": st.booleans(), "w_layout": layouts}),
            st.builds(LowRankSpec, **{**_common, **_inner, "dtype": dtypes}),
            st.builds(
                LowRankSpec,
                **{**_common, **_lowrank, **_long, "dtype": dtypes, "x_layout": st.just("col")},
            ),
        )
    ),
    "adapters": ended(st.builds(AdaptersSpec, **{**_common, **_adapters, "dtype": dtypes})),
    "matmul": ended(_formats(MatmulSpec, {"w_layout": layouts, "bias": st.booleans()})),
    "gated_mlp_up": ended(_formats(GatedMLPUpSpec, _up)),
    "gated_mlp": ended(
        _formats(GatedMLPSpec, {**_up, "down_r": ranks, "down_bias": st.booleans()})
    ),
    "linear": corrected(CorrectedSpec),
    "linear_mlp": corrected(CorrectedMLPSpec),
}
