"""A call of every op, in float64, that the tests of ops share."""

import torch
from torch.utils._pytree import tree_map_only

from nmm_compiler.ops.references import ACTIVATIONS

K, R, N, TOKENS = 8, 4, 12, 6


def weight(*shape):
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


def fixed(*shape, dtype="as float32"):
    """Return numbers that take no gradient: scales, gains, gates; kept in float32 or as x is."""
    made = weight(*shape)
    made.fixed = dtype
    return made


def of_dtype(operands, dtype):
    """Return operands of a call whose numbers are of this dtype, each held to 16 bits."""

    def cast(t):
        narrow = dtype in (torch.float16, torch.bfloat16)
        to = torch.float32 if narrow and getattr(t, "fixed", "") == "as float32" else dtype
        return t.half().to(to) if t.dtype == torch.float64 else t

    return tree_map_only(torch.Tensor, cast, operands)


def calls(tokens=TOKENS):
    """Yield (op, operands, keywords): all layouts, with and without what may be left out."""
    x, u, v, w, bias = weight(tokens, K), weight(K, R), weight(R, N), weight(K, N), weight(N)
    back, deep, gate = weight(N, K), weight(2, tokens, K), [u, v]
    stored = {"u_layout": "col", "v_layout": "col"}
    ut, vt = u.t().contiguous(), v.t().contiguous()
    yield "lowrank_matmul", (deep, u, vt), {"v_layout": "col"}
    yield "lowrank_matmul", (deep, ut, vt, bias, w), {**stored, "scale": 0.5}
    yield "lowrank_matmul", (x, u, v, bias), {"activation": "silu"}
    yield "lowrank_matmul", (x.t().contiguous(), u, v), {"x_layout": "col", "out_layout": "col"}
    adapter = {"inner_activation": "gelu"}
    yield "lowrank_matmul", (x, u, v, bias, None, weight(R)), adapter
    yield "lowrank_matmul", (x, u, v, bias, None, None, weight(R)), {"inner_eps": 1e-3}
    yield "matmul", (x, w, bias), {}
    yield "matmul", (deep, back), {"w_layout": "col", "out_layout": "col"}
    yield "matmul_as_stored", (x, w, bias), {"out_layout": "col"}
    yield "matmul_as_stored", (x, deep[0]), {"x_layout": "col", "token_axis": "k"}
    both = {"activations": ["identity", "relu"], "out_layouts": ["row", "col"]}
    yield "lowrank_matmul_shared_x", (x, [u, u], [v, v], [None, bias]), {}
    yield "lowrank_matmul_shared_x", (x, [u, u], [v, v], [bias, None]), both
    layouts = {"out_layouts": ["row", "col"], **stored}
    yield "lowrank_matmul_shared_u", (x, ut, [vt, vt], [None, bias]), layouts
    yield "gated_mlp_up", (deep, gate, [w]), {}
    yield "gated_mlp_up", (x, gate, gate, bias, None), {"activation": "gelu"}
    yield "gated_mlp", (x, gate, gate, [back]), {}
    yield "gated_mlp", (x, [w], gate, [weight(N, R), u.t().contiguous()], bias, bias, weight(K)), {}
    q, key = weight(2, 4, tokens, 8), weight(2, 2, 10, 8)
    yield "attention", (q, key, key), {}
    yield "attention", (weight(2, tokens, 4, 8).transpose(1, 2), key, key), {"causal": False}
    yield "attention", (q, q, q, weight(2, tokens, 4)), {"rotates": "qk"}
    index = torch.arange(2 * tokens).reshape(tokens, 2) % 3 - 1  # -1 is none
    yield "adapters_matmul", (x, index[:, 1], u, v, fixed(2), bias, w), {}
    of_col = {**stored, "w_layout": "col"}
    yield "adapters_matmul", (deep, index.mT, ut, vt, fixed(2), None, back), of_col
    gates, clamped = fixed(tokens, 2), {"limit": 7.0, "slope": 1.702, "plus": 1.0}
    yield "experts", (x, weight(2, K, 8), weight(2, 4, K), index, gates), {}
    experts = (x, weight(2, 8, K), weight(2, K, 4), index, gates, weight(2, 8), weight(2, K))
    layouts = {"weight_layout": "col", "halves": "interleaved"}
    yield "experts", experts, {**layouts, **clamped}
    yield from expert_calls(x, index, gates, clamped)
    stored = torch.full((N, 32), 0x21, dtype=torch.uint8), torch.full((N, 2), 127).byte()
    yield "corrected_matmul", (weight(tokens, 64), *stored), {}
    of_fp8 = fp8(weight(N, K)), fixed(N)
    yield "corrected_matmul", (x, *of_fp8, u, v, bias), {"format": "fp8"}
    yield from corrected_calls(tokens)
    yield from scaled_calls(tokens)


def every_call(tokens=TOKENS):
    """Yield those of `calls`, one of each activation, and those with a norm of x or a residual."""
    yield from calls(tokens)
    for name in ACTIVATIONS:
        operands = weight(tokens, K), weight(K, R), weight(R, N), weight(N)
        yield "lowrank_matmul", operands, {"activation": name}
    for norm in ("rms", "layer", ""):
        keywords = {"norm": norm, "norm_eps": 1e-3, "norm_offset": 1.0} if norm else {}
        for name, operands, layouts in normed_calls(tokens, norm):
            yield name, operands, {**keywords, **layouts}


