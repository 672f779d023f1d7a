"""Runs a graph before and after its rewrite on real inputs and raises where the results differ.

The tolerance is measured in the graph itself. A match may move roundings, so its result gets noise
of their size, u = half an ulp of its dtype per operation and half an ulp of float32 per term of its
contractions, times its largest element. The original runs again with the noise, and outputs may
move by `_MARGIN` times what it moves them. So a deep or badly conditioned graph gets a large
tolerance, and a flat one a small one.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from nmm_compiler.errors import VerificationError, no_real_inputs
from nmm_compiler.passes.graph.effects import graph_writes, upstream
from nmm_compiler.passes.rules.base import Match

# The noise is drawn twice; the larger of two draws of many elements is at most a third below the
# bound, and results may be on one side of it where two runs are compared.
_TRIALS = 2
_MARGIN = 8.0
_FP32_UNIT = 2.0**-24
_OF_MODULES = ("call_module", "get_attr")
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_real(value: Any) -> bool:
    """Return whether an input holds data: no fake, no meta tensor."""
    if not isinstance(value, torch.Tensor):
        return True
    return type(value).__name__ != "FakeTensor" and value.device.type != "meta"


def check(
    before: fx.GraphModule,
    after: fx.GraphModule,
    matches: Sequence[Match],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> float:
    """Compare both graphs; return the largest error as a fraction of what is allowed.

    matches: those that were rewritten. args and kwargs: a call's arguments.
    Inputs, parameters and buffers are as before when it returns, random numbers too. Raises
    VerificationError for a difference, ModelError for inputs without data.
    """
    bound = inspect.signature(before.forward).bind(*args, **kwargs)
    inputs = [
        value.node.hint if isinstance(value, _SYMBOLIC) else value  # the number in this call
        for value in before.graph.process_inputs(*bound.args)
    ]
    for value in inputs:
        if not is_real(value):
            raise no_real_inputs(value)
    places = _places(matches, before.graph)
    names = {name: name for name in places}
    emitted = {new: old for match in matches for old, new in match.emitted}
    # A module that the graph calls may update buffers, as batch norm does.
    called = [m for g in (before, after) for m in g.modules() if not isinstance(m, fx.GraphModule)]
    counts = any(m.training and dict(m.named_buffers(recurse=False)) for m in called)
    writes = counts or graph_writes(before) or graph_writes(after)
    first = _Run(before, writes, names).start(inputs)
    noisy = [_Run(before, writes, names, places, trial).start(inputs) for trial in range(_TRIALS)]
    try:
        second = _Run(after, writes, emitted).start(inputs)
    except Exception as error:
        raise VerificationError(f"the rewritten graph raised {error!r}") from error

    def compared(name: str) -> tuple[float, str | None]:
        want = first.kept[name]
        return _compare(want, second.kept.get(name), [run.kept.get(name) for run in noisy])

    both, worst = first.kept.keys() & second.kept.keys(), 0.0
    for name in first.left:
        ratio, why = compared(name)
        if why is not None:
            blame = _blame(before.graph, matches, name, lambda n: n in both and compared(n)[1])
            raise VerificationError(f"{name} {why}. {blame}")
        worst = max(worst, ratio)
    return worst


class _Run(fx.Interpreter):
    """A run of a graph, on copies of what it holds and of its inputs where it writes.

    wanted: the name under which the value of a node is kept, by the node's name. places: nodes that
    get noise of the size of the roundings that a match may move, with operations and terms. kept:
    values by name. left: names of what the run leaves, outputs and written state.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        writes: bool,
        wanted: Mapping[str, str],
        places: Mapping[str, tuple[int, int]] | None = None,
        trial: int = 0,
    ) -> None:
        super().__init__(copy.deepcopy(module) if writes else module)
        self.writes, self.wanted, self.places = writes, wanted, places or {}
        self.generator = torch.Generator().manual_seed(trial)
        self.kept: dict[str, Any] = {}
        self.left: list[str] = []

    def start(self, inputs: list[Any]) -> _Run:
        """Run from the present state of random numbers, inputs and parameters."""
        # Copies in one call share memory as the inputs do.
        alone = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, inputs)
        own = copy.deepcopy(alone) if self.writes else inputs
        with torch.no_grad(), torch.random.fork_rng():
            outputs = self.run(*own, enable_io_processing=False)
        left = {f"output {i}": v for i, v in enumerate(pytree.tree_leaves(outputs))}
        if self.writes:
            held = (*self.module.named_parameters(), *self.module.named_buffers())
            for name, value in (*((f"input {i}", v) for i, v in enumerate(own)), *held):
                left[f"{name}, after the call,"] = value
        self.kept |= left
        self.left = [*left]
        return self

    def run_node(self, node: fx.Node) -> Any:
        """Run a node, with noise where a match ends."""
        value = super().run_node(node)
        if node.name in self.places:
            noisy = functools.partial(self._noisy, *self.places[node.name])
            value = pytree.tree_map_only(torch.Tensor, noisy, value)
        if node.name in self.wanted:
            copies = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), value)
            self.kept[self.wanted[node.name]] = copies
        return value

    def _noisy(self, steps: int, length: int, value: torch.Tensor) -> torch.Tensor:
        """Return the value with noise, in the same memory where elements do not overlap."""
        finite = value[value.isfinite()] if value.is_floating_point() else value[:0]
        if not finite.numel():
            return value
        unit = steps * torch.finfo(value.dtype).eps / 2 + length * _FP32_UNIT
        size = unit * float(finite.abs().max())
        drawn = torch.rand(value.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
        noise = (drawn * size).to(value.device, value.dtype)
        overlaps = any(n > 1 and s == 0 for n, s in zip(value.shape, value.stride(), strict=True))
        return value + noise if overlaps else value.add_(noise)


def _places(matches: Sequence[Match], graph: fx.Graph) -> dict[str, tuple[int, int]]:
    """Return where matches end in the graph: operations and terms, by the name of the node.

    A match inside a graph of a higher-order operator ends where that operator stands.
    """
    places: dict[str, tuple[int, int]] = {}
    for match in matches:
        names = [old for old, _ in match.emitted] or [match.name]
        if match.graph:
            outer = match.graph.split(".")[0]
            held = (n for n in graph.nodes if n.op in _OF_MODULES and str(n.target) == outer)
            runs = (one.users if one.op == "get_attr" else (one,) for one in held)
            names = [node.name for node in itertools.chain.from_iterable(runs)]
        for name in names:
            steps, length = places.get(name, (0, 0))
            places[name] = (steps + len(match.nodes) + 1, length + match.length)
    return places


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare strides; of a view with gaps (a slice) only their order."""
    real = [d for d in range(a.dim()) if a.shape[d] != 1]
    order = sorted(real, key=lambda d: -a.stride()[d])
    if a.squeeze().permute([real.index(d) for d in order]).is_contiguous():
        return all(a.stride()[d] == b.stride()[d] for d in real)
    return order == sorted(real, key=lambda d: -b.stride()[d])


def _distance(a: torch.Tensor, b: Any) -> float:
    """Return the largest difference; equal infinities and NaNs in one place are none."""
    if not isinstance(b, torch.Tensor) or a.shape != b.shape:
        return torch.inf
    if not a.numel():
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    left, right = a.detach().to("cpu", wide), b.detach().to("cpu", wide)
    same = (left == right) | (left.isnan() & right.isnan())
    off = torch.where(same, 0.0, (left - right).abs())
    return float(torch.where(off.isnan(), torch.inf, off).max())


def _bound(want: torch.Tensor, moved: Sequence[Any]) -> float:
    """Return how far a value may be off: what noise does to it, and a few of its own roundings."""
    noise = max(_distance(want, other) for other in moved)
    own = 0.0
    if want.is_floating_point():
        wide = want.float() if want.dtype.itemsize == 1 else want  # PyTorch compares no fp8
        finite = wide[wide.isfinite()].detach()
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        own = torch.finfo(want.dtype).eps * largest
    return _MARGIN * noise + own


def _compare(want: Any, got: Any, moved: Sequence[Any]) -> tuple[float, str | None]:
    """Return the error as a fraction of the bound, and what is wrong, None when nothing is; moved:
    what noise makes of the value."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return 0.0, None if want is got or want == got else f"is {got!r} in place of {want!r}"
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return 0.0, f"is {got.dtype} {list(got.shape)}, was {want.dtype} {list(want.shape)}"
    if not _same_strides(want, got):
        return 0.0, f"has strides {got.stride()}, had {want.stride()}"
    error, bound = _distance(want, got), _bound(want, moved)
    if error > bound:
        return torch.inf, f"is off by {error:.3g}, where rounding explains {bound:.3g}"
    return error / bound if 0.0 < bound < torch.inf else 0.0, None


def _blame(
    graph: fx.Graph, matches: Sequence[Match], name: str, is_wrong: Callable[[str], Any]
) -> str:
    """Name the first match with a wrong result, or the matches that what a run leaves under a name
    depends on; all of them where it is not known."""
    output = pytree.tree_leaves(graph.output_node().args)
    kind, _, index = name.partition(" ")
    ends = output[int(index) :][:1] if kind == "output" else list(graph.nodes)
    above = {node.name for node in upstream(n for n in ends if isinstance(n, fx.Node))}
    behind = [m for m in matches if m.graph or above & {n for n, _ in m.emitted}] or matches
    for match in behind:
        if not match.graph and any(is_wrong(old) for old, _ in match.emitted):
            return f"The first match with a wrong result is {match!r}"
    shown = "; ".join(map(repr, behind[:3])) + ("; ..." if len(behind) > 3 else "")
    return f"It depends on {shown}" if behind else "No match explains it: a fault in nmm_compiler"
