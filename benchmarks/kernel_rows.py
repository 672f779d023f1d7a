"""The tables of `make bench-kernels`: which kernels each has, and what each must hold.

    mlp       MLP projections of six models beside dense kernels and NeuronMM's algorithm
    gated     low-rank gated MLPs in one kernel beside one kernel for each projection
    dense     matmul beside AWS's tutorial blocking and the roofline, k to 53,248, n to 151,936
    small     small kernels of every kind against the roofline, where it is 20 us or more
    fp8       one token in fp8 against the roofline
    formats   low-rank projections in fp8 beside bf16
    shared    q, k and v of one x as one kernel beside three
    cores     two physical cores (lnc=2) beside one
    ranks     a product shared by a tensor-parallel group: as one kernel, and with collectives
    backward  the backward pass of a layer beside that of a dense one
    cliffs    one more token: it may not cost more than a tenth of the kernel
    attention attention kernels beside published times and nki-library's
    neuronmm  the paper's own kernels beside dense ones and ours (neuronmm.py)
    experts   experts against the time of their bytes, and beside nki-library's
    weights   the same with weights in each form that the target multiplies
    adapters  adapters beside the base alone, and beside three kernels

A table is a list of named specs, token counts and bars on means of figures
(data/kernel_specs.toml), and a judge. A judge returns the figures
of a kernel and the bars that it misses. Ratios are times of the other way over ours. Every time is
predicted by the simulator, without kernel start and stop, and kept in a file (kernel_timings.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import neuronmm
import nki_library
import torch
from kernel_specs import TABLES_OF_SPECS
from kernel_timings import Timings

import nmm_compiler.runtime.executor  # noqa: F401  (registers the executors)
from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.attention import AttentionSpec
from nmm_compiler.kernels.linear.specs import LowRankSpec, MatmulSpec
from nmm_compiler.ops.backward_calls import backward_calls
from nmm_compiler.ops.lower import lower, tokens
from nmm_compiler.prices.ways import ways

HERE = Path(__file__).parent / "kernels"
DENSE = HERE / "dense_blocked.py", "dense_blocked"
NEURONMM = HERE / "neuronmm_chain.py", "neuronmm_chain"

SHORT_US = 45  # a kernel with a roofline below it is mostly its first load and last store
BYTES_BAR, DMA_BAR = 1.10, 0.60  # HBM traffic over the least; DMA time over TensorE's
JUDGED_US = 20  # below it a kernel is mostly the start of a load and of a store
LARGEST_RIVAL = 7e10  # the tutorial's kernels are unrolled: simulating more takes a minute
CORES_LEAST_US = 67.0  # 7.5 us of a kernel do not shrink, so a shorter one cannot gain 1.8x
CLIFF_BAR = 1.10
BACKWARD_SHARE, BACKWARD_LONG_US = 0.9, 100.0
GROUPS = (4, 16)  # ranks of a tensor-parallel group
MOST_OF_LIBRARY = 1.05  # of nki-library's time that experts may take

Judged = tuple[dict[str, Any], list[str]]


def mlp(spec: Any, timings: Timings) -> Judged:
    """Judge a low-rank projection; none of the other ways may be NeuronMM's and faster."""
    m, k, r, n = spec.m, spec.k, spec.r, spec.n
    chain = next(row["blocks"] for row in TABLES_OF_SPECS["neuronmm_blocks"] if m <= row["most"])
    us = timings.us(spec)
    two = timings.file_us(*DENSE, [(k, r), (k, m)]) + timings.file_us(*DENSE, [(r, m), (r, n)])
    theirs = timings.file_us(*NEURONMM, [(k, m), (k, r), (r, n)], **chain)
    found, missed = _whole(spec, timings)
    found |= {
        "dense": timings.file_us(*DENSE, [(k, m), (k, n)]) / us,
        "two dense": two / us,
        "NeuronMM": theirs / us,
        "x turned": us / timings.us(dataclasses.replace(spec, x_layout="row")),
    }
    return found, missed + ["slower than NeuronMM"] * (theirs < us)


def _whole(spec: Any, timings: Timings) -> Judged:
    """Hold a kernel to its roofline, its HBM traffic and transposes."""
    ran, roofline = timings.profile(spec), spec.roofline_us(timings.target)
    wanted = 0.90 if spec.m >= 512 else 0.85 if roofline >= SHORT_US else 0.80
    # The intermediates of a whole MLP of 1,024 tokens fill SBUF twice over.
    reads_once = spec.m <= (512 if spec.family == "gated_mlp" else 1024)
    traffic = ran["hbm_bytes"] / spec.minimal_hbm_bytes()
    bars = {
        f"roofline below {wanted}": roofline / ran["us"] < wanted,
        f"HBM traffic over {BYTES_BAR}": reads_once and traffic > BYTES_BAR,
        f"DMA over TensorE above {DMA_BAR}": not reads_once and ran["dma_over_tensor"] > DMA_BAR,
        "transposes": ran["transposes"] > 0,
    }
    found = {"roofline": roofline / ran["us"], "HBM": traffic, "MFU": ran["mfu"], "MBU": ran["mbu"]}
    return found, [name for name, broken in bars.items() if broken]