def normed_calls(tokens, norm):
    """Yield calls with a residual where the op adds one."""
    gain, bias = weight(K) if norm else None, weight(K).flip(0) if norm == "layer" else None
    x, residual = weight(2, tokens // 2, K) / 4, weight(2, tokens // 2, N)
    rows, added = x.reshape(tokens, K), residual.reshape(tokens, N)
    u, v, w, down, out = weight(K, R), weight(R, N), weight(K, N), weight(N, K), weight(N)
    columns = {"x_layout": "col", "out_layout": "col"}
    yield "lowrank_matmul", (x, u, v, None, None, None, None, gain, bias, residual), {}
    yield "matmul", (rows, w, out, gain, bias, added), {}
    yield "matmul", (rows.t(), w, out, gain, bias, added.t()), columns  # neither is contiguous
    yield "gated_mlp_up", (x, [w], [w], None, None, gain, bias), {}
    yield "gated_mlp", (x, [w], [w], [down], None, None, None, gain, bias, x), {}
    yield "lowrank_matmul_shared_x", (x, [u, u], [v, v], [out, out], gain, bias), {}
    yield "lowrank_matmul_shared_u", (x, u, [v, v], [out, out], gain, bias), {}


def corrected_calls(tokens):
    """Yield calls of several few-bit weights, each half of a weight with numbers of its own."""
    x, u, v = weight(tokens, 64) / 8, weight(64, R), weight(R, 64)
    ws = [(torch.arange(64 * 32) * step % 251).byte().reshape(64, 32) for step in (3, 5, 7)]
    scales = [(torch.arange(64 * 2) % step + 120).byte().reshape(64, 2) for step in (2, 3, 5)]
    shared = (x, ws[:2], scales[:2], [u, None], [v, None], [None, weight(64)])
    yield "corrected_matmul_shared_x", shared, {"activations": ["identity", "silu"]}
    yield "corrected_mlp", (x, ws, scales, [None] * 3, [None] * 3), {}
    yield "corrected_mlp", (x, ws, scales, [u, None, u], [v, None, v]), {"activation": "gelu"}
    wide = [fp8(weight(64, 64)) for _ in range(3)], [fixed(64), fixed(1), fixed(64)]
    yield "corrected_mlp", (x, *wide, [u] * 3, [v] * 3), {"format": "fp8"}
    stored = {"u_layout": "col", "v_layout": "col", "out_layout": "col"}
    u, v = u.t().contiguous(), v.t().contiguous()
    yield "corrected_mlp", (x, ws, scales, [None, u, u], [None, v, v]), stored


def expert_calls(x, index, gates, clamped):
    """Yield calls of experts whose weights are factors, and fp8 alone and beside branches."""
    stored = {"weight_layout": "col", "factor_layout": "col"}
    v_up, v_down, u_up, u_down = weight(2, 8, R), weight(2, K, R), weight(2, R, K), weight(2, R, 4)
    beside = None, None, None, None, u_up, None, u_down, None
    yield "experts", (x, v_up, v_down, index, gates, *beside), {**stored, "format": "factors"}
    of_fp8 = x, fp8(weight(2, 8, K)), fp8(weight(2, K, 4)), index, gates
    scales = fixed(2, 8, dtype="as x"), fixed(2, K, dtype="as x")
    stored = {**stored, "format": "fp8"}
    yield "experts", (*of_fp8, weight(2, 8), None, *scales), {**stored, **clamped}
    yield "experts", (*of_fp8, None, None, *scales, u_up, v_up, u_down, v_down), stored


def scaled_calls(tokens):
    """Yield calls of fp8 weights, with a scale for each output or one, for a plain x and fp8."""
    x, su, sv, sk = weight(tokens, K), fixed(R), fixed(N), fixed(K)
    u, v, w, down = (fp8(t) for t in (weight(K, R), weight(R, N), weight(K, N), weight(N, K)))
    ut, vt = u.t().contiguous(), v.t().contiguous()
    stored = {"u_layout": "col", "v_layout": "col"}
    yield "matmul_scaled", (x, [sv], w), {}
    yield "lowrank_matmul_scaled", (x, [su, sv], ut, vt, weight(N)), stored
    yield "lowrank_matmul_scaled", (x, [fixed(1), sv], u, v), {"activation": "relu"}
    of_x = {"x_scale": 0.5, "out_dtype": "float64"}
    yield "lowrank_matmul_scaled", (fp8(x), [su, sv], u, v), of_x
    yield "lowrank_matmul_shared_x_scaled", (x, [su, su, sv, sv], [u, u], [v, v], [None, None]), {}
    yield "lowrank_matmul_shared_u_scaled", (x, [su, sv, sv], u, [v, v], [None, None]), {}
    yield "gated_mlp_up_scaled", (x, [su, sv, sv], [u, v], [w]), {}
    yield "gated_mlp_scaled", (x, [su, sv, sv, sk], [u, v], [w], [down]), {}


def named(value):
    """Return the label of a part of a call, without its tensors."""
    return str(value) if isinstance(value, str | dict) else "on"


def fp8(t):
    return t.to(torch.float8_e4m3fn)
