"""The paper's kernels, unmodified, against float64: the largest error, and the error's norm.

What is expected of the norm: bf16 rounds with a relative error of about 0.0016 (uniform in the last
place, over all mantissas). A kernel adds the sums of its blocks of a contraction in bf16; of B
blocks, the j-th such sum is about sqrt(j / B) of the whole, so that all roundings together are
sqrt((B + 1) / 2) of one. The roundings of x u, and of the product with v, are independent; silu
passes an error on by its derivative. A kernel passes with 1.5 times that, and with no single
element further away than the bound of `paper_kernel`.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import ml_dtypes
import numpy as np

from nmm_compiler.simulator.loading.loader import load_file
from nmm_compiler.simulator.run import simulate

PAPER_KERNELS = ("fused_three_mm_XTUV", "fused_mlp_up_T", "nki_matmul_fully_optimized_")
_BF16 = 0.0016
_SLACK = 1.5
Sizes = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Told:
    """What became of one kernel: errors as shares of the largest value and of the norm."""

    us: float
    worst: float
    worst_bound: float
    norm: float
    norm_bound: float

    @property
    def passed(self) -> bool:
        """Whether both errors are within their bounds; NaN is not."""
        return self.worst <= self.worst_bound and self.norm <= self.norm_bound

    def __str__(self) -> str:
        return (
            f"{self.us:,.1f} us, largest error {self.worst:.2g} (bound {self.worst_bound:.2g}), "
            f"norm {self.norm:.2g} (bound {self.norm_bound:.2g})"
        )


def paper_kernel(path: Path, name: str, sizes: Sizes, target: str) -> Told:
    """Run a kernel with the blocks that its authors choose, and compare it with float64.

    sizes: tokens, features, rank, outputs; the matmul has no rank.
    """
    arrays = _arrays(name, sizes)
    chosen = _blocks(path, name, sizes[0])
    run = simulate(f"{path}:{name}", *arrays, target=target, named=chosen)
    wanted, expected = _reference(name, arrays, _roundings(name, sizes, chosen))
    assert run.profile is not None
    off = run.output.astype(np.float64) - wanted
    largest = float(np.abs(wanted).max())
    blocks = 1 + max(sizes[1:3]) // 512  # partial sums that are rounded to bfloat16
    return Told(
        us=float(run.profile.latency_us),
        worst=float(np.abs(off).max()) / largest,
        worst_bound=2.0**-8 * (blocks + 4) * math.sqrt(2),
        norm=float(np.linalg.norm(off) / np.linalg.norm(wanted)),
        norm_bound=_SLACK * expected,
    )


def _blocks(path: Path, name: str, tokens: int) -> dict[str, int]:
    choose = getattr(load_file(path), f"get_{name}_params", None)
    return dict(choose(tokens)) if choose is not None else {}


def _arrays(name: str, sizes: Sizes) -> list[np.ndarray]:
    m, k, r, n = sizes
    random = np.random.default_rng(0)

    def array(*size: int, terms: int = 1) -> np.ndarray:
        values = random.standard_normal(size) / np.sqrt(terms)
        return values.astype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]

    def factors() -> list[np.ndarray]:
        return [array(k, r, terms=k), array(r, n, terms=r)]

    if name == "nki_matmul_fully_optimized_":
        return [array(k, m), array(k, n, terms=k)]
    if name == "fused_three_mm_XTUV":
        return [array(k, m), *factors()]
    return [array(m, k), *factors(), *factors()]


def _roundings(name: str, sizes: Sizes, chosen: dict[str, int]) -> tuple[float, float]:
    """Return the squares of the relative errors of the two products, in roundings of bf16."""
    _, k, r, _ = sizes

    def square(length: int, block: int) -> float:
        return (math.ceil(length / (128 * block)) + 1) / 2

    if name == "nki_matmul_fully_optimized_":
        return square(k, max(1, min(8, k // 128))), 0.0
    return square(k, chosen["M_tiles_in_block"]), square(r, chosen["r_tiles_in_block"])


def _reference(
    name: str, arrays: list[np.ndarray], roundings: tuple[float, float]
) -> tuple[np.ndarray, float]:
    """Return the result in float64, and the norm of the error that is expected of it."""
    each = _BF16 * math.sqrt(sum(roundings))
    wide = [a.astype(np.float64) for a in arrays]
    if name == "nki_matmul_fully_optimized_":
        return wide[0].T @ wide[1], each
    if name == "fused_three_mm_XTUV":
        return wide[0].T @ wide[1] @ wide[2], each
    x, gate_u, gate_v, up_u, up_v = wide
    gate, up = x @ gate_u @ gate_v, x @ up_u @ up_v
    share = 1 / (1 + np.exp(-gate))
    result = gate * share * up
    of_gate = share * (1 + gate * (1 - share)) * gate * up  # silu'(gate) gate up
    norms = [float(np.linalg.norm(a)) for a in (of_gate, result, result)]
    each_of = (each, each, _BF16)  # the last: silu, the product and the result, at most this
    total = math.sqrt(sum((e * n) ** 2 for e, n in zip(each_of, norms, strict=True)))
    return result.T, total / norms[1]
