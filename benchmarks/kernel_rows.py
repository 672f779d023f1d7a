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

A table is a list of named specs and a judge. A judge returns the figures of a kernel and the bars
that it misses. Ratios are times of the other way over ours. Every time is predicted by the
simulator, without kernel start and stop, and kept in a file (kernel_timings.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import neuronmm
import torch
from kernel_specs import MODELS, TABLES_OF_SPECS, Named, listed, rank
from kernel_timings import Timings

import nmm_compiler.runtime.executor  # noqa: F401  (registers the executors)
from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.attention import AttentionSpec
from nmm_compiler.kernels.linear.specs import (
    GatedMLPSpec,
    GatedMLPUpSpec,
    LowRankSharedSpec,
    LowRankSpec,
    MatmulSpec,
)
from nmm_compiler.ops.backward_calls import backward_calls
from nmm_compiler.ops.lower import lower, tokens
from nmm_compiler.prices.ways import ways
from nmm_compiler.simulator.loading.private_modules import PrivateModules
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.targets import get

HERE = Path(__file__).parent / "kernels_nki"
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

COL: dict[str, Any] = {"x_layout": "col"}
FP8: dict[str, Any] = {"dtype": "float8_e4m3", "scales": "channel", **COL}
Judged = tuple[dict[str, float], list[str]]


def mlp_specs(models: Sequence[str], sizes: Sequence[int], x_layout: str = "col") -> Named:
    """Yield the low-rank up (or gate) and down projections."""
    for model in models:
        for part in ("up", "down"):
            k, n = MODELS[model].mlp(part)
            for m in sizes:
                spec = LowRankSpec(m=m, k=k, r=rank(k, n), n=n, x_layout=x_layout)
                yield f"{model} {part} m={m}", spec


def mlp(spec: Any, target: str, timings: Timings) -> Judged:
    """Judge a low-rank projection; none of the other ways may be NeuronMM's and faster."""
    m, k, r, n = spec.m, spec.k, spec.r, spec.n
    chain = next(row["blocks"] for row in TABLES_OF_SPECS["neuronmm_blocks"] if m <= row["most"])
    us = timings.us(spec, target)
    two = timings.file_us(*DENSE, target, [(k, r), (k, m)]) + timings.file_us(
        *DENSE, target, [(r, m), (r, n)]
    )
    theirs = timings.file_us(*NEURONMM, target, [(k, m), (k, r), (r, n)], **chain)
    found, missed = _whole(spec, target, timings)
    found |= {
        "dense": timings.file_us(*DENSE, target, [(k, m), (k, n)]) / us,
        "two dense": two / us,
        "NeuronMM": theirs / us,
        "x turned": us / timings.us(dataclasses.replace(spec, x_layout="row"), target),
    }
    return found, missed + ["slower than NeuronMM"] * (theirs < us)


def _whole(spec: Any, target: str, timings: Timings) -> Judged:
    """Hold a kernel to its roofline, its HBM traffic and transposes."""
    ran, roofline = timings.profile(spec, target), spec.roofline_us(get(target))
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


def gated_specs(models: Sequence[str], sizes: Sequence[int]) -> Named:
    """Yield gate and up in one kernel, and the whole MLP."""
    for model in models:
        k, n = MODELS[model].mlp("up")
        for m in sizes:
            common: dict[str, Any] = {"m": m, "k": k, "n": n, "r": rank(k, n), **COL}
            yield f"{model} gate and up m={m}", GatedMLPUpSpec(**common, out_layout="col")
            yield f"{model} whole MLP m={m}", GatedMLPSpec(**common)


def gated(spec: Any, target: str, timings: Timings) -> Judged:
    """Judge a gated MLP beside one low-rank kernel for each projection, joined for nothing."""
    separate = 0.0
    for branch in spec.branches:
        first, last = spec.ends(branch)
        part = LowRankSpec(m=spec.m, k=first, r=spec.rank(branch), n=last, **COL)
        separate += timings.us(part, target)
    found, missed = _whole(spec, target, timings)
    return {**found, "separate": separate / timings.us(spec, target)}, missed


def dense_specs(models: Sequence[str], sizes: Sequence[int]) -> Named:
    """Yield dense products of models, and three that are very wide or long."""
    shapes = dict.fromkeys(
        [MODELS[name].mlp(part) for name in models for part in ("up", "down")]
        + [(4096, 4096), (4096, 1024), (2048, 2048)]
    )
    wide = [(2048, 151936), (16384, 53248), (53248, 16384)]
    for k, n in (*shapes, *wide):
        for m in sizes:
            if m <= (512 if (k, n) in wide else 2048):
                yield f"m={m} k={k} n={n}", MatmulSpec(m=m, k=k, n=n, **COL)


def dense(spec: Any, target: str, timings: Timings) -> Judged:
    """Judge matmul against the roofline and the tutorial's blocking."""
    m, k, n = spec.m, spec.k, spec.n
    found, missed = _roofline(spec, target, timings, 0.92 if m >= 512 else 0.90)
    if m * k * n < LARGEST_RIVAL:
        rival = timings.file_us(*DENSE, target, [(k, m), (k, n)])
        found["tutorial"] = rival / timings.us(spec, target)
        missed += ["slower than the tutorial"] * (found["tutorial"] < 1)
    return found, missed


def _roofline(spec: Any, target: str, timings: Timings, share: float) -> Judged:
    """Hold a kernel of some length to a share of its roofline, which nothing can beat."""
    us, roofline = timings.us(spec, target), spec.roofline_us(get(target))
    if us < roofline:
        raise ValueError(f"{spec.short()} on {target}: {us:.2f} us, its roofline {roofline:.2f} us")
    held = roofline < JUDGED_US or roofline / us >= share
    return {"roofline": roofline / us}, [] if held else [f"roofline below {share}"]


def _most_of_the_roofline(spec: Any, target: str, timings: Timings) -> Judged:
    return _roofline(spec, target, timings, 0.80)


def formats_specs(models: Sequence[str], sizes: Sequence[int]) -> Named:
    """Yield up projections in fp8; with x in bf16 they are what compress(factors=) runs."""
    for model in models:
        k, n = MODELS[model].mlp("up")
        for m in sizes:
            for x_dtype in ("bfloat16", None):
                name = f"{model} up m={m}, x {x_dtype or 'fp8'}"
                yield f"{name}, dense", MatmulSpec(m=m, k=k, n=n, x_dtype=x_dtype, **FP8)
                low = LowRankSpec(m=m, k=k, r=rank(k, n), n=n, x_dtype=x_dtype, **FP8)
                yield f"{name}, low rank", low


def formats(spec: Any, target: str, timings: Timings) -> Judged:
    """Compare a kernel in fp8 with the same in bf16; there is no bar."""
    plain = dataclasses.replace(spec, dtype="bfloat16", scales=None, x_dtype=None)
    us, roofline = timings.us(spec, target), spec.roofline_us(get(target))
    return {"roofline": roofline / us, "bf16": timings.us(plain, target) / us}, []


def shared_specs(models: Sequence[str], sizes: Sequence[int]) -> Named:
    """Yield q, k and v of one x, with small ranks and with those of the ratio."""
    for model in models:
        one = MODELS[model]
        outputs = (one.queries, one.keys, one.keys)
        ranks = {
            "small": [256 if n >= one.hidden else 128 for n in outputs],
            "at ratio 0.2": [rank(one.hidden, n) for n in outputs],
        }
        for name, given in ranks.items():
            pairs = tuple((r, (n,)) for r, n in zip(given, outputs, strict=True))
            for m in sizes:
                spec = LowRankSharedSpec(m=m, k=one.hidden, pairs=pairs, **COL)
                yield f"{model} ranks {name} m={m}", spec


def shared(spec: Any, target: str, timings: Timings) -> Judged:
    """Judge one kernel beside three, which read x twice more."""
    one = timings.profile(spec, target)
    parts = [timings.profile(part, target) for part, _ in spec.parts()]
    gain = sum(part["us"] for part in parts) / one["us"]
    saved = sum(part["hbm_bytes"] for part in parts) - one["hbm_bytes"]
    reads = saved / (2 * spec.m * spec.k)
    missed = ["slower than three"] * (gain < 1) + ["reads x again"] * (reads < 2)
    roofline = spec.roofline_us(get(target)) / one["us"]
    return {"roofline": roofline, "three": gain, "reads of x saved": reads}, missed


def cores(spec: Any, target: str, timings: Timings) -> Judged:
    """Judge two cores beside one: 1.85x for prefill (1,024 tokens), 1.8x for decode (to 16)."""
    one = timings.us(dataclasses.replace(spec, lnc=1), target)
    gain = one / timings.us(spec, target)
    bar = 1.85 if spec.m >= 1024 else 1.8 if spec.m <= 16 else 0.0
    return {"one core": gain}, [f"gains less than {bar}x"] * (one >= CORES_LEAST_US and gain < bar)


def ranks(spec: Any, target: str, timings: Timings) -> Judged:
    """Compare one core with groups that cut x by features; published all-reduces are charged."""
    us, found = timings.us(spec, target), {}
    for tp in GROUPS:
        with contextlib.suppress(ShapeError, SpecError):  # a size that does not divide
            way = ways(spec.sharded(tp, "rows"), target, source="simulated")
            found[f"{tp} ranks"] = us / way.fused
            found[f"{tp} ranks, separate"] = us / way.separate
    return found, []


def backward(spec: Any, target: str, timings: Timings) -> Judged:
    """Judge the launches of dx, du and dv as autograd makes them; dense: dx and dw.

    "p kept" leaves out the launch that computes x u again. LoRA is no layer to gain over dense.
    """
    m, k, r, n = spec.m, spec.k, spec.r, spec.n
    x, u, v = _empty(m, k), _empty(r, k), _empty(n, r)
    w = _empty(n, k, grad=not spec.base)
    stored = {"u_layout": "col", "v_layout": "col"} | ({"w_layout": "col"} if spec.base else {})
    base = (None, w) if spec.base else ()
    specs = _launched("lowrank_matmul", (x, u, v, *base), target, **stored)
    whole = _launched("matmul", (x, w), target, w_layout="col")
    each = [timings.us(one, target) for one in specs]
    limits = [one.roofline_us(get(target)) for one in specs]
    of_dense = sum(timings.us(one, target) for one in whole)
    is_p = [(one.family, one.m, one.k, one.n) == ("matmul", m, k, r) for one in specs]
    slow = any(
        one.family == "matmul" and limit >= BACKWARD_LONG_US and us * BACKWARD_SHARE > limit
        for one, limit, us in zip(specs, limits, each, strict=True)
    )
    kept = sum(each) - each[is_p.index(True)]
    found = {"backward us": sum(each), "p kept us": kept, "roofline": sum(limits) / sum(each)}
    if not spec.base:
        found["dense"] = of_dense / sum(each)
    return found, [f"a product below {BACKWARD_SHARE} of its roofline"] * slow


def _launched(name: str, args: tuple[Any, ...], target: str, **keywords: Any) -> list[Any]:
    """Return the specs that the backward pass of an op call launches."""
    kwargs = {"executor": "simulator", "target": target, **keywords}
    found = []
    for op, operands, given in backward_calls(name, args, kwargs)[0]:
        lowered = lower(op, operands, given, int(tokens(operands[0], given)))
        found += [launch.spec for launch in lowered.launches]
    return found


def _empty(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=grad)


def cliffs(spec: Any, target: str, timings: Timings) -> Judged:
    """Judge one more token."""
    step = timings.us(dataclasses.replace(spec, m=spec.m + 1), target) / timings.us(spec, target)
    return {"next token": step}, [f"one more token over {CLIFF_BAR}x"] * (step > CLIFF_BAR)


PUBLISHED_US = {AttentionSpec(m=512): 28.0, AttentionSpec(m=2048): 188.0}
LEAST_SHARE = 0.8
LONG_US = 40.0
LARGEST_HEAD = 128
LARGEST_CACHE = 32_768  # that attention_tkg is compared at


def attention(spec: AttentionSpec, target: str, timings: Timings) -> Judged:
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
    ours, bound = timings.us(spec, target), spec.roofline_us(get(target))
    found = {"roofline us": bound}
    if timings.checkout and theirs_knows(spec):
        found["library us"] = library_us(timings.checkout, spec, target)
    if spec in PUBLISHED_US and target == "trn2":
        found["published us"] = PUBLISHED_US[spec]
    missed = [f"over {name}" for name, us in found.items() if name != "roofline us" and ours > us]
    if spec.m == 1 and bound > LONG_US and ours > bound / LEAST_SHARE:
        missed.append(f"below {LEAST_SHARE} of its roofline")
    return found, missed


def theirs_knows(spec: AttentionSpec) -> bool:
    """Return whether the library's kernel computes the same, as far as it is run here."""
    if spec.soft_cap or spec.d > LARGEST_HEAD:
        return False
    return spec.rope == "none" if spec.m > 1 else spec.context <= LARGEST_CACHE


@functools.cache
def library(checkout: Path) -> PrivateModules:
    """Return the modules of a clone, and the launcher of attention_tkg."""
    return PrivateModules([checkout / "src/nkilib_src", HERE])


def library_us(checkout: Path, spec: AttentionSpec, target: str) -> float:
    """Return the simulated time of attention_cte, k with the head size first, or attention_tkg."""
    if spec.m > 1:
        module: Any = library(checkout).load("nkilib.core.attention.attention_cte")
        kernel = module.attention_cte
        shapes: dict[str, tuple[int, ...]] = {
            "q": (spec.heads, spec.m, spec.d),
            "k": (spec.kv_heads, spec.d, spec.context),
            "v": (spec.kv_heads, spec.context, spec.d),
        }
        more: dict[str, Any] = {"scale": spec.scale, "causal_mask": spec.causal}
        if spec.window:  # which takes queries that are scaled already
            more |= {"sliding_window": spec.window, "scale": 1.0}
    else:
        module = library(checkout).load("attention_tkg")
        kernel, batch = module.decode, spec.batch * spec.kv_heads
        shapes = {
            "q": (spec.d, batch * spec.group),
            "k_active": (spec.d, batch),
            "v_active": (batch, 1, 1, spec.d),
            "k_prior": (batch, 1, spec.d, spec.context),
            "v_prior": (batch, 1, spec.context, spec.d),
            "positions": (batch, 1),
        }
        shapes |= {"starts": (batch, 1)} if spec.window else {}
        shapes |= {"inv_freqs": (spec.d // 2, 1)} if spec.rope != "none" else {}
        more = {"heads": spec.group}
    wide = dict.fromkeys(("positions", "starts", "inv_freqs"), "float32")
    arrays = {n: ArraySpec(shape, wide.get(n, "bfloat16")) for n, shape in shapes.items()}
    run = simulate(kernel, target=target, mode="timing", strict=False, named={**arrays, **more})
    assert run.profile is not None
    return float(run.profile.latency_us)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table: its kernels by models and token counts, its judge, bars on means of figures.

    specs: a function of models and token counts; without one data/kernel_specs.toml has them.
    """

    judge: Callable[[Any, str, Timings], Judged]
    specs: Callable[[Sequence[str], Sequence[int]], Named] | None = None
    sizes: tuple[int, ...] = (1, 16, 128, 512, 1024, 2048, 4096)
    means: dict[str, float] = dataclasses.field(default_factory=dict)


# Token counts whose next one is likely to cost: few, and those about whole tiles.
STEPS = {1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96} | {
    m + d for m in range(128, 1100, 128) for d in (-1, 0, 1, 2, 64)
}
TABLES = {
    "mlp": Table(mlp, mlp_specs, means={"dense": 1.35, "NeuronMM": 1.15}),
    "gated": Table(gated, gated_specs),
    "dense": Table(dense, dense_specs, (1, 16, 128, 256, 512, 1024, 2048)),
    "small": Table(_most_of_the_roofline, sizes=(1, 16, 100, 128, 333, 512)),
    "fp8": Table(_most_of_the_roofline),
    "formats": Table(formats, formats_specs, (1, 16, 512)),
    "shared": Table(shared, shared_specs),
    "cores": Table(cores, sizes=(1, 16, 128, 512, 1024, 2048)),
    "ranks": Table(ranks, functools.partial(mlp_specs, x_layout="row"), (1, 512)),
    "backward": Table(backward, sizes=(512, 2048)),
    "cliffs": Table(cliffs, sizes=tuple(sorted(STEPS))),
    "attention": Table(attention),
    "neuronmm": Table(neuronmm.judge, mlp_specs, (1, 128, 512, 1024, 2048, 4096)),
}


def named_specs(table: str, models: Sequence[str], sizes: Sequence[int]) -> Named:
    """Yield the kernels of a table, with its own token counts where none are given."""
    one = TABLES[table]
    sizes = sizes or one.sizes
    if one.specs:
        yield from one.specs(models, sizes)
    else:
        yield from ((spec.short(), spec) for spec in listed(table, sizes))
