"""What no kernel computes is refused, with the way out: wrong specs, and targets that lack it."""

import pytest

from kernels.judge import spec_of
from nmm_compiler import errors
from nmm_compiler.codegen.build import build_kernel

# spec, "on" another target than trn2 | class of the error | what it says
REFUSED = r"""
attention m=0 | ShapeError | m is 0
attention m=8 d=257 | SpecError | heads have at most 256
attention m=8 context=131073 | SpecError | at most 131072 keys
attention m=8 heads=3 kv_heads=2 | ShapeError | 3 heads do not share 2 kv_heads
attention m=8 context=4 | ShapeError | set causal to False
attention m=8 causal=false window=4 | SpecError | set causal to True
attention m=8 scale=-1.0 | SpecError | scale -1.0 must be positive
attention m=8 d=5 rope=q | SpecError | pass an even d
attention m=8 rope=qk k_layout=col | SpecError | use rope 'q'
attention m=8 rope=k | UnknownNameError | rope
attention m=8 dtype=float8_e4m3 | UnknownNameError | dtype
attention m=128 context=100000 | CapacityError | keys and values of a head stay in SBUF
linear m=1 k=1024 n=512 rank=64 weight=int4 | SpecError | pass weight mxfp4 or mxfp8
linear m=1 k=1024 n=512 rank=64 weight=mxfp5 | UnknownNameError | did you mean
linear m=1 k=200 n=512 rank=64 | ShapeError | whole 128s of inputs .* take fp8
linear m=1 k=1024 n=511 rank=64 | ShapeError | even number of outputs
linear m=1 k=1024 n=512 rank=300 | SpecError | pass a rank of 250 or less
linear m=1 k=1024 n=512 rank=8,8 | ShapeError | rank has 2 values for 1 results
linear m=1 k=640 n=512 rank=64 norm=rms | ShapeError | make the norm before
linear m=1 k=1024 n=512 rank=64 dtype=float32 | UnknownNameError | dtype
linear_mlp m=1 k=512 n=640 rank=32 | ShapeError | pass down=False
linear_mlp m=1 k=512 n=1024 rank=8,8 | ShapeError | rank has 2 values for 3 results
linear m=1 k=1024 n=512 rank=64 weight=mxfp4 | SpecError | trn2 has no such product; take fp8
linear m=1 k=1024 n=512 weight=mxfp4 on trn1 | SpecError | trn1 has no such product; take bfloat16
linear m=1 k=1024 n=512 rank=64 weight=fp8 on trn1 | SpecError | use dtype bfloat16
experts m=5 k=256 n=128 groups=12 top_k=2 weight=int8 | NmmError | weight
experts m=5 k=256 n=128 groups=12 top_k=2 weight=factors ranks=8,0 | NmmError | ranks are
experts m=5 k=256 n=128 groups=12 top_k=2 weight=fp8 weight_layout=col | NmmError | layout 'row'
experts m=5 k=256 n=128 groups=12 top_k=2 weight=fp8 dtype=float32 | NmmError | bfloat16 or float16
experts m=5 k=256 n=128 groups=12 weight=mxfp4 halves=interleaved limit=7.0 | NmmError | 'joined'
experts m=5 k=250 n=128 groups=12 top_k=2 weight=mxfp4 | NmmError | whole 32s
experts m=5 k=256 n=128 groups=12 top_k=13 | NmmError | top_k is 13 of 12 groups
experts m=5 k=256 n=128 groups=12 top_k=2 slope=1.7 | NmmError | belong to a limit
experts m=5 k=256 n=128 groups=12 top_k=2 limit=-1.0 | NmmError | number of 0 or more
experts m=5 k=256 n=128 groups=12 top_k=2 weight=mxfp4 | SpecError | multiplied by trn3
experts m=5 k=256 n=128 groups=12 top_k=2 on trn1 | SpecError | trn2
adapters m=8 k=256 n=384 r=16 groups=4 on trn1 | SpecError | trn2
adapters m=8 k=256 n=384 r=16 groups=4 dtype=float8_e4m3 | NmmError | dtype
lowrank m=8 k=16 r=4 n=32 scales=channel | SpecError | to dtype float8_e4m3, and dtype is bfloat16
lowrank m=8 k=16 r=4 n=32 dtype=float8_e4m3 scales=chanel | UnknownNameError | mean 'channel'
lowrank m=8 k=16 r=4 n=32 dtype=float8_e4m3 out_dtype=float8_e4m3 | UnknownNameError | out_dtype
lowrank m=8 k=16 r=4 n=32 out_dtype=float32 | UnknownNameError | out_dtype
lowrank m=8 k=16 r=4 n=32 dtype=float8_e4m3 x_dtype=float32 | UnknownNameError | x_dtype
lowrank m=8 k=16 r=4 n=32 dtype=float16 x_dtype=bfloat16 | UnknownNameError | x_dtype
lowrank m=8 k=16 r=4 n=32 dtype=float8_e4m3 base | SpecError | take family linear with weight .fp8.
lowrank m=8 k=16 r=4 n=32 scale=inf | SpecError | scale is inf
gated_mlp m=8 k=16 r=4 n=32 up_r=-1 | ShapeError | up_r is -1
lowrank m=20 k=300 r=140 n=200 inner_activation=rleu | UnknownNameError | did you mean 'relu'
lowrank m=20 k=300 r=140 n=200 inner_activation=relu scale=2.0 | SpecError | fold the scale into v
lowrank m=20 k=300 r=140 n=200 inner_bias dtype=float8_e4m3 | SpecError | use bfloat16
lowrank m=20 k=300 r=140 n=200 inner_norm inner_bias | SpecError | drop them
lowrank m=20 k=300 r=140 n=200 inner_norm inner_eps=-1.0 | SpecError | 0 or more
matmul m=20 k=300 n=200 norm=rsm | UnknownNameError | did you mean 'rms'
matmul m=20 k=300 n=200 norm_gain | SpecError | belong to a norm
matmul m=20 k=300 n=200 norm=rms norm_bias | SpecError | has no bias
matmul m=20 k=300 n=200 norm=rms norm_eps=-1.0 | SpecError | 0 or more
matmul m=20 k=300 n=200 norm=rms dtype=float8_e4m3 | SpecError | pass x_dtype bfloat16
lowrank_shared m=20 k=300 pairs=100:200 residual | SpecError | drop residual
lowrank_shared m=8 k=16 pairs=4:0 | ShapeError | n of pair 0 is 0
lowrank_shared m=8 k=16 pairs=4:32 pairs=4:8 bias=true,false,true | ShapeError | bias has 3
lowrank_shared m=8 k=16 pairs=4:32 pairs=4:32 activation=silu,sillu | UnknownNameError | mean 'silu'
lowrank_shared m=8 k=16 pairs=4:32 pairs=4:32 out_layout=row,rows | UnknownNameError | mean 'row'
gated_mlp_up m=20 k=300 n=200 r=60 residual | SpecError | drop residual
linear m=20 k=512 n=200,200 rank=30 residual | SpecError | drop residual
linear_mlp m=20 k=512 n=512 no_down rank=0 residual | SpecError | drop residual
matmul m=8 k=16 n=32 dtype=float8_e4m3 on trn1 | SpecError | trn1 does not, use dtype bfloat16
matmul m=8 k=16 n=32 dtype=float8_e4m3 x_dtype=bfloat16 on trn1 | SpecError | trn1 does not, use
lowrank m=8 k=16 r=4 n=32 dtype=float8_e4m3 on trn1 | SpecError | trn1 does not, use dtype bfloat16
lowrank_shared m=8 k=16 pairs=4:32 dtype=float8_e4m3 on trn1 | SpecError | trn1 does not, use
gated_mlp_up m=8 k=16 r=4 n=32 dtype=float8_e4m3 on trn1 | SpecError | trn1 does not, use
gated_mlp m=8 k=16 r=4 n=32 dtype=float8_e4m3 x_dtype=float16 on trn1 | SpecError | trn1 does not
lowrank m=6 k=512 r=256 n=384 tp=2 tp_axis=rank | UnknownNameError | rank
lowrank m=6 k=512 r=256 n=384 base tp=2 tp_axis=rows | SpecError | cut v by its outputs
lowrank m=6 k=512 r=256 n=384 tp_axis=rows | SpecError | tp_axis is 'rows' and tp 1
lowrank m=6 k=512 r=256 n=384 tp=2 tp_axis=rows on trn1 | SpecError | on trn1 pass tp=1
lowrank m=6 k=512 r=200 n=384 lnc=3 | SpecError | pass 1 or 2
lowrank m=6 k=512 r=200 n=384 lnc=2 on trn1 | SpecError | of trn1 has 1 physical core; pass lnc=1
lowrank m=7 k=512 r=200 n=333 lnc=2 | SpecError | numbers of tokens or outputs
linear m=7 k=128 n=198 weight=mxfp4 lnc=2 on trn3 | SpecError | or of outputs, of MX weights fours
attention m=1 context=256 heads=3 kv_heads=1 lnc=2 | SpecError | even numbers of heads of keys, or
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_what_no_kernel_computes_is_refused_with_the_way_out(row):
    line, error, words = row.split(" | ")
    line, _, target = line.partition(" on ")
    with pytest.raises(getattr(errors, error), match=words):
        build_kernel(spec_of(line), target or "trn2")