def gated(spec: Any, timings: Timings) -> Judged:
    """Judge a gated MLP beside one low-rank kernel for each projection, joined for nothing."""
    separate = 0.0
    for branch in spec.branches:
        k, n = spec.ends(branch)
        separate += timings.us(LowRankSpec(m=spec.m, k=k, r=spec.rank(branch), n=n, x_layout="col"))
    found, missed = _whole(spec, timings)
    return {**found, "separate": separate / timings.us(spec)}, missed


def dense(spec: Any, timings: Timings) -> Judged:
    """Judge matmul against the roofline and the tutorial's blocking."""
    m, k, n = spec.m, spec.k, spec.n
    found, missed = _most_of_the_roofline(spec, timings, 0.92 if m >= 512 else 0.90)
    if m * k * n < LARGEST_RIVAL:
        found["tutorial"] = timings.file_us(*DENSE, [(k, m), (k, n)]) / timings.us(spec)
        missed += ["slower than the tutorial"] * (found["tutorial"] < 1)
    return found, missed


def _most_of_the_roofline(spec: Any, timings: Timings, least: float = 0.80) -> Judged:
    """Hold a kernel of some length to a share of its roofline, which nothing can beat."""
    share = timings.roofline_share(spec)
    if share > 1:
        raise ValueError(f"{spec.short()} on {timings.target.name}: {share:.3f} of its roofline")
    held = spec.roofline_us(timings.target) < JUDGED_US or share >= least
    return {"roofline": share}, [] if held else [f"roofline below {least}"]


def formats(spec: Any, timings: Timings) -> Judged:
    """Compare a kernel in fp8 with the same in bf16; there is no bar."""
    plain = dataclasses.replace(spec, dtype="bfloat16", scales=None, x_dtype=None)
    gain = timings.us(plain) / timings.us(spec)
    return {"roofline": timings.roofline_share(spec), "bf16": gain}, []


def shared(spec: Any, timings: Timings) -> Judged:
    """Judge one kernel beside three, which read x twice more.

    Of 2,048 tokens and more the faster schedules read the weights once for each block of tokens.
    """
    one = timings.profile(spec)
    parts = [timings.profile(part) for part in spec.parts()]
    gain = sum(part["us"] for part in parts) / one["us"]
    saved = sum(part["hbm_bytes"] for part in parts) - one["hbm_bytes"]
    reads = saved / (2 * spec.m * spec.k)
    missed = ["slower than three"] * (gain < 1) + ["reads x again"] * (reads < 2 and spec.m < 2048)
    roofline = spec.roofline_us(timings.target) / one["us"]
    return {"roofline": roofline, "three": gain, "reads of x saved": reads}, missed


def cores(spec: Any, timings: Timings) -> Judged:
    """Judge two cores beside one: 1.85x for prefill (1,024 tokens), 1.8x for decode (to 16)."""
    one = timings.us(dataclasses.replace(spec, lnc=1))
    gain = one / timings.us(spec)
    bar = 1.85 if spec.m >= 1024 else 1.8 if spec.m <= 16 else 0.0
    return {"one core": gain}, [f"gains less than {bar}x"] * (one >= CORES_LEAST_US and gain < bar)


def ranks(spec: Any, timings: Timings) -> Judged:
    """Compare one core with groups that cut x by features; published all-reduces are charged."""
    us, found = timings.us(spec), {}
    for tp in GROUPS:
        with contextlib.suppress(ShapeError, SpecError):  # a size that does not divide
            way = ways(spec.sharded(tp, "rows"), timings.target, source="simulated")
            found |= {f"{tp} ranks": us / way.fused, f"{tp} ranks, separate": us / way.separate}
    return found, []


def backward(spec: Any, timings: Timings) -> Judged:
    """Judge the launches of dx, du and dv as autograd makes them; dense: dx and dw.

    "p kept" leaves out the launch that computes x u again. LoRA is no layer to gain over dense.
    """
    m, k, r, n = spec.m, spec.k, spec.r, spec.n
    x, u, v = _empty(m, k), _empty(r, k), _empty(n, r)
    w = _empty(n, k, grad=not spec.base)
    stored = {"u_layout": "col", "v_layout": "col"} | ({"w_layout": "col"} if spec.base else {})
    base = (None, w) if spec.base else ()
    target = timings.target.name
    specs = _launched("lowrank_matmul", (x, u, v, *base), target, **stored)
    each = [timings.us(one) for one in specs]
    limits = [one.roofline_us(timings.target) for one in specs]
    is_p = [(one.family, one.m, one.k, one.n) == ("matmul", m, k, r) for one in specs]
    slow = any(
        one.family == "matmul" and limit >= BACKWARD_LONG_US and us * BACKWARD_SHARE > limit
        for one, limit, us in zip(specs, limits, each, strict=True)
    )
    kept = sum(each) - each[is_p.index(True)]
    found = {"backward us": sum(each), "p kept us": kept, "roofline": sum(limits) / sum(each)}
    if not spec.base:
        whole = _launched("matmul", (x, w), target, w_layout="col")
        found["dense"] = sum(map(timings.us, whole)) / sum(each)
    return found, [f"a product below {BACKWARD_SHARE} of its roofline"] * slow


