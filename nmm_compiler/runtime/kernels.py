"""The kernels of this process: built or taken from the cache once per spec and target.

Also remembers the specs without a kernel, so that one warning says the reason and PyTorch computes
the calls.

A kernel has a fixed shape. Static graphs build one for their exact token count, and a call of that
count runs it. Calls of other counts go to buckets: a call takes the next larger bucket with its
rows padded, or is cut into several launches, whichever is predicted to be faster. Padding is safe
because tokens are independent rows of every product here: the padded rows' results are dropped.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

from nmm_compiler.errors import CacheMissError, ShapeError
from nmm_compiler.options import LADDER, Options, setting

_WORTH_SPLITTING_TOKENS = 128
WITHOUT_KERNEL = "PyTorch computes its calls, or they raise where an executor was named"

Key = tuple[Any, ...]


class NoKernelError(Exception):
    """No kernel of a call may be used, and PyTorch may compute it: (for what, why)."""

    def __str__(self) -> str:
        what, why = self.args
        return f"no kernel for {what}: {why}; {WITHOUT_KERNEL}"


def bucket(tokens: int, ladder: tuple[int, ...] | None = None) -> int:
    """Return the smallest bucket that holds `tokens`.

    A ladder goes on with the multiples of its last step; the default one is 1, 2, 4 ... 4096.
    Raises ShapeError for less than one token.
    """
    if tokens < 1:
        raise ShapeError(f"a kernel needs at least 1 token, got {tokens}")
    steps = ladder or LADDER
    beyond = -(-tokens // steps[-1]) * steps[-1]
    return min((step for step in steps if step >= tokens), default=beyond)


def planned_buckets(
    tokens: int, ladder: tuple[int, ...] | None, cost_us: Callable[[int], float]
) -> tuple[int, ...]:
    """Return the buckets to launch, in token order: their sum is at least `tokens`.

    cost_us gives the predicted time of one launch with that many tokens, in microseconds. Only the
    last launch is ever padded. The choice is between one padded launch, and the largest full bucket
    followed by a padded rest.
    """
    whole, steps = bucket(tokens, ladder), ladder or LADDER
    full = max((step for step in steps if step <= tokens), default=0)
    if full == steps[-1]:
        full = tokens // full * full
    if whole == tokens or not full:
        return (whole,)
    rest = bucket(tokens - full, ladder)
    if rest >= whole or cost_us(full) + cost_us(rest) >= cost_us(whole):
        return (whole,)
    return (full, rest)


def _key(spec: Any, target: str, options: Options) -> Key:
    """Return a kernel's spec and target, and the options that can change its source."""
    verdicts = options.cache, setting("NMM_VERDICTS")  # what says where they are
    return (spec, target, options.dialect, options.instruction_budget, verdicts)


@functools.cache
def warn_once(message: str) -> None:
    """Warn of what a call meets that will meet each call like it."""
    warnings.warn(message, stacklevel=4)


class Kernels:
    """Kernels by spec, target and options, each built once.

    found: kernels, and what building one raised.
    """

    def __init__(self) -> None:
        self.found: dict[Key, Any] = {}

    def get(self, spec: Any, target: str, options: Options) -> Any:
        """Return the kernel of `spec`.

        Raises NoKernelError, from what building it raised, on every call; that itself under strict
        and for what the cache lacks in mode "require".
        """
        from nmm_compiler.codegen.build import build_kernel

        key = _key(spec, target, options)
        if key not in self.found:
            try:
                self.found[key] = build_kernel(spec, target, options=options)
            except Exception as error:  # kept: a failing search is not repeated
                self.found[key] = error
        kernel = self.found[key]
        if not isinstance(kernel, Exception):
            return kernel
        if options.strict or isinstance(kernel, CacheMissError):
            raise kernel
        raise NoKernelError(f"{spec} on {target}", f"{type(kernel).__name__}: {kernel}") from kernel

    def get_or_warn(self, spec: Any, target: str, options: Options) -> Any | None:
        """Return the kernel, or None with one warning where `get` raises NoKernelError."""
        try:
            return self.get(spec, target, options)
        except NoKernelError as refused:
            warn_once(f"nmm: {refused}")
            return None

    def sized(self, launch: Any, options: Options, static: bool) -> Any:
        """Return the spec that a launch runs: of its own token count in a static graph, else of the
        bucket that holds it."""
        spec, axis = launch.spec, launch.token_axis
        if not spec.splits_tokens or (static and options.buckets is None):
            return spec
        return dataclasses.replace(spec, **{axis: bucket(getattr(spec, axis), options.buckets)})

    def plan(self, spec: Any, target: str, options: Options, axis: str = "m") -> tuple[int, ...]:
        """Return the token counts to launch for a call; axis: "k" of one that sums over its tokens.

        Exactly these where tokens depend on each other, and where a graph of this shape built its
        kernel, unless the user set buckets; else buckets, those of rows split in two launches where
        that is predicted to beat padding by a tile or more.
        """
        tokens = int(getattr(spec, axis))
        exact = options.buckets is None and _key(spec, target, options) in self.found
        if exact or not spec.splits_tokens:
            return (tokens,)
        whole = bucket(tokens, options.buckets)
        if axis == "k" or whole - tokens < _WORTH_SPLITTING_TOKENS:
            return (whole,)
        return planned_buckets(
            tokens, options.buckets, lambda m: self._launch_us(spec, m, target, options)
        )

    def _launch_us(self, spec: Any, m: int, target: str, options: Options) -> float:
        kernel = self.get_or_warn(dataclasses.replace(spec, m=m), target, options)
        if kernel is None:
            return float("inf")
        return float(kernel.predicted.device_us)

    def clear(self) -> None:
        """Forget kernels and failures; files in the cache stay."""
        warn_once.cache_clear()
        self.found.clear()


KERNELS = Kernels()
"""The process's kernels, shared by the backend and all executors."""
