"""Family `attention`: softmax(scale q k^T + mask) v for several heads, with grouped queries.

The same spec says a prefill, as many queries as keys, and a decode step, a few queries against a
cache. RoPE on q, or on q and k, is part of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, cast

import numpy as np

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.base import (
    DTYPES,
    HEADS,
    QUERY_HEADS,
    Array,
    KernelSpec,
    TensorSpec,
    check_arrays,
    check_name,
)
from nmm_compiler.kernels.error_bounds import (
    FP32_ROUNDOFF,
    Estimate,
    combine,
    rounding_error,
    sum_error,
)
from nmm_compiler.kernels.tiling import item_bytes, tiles

ROPES = ("none", "q", "qk")
MOST_CONTEXT = 131_072
MOST_HEAD_SIZE = 256
_DECODE_TOKENS = 16
_PACKED = (32, 64)  # head sizes at which a block of partitions may start
_REFERENCE_SCORES = 1 << 22  # that the reference holds at a time, 32 MB each of a few arrays
# fp32 roundings of a score beyond its product: the scale, the cap, the maximum and what is carried.
_SCORE_ROUNDINGS = 8
# ScalarE evaluates exp and tanh in fp32, to a few roundings.
_FUNCTION_ROUNDINGS = 16
# fp32 roundings of a result beyond its sums: the corrections of running maxima, the division.
_RESULT_ROUNDINGS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec(KernelSpec):
    """y = softmax(scale q k^T + mask) v, each query head with the keys of its group.

    q, y: [batch heads, m, d]. k: [batch kv_heads, context, d], with k_layout "col" [batch kv_heads,
    d, context]. v: [batch kv_heads, context, d]. Heads of a sequence follow each other.

    context: keys of a sequence, default m. kv_heads: default heads. The queries are the last m of
    the context: causal means that query i sees the keys up to context - m + i. window: and only the
    last so many of these, 0 for all. soft_cap: scores are soft_cap tanh(score / soft_cap), 0 for
    none. scale: default 1 / sqrt(d).
    rope: "q" or "qk" rotates these by an operand rope [2, tokens, d / 2], cos then sin, of the last
    m positions, or of all keys; element j pairs with j + d / 2, as in Llama. Rotation is in fp32.
    """

    m: int
    heads: int = 1
    kv_heads: int = 0
    context: int = 0
    d: int = 128
    batch: int = 1
    dtype: str = "bfloat16"
    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    scale: float | None = None
    k_layout: str = "row"
    rope: str = "none"

    family: ClassVar[str] = "attention"
    dtypes: ClassVar[tuple[str, ...]] = DTYPES[:3]
    sizes: ClassVar[tuple[str, ...]] = ("m", "heads", "kv_heads", "context", "d", "batch")
    shared: ClassVar[str] = "heads of keys, or of query heads of each"
    splits_tokens: ClassVar[bool] = False  # the mask counts tokens from the end of the context

    def __post_init__(self) -> None:
        settled = {
            "kv_heads": self.kv_heads or self.heads,
            "context": self.context or self.m,
            "scale": 1.0 / math.sqrt(self.d) if self.scale is None and self.d > 0 else self.scale,
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        super().__post_init__()
        check_name("rope", self.rope, ROPES)
        self._check_sizes()
        self._check_mask()

    def _check_sizes(self) -> None:
        if self.heads % self.kv_heads:
            raise ShapeError(
                f"attention: {self.heads} heads do not share {self.kv_heads} kv_heads evenly; pass "
                "a divisor"
            )
        if self.d > MOST_HEAD_SIZE:
            raise SpecError(f"attention: d is {self.d}; heads have at most {MOST_HEAD_SIZE}")
        if self.context > MOST_CONTEXT:
            raise SpecError(
                f"attention: context is {self.context}; kernels take at most {MOST_CONTEXT} keys"
            )
        if self.rope != "none" and self.d % 2:
            raise SpecError(f"attention: rope pairs elements, and d is {self.d}; pass an even d")
        if self.rope == "qk" and self.k_layout == "col":
            raise SpecError(
                "attention: rope 'qk' rotates keys [context, d], and k_layout is 'col'; a cache "
                "holds rotated keys: use rope 'q'"
            )

    def _check_mask(self) -> None:
        if (self.causal or self.rope != "none") and self.m > self.context:
            raise ShapeError(
                f"attention: with causal {self.causal} and rope {self.rope!r} the queries are the "
                f"last of the context, and {self.m} are more than {self.context} keys; pass all "
                "keys, or set causal to False and rotate q before the call"
            )
        if self.window < 0 or not self.scale or self.scale <= 0:
            raise SpecError(
                f"attention: window {self.window} must not be negative, and scale {self.scale} "
                "must be positive"
            )
        if self.window and not self.causal:
            raise SpecError(
                f"attention: window {self.window} looks back from each query; set causal to True"
            )

    @property
    def group(self) -> int:
        """Query heads that share the keys of one head."""
        return self.heads // self.kv_heads

    @property
    def groups(self) -> int:
        """Heads of keys, of all sequences."""
        return self.batch * self.kv_heads

    def splits(self) -> tuple[str, ...]:
        """Return that two cores halve the groups, else the query heads of each."""
        if self.lnc == 1:
            return ("",)
        if self.groups % self.lnc == 0:
            return (HEADS,)
        return () if self.group % self.lnc else (QUERY_HEADS,)

    def half(self, split: str) -> AttentionSpec:
        """Return a core's share; of half the groups each is a sequence of its own."""
        sizes: dict[str, Any] = {"heads": self.heads // 2}
        if split == HEADS:
            sizes = {"batch": self.groups // 2, "heads": self.group, "kv_heads": 1}
        return dataclasses.replace(self, lnc=1, **sizes)

    @property
    def decode(self) -> bool:
        """Whether a group's queries are few columns of a product with its keys, as cached.

        More tokens of a sequence fill the partitions of a prefill kernel.
        """
        few = self.columns <= 128 and self.m <= _DECODE_TOKENS
        return few and self.rope != "qk"

    @property
    def bank_tiles(self) -> int:
        """Tiles of 128 x 128 that a PSUM bank holds."""
        return 16 // item_bytes(self.dtype)

    @property
    def section(self) -> int:
        """Most keys whose scores a prefill kernel has in PSUM at a time: their turned weights are
        one bank, for a tile of 128 queries."""
        return 128 * self.bank_tiles

    @property
    def columns(self) -> int:
        """Queries of the heads that share keys, in one sequence."""
        return self.group * self.m

    @property
    def at_once(self) -> int:
        """Groups of a decode step in a set: up to half of them, 128 columns, and 8 kB of scores
        and weights a partition."""
        room = (1 << 13) // (self.score_tiles * self.columns * (4 + item_bytes(self.dtype)))
        most = max(1, min(self.groups // 2, 128 // self.columns, room))
        return next(count for count in range(most, 0, -1) if self.groups % count == 0)

    @property
    def together(self) -> int:
        """Groups of such a set whose keys one load brings: up to 4 kB a partition."""
        most = max(1, (1 << 12) // (self.cache_tiles * self.d * item_bytes(self.dtype)))
        return next(count for count in range(most, 0, -1) if self.at_once % count == 0)

    @property
    def first_key(self) -> int:
        """The first key that a query sees."""
        return max(0, self.context - self.m - self.window + 1) if self.window else 0

    @property
    def keys(self) -> int:
        """Keys from the first one on that is seen."""
        return self.context - self.first_key

    @property
    def cache_tiles(self) -> int:
        """Tiles of up to 128 of them, that passes of a decode step take whole: as many that a
        partition loads 256 bytes in a run."""
        return self.pack * max(
            tiles(self.keys, 128 * self.pack),
            min(256 // (self.d * item_bytes(self.dtype)), self.keys) // self.pack,
        )

    @property
    def pack(self) -> int:
        """How many tiles of keys fill TensorE's rows, 1 where a cache has fewer keys."""
        packs = self.decode and self.k_layout == "row" and self.d in _PACKED
        return 128 // self.d if packs and self.keys * self.d >= 128 else 1

    @property
    def score_tiles(self) -> int:
        """Tiles of their scores in a decode step: of equal height, and one of what is left."""
        return self.cache_tiles + (self.keys % self.cache_tiles > 0)

    @property
    def parts(self) -> int:
        """Tiles of 128 of a head."""
        return tiles(self.d, 128)

    @property
    def tanh_scale(self) -> float:
        """What tanh multiplies its scores by."""
        return cast(float, self.scale) / (self.soft_cap or 1.0)

    @property
    def factor(self) -> float:
        """What exp multiplies its scores by: the cap, where tanh has taken the scale."""
        return self.soft_cap or cast(float, self.scale)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        if not self.causal:
            return self.m * self.context
        seen = np.arange(self.context - self.m, self.context) + 1
        return int(np.minimum(seen, self.window or self.context).sum())

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return q, k, v and, where there is RoPE, its angles."""
        keys = (self.context, self.d) if self.k_layout == "row" else (self.d, self.context)
        shapes = {
            "q": (self.batch * self.heads, self.m, self.d),
            "k": (self.groups, *keys),
            "v": (self.groups, self.context, self.d),
        }
        if self.rope != "none":
            tokens = self.context if self.rope == "qk" else self.m
            shapes["rope"] = (2, tokens, self.d // 2)
        return tuple(TensorSpec(name=n, shape=s, dtype=self.dtype) for n, s in shapes.items())

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return y."""
        shape = (self.batch * self.heads, self.m, self.d)
        return (TensorSpec(name="y", shape=shape, dtype=self.dtype),)

    def flops_by_dtype(self) -> dict[str, int]:
        """Return those of both products over the pairs that the mask leaves."""
        return {self.dtype: 4 * self.batch * self.heads * self.pairs * self.d}

    def minimal_hbm_bytes(self) -> int:
        """Return the bytes of all operands but the keys and values that no query sees."""
        unseen = 2 * self.groups * self.first_key * self.d
        return super().minimal_hbm_bytes() - unseen * item_bytes(self.dtype)

    def short(self) -> str:
        """Return family, sizes and dtype."""
        kind = "causal" if self.causal else "full"
        words = [f"attention m{self.m} c{self.context} h{self.batch * self.heads}"]
        words.append(f"kv{self.groups} d{self.d} {kind}")
        words += [f"w{self.window}"] if self.window else []
        words += [f"cap{self.soft_cap:g}"] if self.soft_cap else []
        words += [f"rope_{self.rope}"] if self.rope != "none" else []
        return " ".join([*words, self.dtype])

    def laid(self, made: Iterable[Any]) -> Array:
        """Return y of all heads."""
        return np.concatenate(list(made)).reshape(self.outputs()[0].shape)

    def seen(self, first: int = 0, stop: int | None = None) -> Array:
        """Return [queries, context]: whether a query, from `first` to `stop`, sees a key."""
        rows = np.arange(first, self.m if stop is None else stop)
        if not self.causal:
            return np.ones((len(rows), self.context), dtype=bool)
        back = (rows + self.context - self.m)[:, None] - np.arange(self.context)
        return np.asarray((back >= 0) & (back < (self.window or self.context)))

    def estimates(self, arrays: tuple[Array, ...], typical: bool) -> Iterator[Estimate]:
        """Yield y before it is stored, some queries of a head at a time; the weights of v are
        rounded once."""
        check_arrays(self, arrays)
        q, k, v, *angles = arrays
        rope = np.asarray(angles[0], dtype=np.float64) if angles else np.empty(0)
        rows = max(1, _REFERENCE_SCORES // self.context)
        for kv in range(self.groups):
            keys = np.asarray(k[kv], dtype=np.float64)
            right = Estimate(keys.T if self.k_layout == "col" else keys, 0.0, typical)
            if self.rope == "qk":
                right = self._rotated(right, rope)
            values = np.asarray(v[kv], dtype=np.float64)
            for head in range(kv * self.group, (kv + 1) * self.group):
                left = Estimate(np.asarray(q[head], dtype=np.float64), 0.0, typical)
                if self.rope != "none":
                    left = self._rotated(left, rope[:, -self.m :])
                errors = np.broadcast_to(left.error, left.value.shape)
                for first in range(0, self.m, rows):
                    stop = min(first + rows, self.m)
                    some = Estimate(left.value[first:stop], errors[first:stop], typical)
                    seen = self.seen(first, stop)
                    yield self._weighted(self._scores(some, right), values, seen)

    def _rotated(self, x: Estimate, angles: Array) -> Estimate:
        """Return an exact x [tokens, d] rotated by cos and sin [2, tokens, d / 2], rounded once."""
        cos, sin = angles
        a, b = np.split(x.value, 2, axis=-1)
        value = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        size = np.abs(a * cos) + np.abs(b * sin), np.abs(b * cos) + np.abs(a * sin)
        own = 2 * FP32_ROUNDOFF * np.concatenate(size, axis=-1)
        return Estimate(value, own, x.typical).rounded(self.dtype)

    def _scores(self, q: Estimate, k: Estimate) -> Estimate:
        """Return the capped scores [m, context] and their errors."""
        assert self.scale is not None
        left, right, typical = np.abs(q.value), np.abs(k.value), q.typical
        error = sum_error(self.d + 2, typical) * (left @ right.T)
        power = 2 if typical else 1
        for one, other in ((q.error, right), (left, k.error)):
            if np.any(one) and np.any(other):
                carried = np.abs(one) ** power @ (np.abs(other) ** power).T
                error = combine(error, carried ** (1 / power), typical)
        made = Estimate(self.scale * (q.value @ k.value.T), self.scale * error, typical)
        if not self.soft_cap:
            return made
        value = self.soft_cap * np.tanh(made.value / self.soft_cap)
        cap = _FUNCTION_ROUNDINGS * FP32_ROUNDOFF * self.soft_cap
        return Estimate(value, made.error, typical).off_by(cap)

    def _weighted(self, scores: Estimate, v: Array, seen: Array) -> Estimate:
        """Return softmax(scores) v and its error.

        A weight p has the error dp: that of its exponent, of exp, and of rounding p to the dtype.
        The result is off by the sum of dp (v - y), and by the roundings of sums in fp32.
        """
        typical = scores.typical
        value = np.where(seen, scores.value, -np.inf)
        top = value.max(axis=1, keepdims=True)
        p = np.exp(value - top)
        total = p.sum(axis=1, keepdims=True)
        y = (p @ v) / total
        size = np.abs(np.where(seen, scores.value, 0.0)) + np.abs(top)
        exponent = combine(scores.error, _SCORE_ROUNDINGS * FP32_ROUNDOFF * size, typical)
        relative = combine(np.expm1(exponent), _FUNCTION_ROUNDINGS * FP32_ROUNDOFF, typical)
        dp = np.where(seen, combine(p * relative, rounding_error(p, self.dtype), typical), 0.0)
        if typical:
            spread = np.square(dp)
            off = np.sqrt(spread @ np.square(v)) + np.sqrt(spread.sum(1, keepdims=True)) * abs(y)
        else:
            off = dp @ np.abs(v) + dp.sum(1, keepdims=True) * np.abs(y)
            # the sum that divides may be smaller by its own error
            off /= np.maximum(1.0 - dp.sum(1, keepdims=True) / total, 0.5)
        terms = sum_error(self.context + _RESULT_ROUNDINGS, typical)
        sums = terms * ((p @ np.abs(v)) / total + np.abs(y))
        return Estimate(y, off / total, typical).off_by(sums)