def _launched(name: str, args: tuple[Any, ...], target: str, **keywords: Any) -> list[Any]:
    """Return the specs that the backward pass of an op call launches."""
    kwargs = {"executor": "simulator", "target": target, **keywords}
    found = []
    for op, operands, given in backward_calls(name, args, kwargs)[0]:
        found.append(lower(op, operands, given, int(tokens(operands[0], given))).spec)
    return found


def _empty(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=grad)


def cliffs(spec: Any, timings: Timings) -> Judged:
    """Judge one more token."""
    step = timings.us(dataclasses.replace(spec, m=spec.m + 1)) / timings.us(spec)
    return {"next token": step}, [f"one more token over {CLIFF_BAR}x"] * (step > CLIFF_BAR)


PUBLISHED_US = {AttentionSpec(m=512): 28.0, AttentionSpec(m=2048): 188.0}
LEAST_SHARE = 0.8
LONG_US = 40.0


def attention(spec: AttentionSpec, timings: Timings) -> Judged:
    """Hold a kernel to its roofline, the published figures and nki-library's time.

    `attention_cte` (prefill) and `attention_tkg` (decode) are those of a clone of
    aws-neuron/nki-library. The published figures are of a fused bf16 kernel with d 128, on a
    device, for 512 and 2048 tokens; their source gives neither heads nor mask, and they are taken
    as one head. All else is simulated, on one core. attention_tkg knows one head of keys: more are
    sequences to it. Its window is a mask over the whole cache, and its RoPE rotates the new key
    too. Neither knows a soft cap or heads above 128, and attention_cte has no RoPE: such rows have
    no figure of the library. A kernel of ours misses its bar where it is slower than the library's,
    slower than a published figure, or where a decode kernel with a roofline of 40 us and more is
    not within 1 / 0.8 of it. Below that the start of the first load, the softmax between the two
    products and the last store, about 10 us, are the larger part.
    """
    ours, bound = timings.us(spec), spec.roofline_us(timings.target)
    found = {"roofline us": bound}
    theirs = nki_library.attention_us(timings.checkout, spec, timings.target)
    if theirs is not None:
        found["library us"] = theirs
    if spec in PUBLISHED_US and timings.target.name == "trn2":
        found["published us"] = PUBLISHED_US[spec]
    missed = [f"over {name}" for name, us in found.items() if name != "roofline us" and ours > us]
    if spec.m == 1 and bound > LONG_US and ours > bound / LEAST_SHARE:
        missed.append(f"below {LEAST_SHARE} of its roofline")
    return found, missed


def experts(spec: Any, timings: Timings) -> Judged:
    """Judge experts beside `moe_tkg` and `moe_cte` of a clone of nki-library.

    moe_tkg is for up to 128 tokens (its `moe_block_tkg` is a norm, a router and a call of it),
    moe_cte for more, on two cores. Their features divide by 128, so that gpt-oss is padded for
    them, as AWS does, and for us in the same row.
    """
    schedule = timings.choose(spec).schedule.short()
    share = timings.roofline_share(spec)
    found = {"experts": spec.expected, "share": share, "schedule": schedule}
    theirs = nki_library.experts_us(timings.checkout, spec, timings.target)
    if theirs is None:
        return found, []
    slow = timings.us(spec) > MOST_OF_LIBRARY * theirs
    return found | {"library us": theirs}, [f"over {MOST_OF_LIBRARY} of the library's"] * slow


def weights(spec: Any, timings: Timings) -> Judged:
    """Compare weights of experts in the forms that the target multiplies, each with its bytes'."""
    found = {}
    for form, fields in TABLES_OF_SPECS["forms"].items():
        made = type(spec).from_dict({**spec.to_dict(), **fields})
        with contextlib.suppress(SpecError):  # the target multiplies no MX blocks
            made.check(timings.target)
            found |= {f"{form} us": timings.us(made), f"{form} share": timings.roofline_share(made)}
    return found, []


def adapters(spec: Any, timings: Timings) -> Judged:
    """Compare adapters with the base alone, and with base, shrink and expand as three kernels."""
    m, k, n, stacked = spec.m, spec.k, spec.n, min(spec.groups, spec.m) * spec.r
    sizes = ((k, n), (k, stacked), (stacked, n))
    apart = [timings.us(MatmulSpec(m=m, k=first, n=last)) for first, last in sizes]
    us = timings.us(spec)
    return {"over the base": us / apart[0], "over three": us / sum(apart)}, []


JUDGES: dict[str, Callable[[Any, Timings], Judged]] = {
    "mlp": mlp, "gated": gated, "dense": dense, "small": _most_of_the_roofline,
    "fp8": _most_of_the_roofline, "formats": formats, "shared": shared, "cores": cores,
    "ranks": ranks, "backward": backward, "cliffs": cliffs, "attention": attention,
    "neuronmm": neuronmm.judge, "experts": experts, "weights": weights, "adapters": adapters,
}  # fmt: skip
