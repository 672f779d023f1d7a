"""Why a place is no match, and the checks against replacing nodes by one call at the last one.

A rule refuses with a code, a reason and the value where its walk stopped. `Declined` adds the
operation, its line in the model's source, and the remedy of the code.

`unsafe` checks the reasons against any replacement: other users of inner values, devices, tensor
subclasses, and writes or edges of regions that the move would cross (`crossed`). `refuse` adds the
dtypes of kernels.

Prices are those of `prices.ways` at the call's token count. One call is taken unless smaller calls
are predicted to be faster (`slower`). One dense product has to be stored by the model: where it is
predicted to be faster, the report says so (`too_wide`). The switch "+simulated" selects the source
of all times, one of `prices.kernel.PRICES`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    PLAIN,
    Canonical,
    Form,
    Key,
    Leaf,
    Product,
    Virtual,
    dtype_name,
    once,
    owner_of,
)
from nmm_compiler.passes.graph.effects import ANYTHING, region_edge
from nmm_compiler.passes.graph.read_graph import is_distributed
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.graph.written import is_alone
from nmm_compiler.prices.ways import Ways, ways
from nmm_compiler.report.text import counted

REMEDIES: dict[str, str] = {
    "other_user": "let only the chain read its inner values",
    "mutation": "use the functional form, or write before or after the chain",
    "region": "keep both products on one side of the region, transform or graph break",
    "dtype": "keep one dtype through the chain: bfloat16, float16 or float32",
    "device": "keep plain tensors on one device, or cut both factors over the devices alike",
    "rank_too_large": "use a smaller rank, or store one dense weight",
    "other_x": "feed both products the same tensor, in one dtype",
    "order": "write (x @ u) @ v, or call the module that holds the factors",
    "weight": "store each factor as one 2-D parameter or buffer of static size",
    "training": "call model.eval()",
    "shape": "keep tokens and features apart: contract exactly what the first product made",
    "between": "do it before the first product or behind the second, or fold it into a factor once",
    "few_bits": "store the weight as the reason says, or in 16 bits",
    "slower": "nothing: the graph runs as it is written",
    "no_kernel": "nothing: PyTorch computes it",
    "pattern": "change the model, or the rule's pattern or condition",
    "internal": "report it with the command that the warning names",
}
"""What would have to change, by the code of a refusal."""


@dataclass(frozen=True)
class Refusal:
    """Why a place is no match of a rule: a code, a reason, and the value where the walk stopped.

    remedy: what would have to change; by default that of the code.
    report_even_if_superseded: the report has it even where another rule takes the place. agreed:
    for a place that is no match of a pattern, how many of its values agree; where the rule matches
    nothing, the report shows the place with most of them.
    """

    code: str
    reason: str
    key: Key
    remedy: str = ""
    report_even_if_superseded: bool = False
    agreed: int = 0

    @property
    def node(self) -> Node:
        """Return the fx node to blame."""
        return owner_of(self.key)


def part_of_one(key: Key) -> Refusal | None:
    """Refuse a value inside one operation of several products: no node of the graph holds it."""
    if not isinstance(key, Virtual) or key.attribute is not None:
        return None
    return Refusal("between", "the two products are a part of one operation of more", key)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async")


def real_users(node: Node) -> list[Node]:
    """Return the users of a value, without those that only assert."""
    return [user for user in node.users if user.users or target_name(user) not in _ASSERTIONS]


def readings(c: Canonical, node: Node) -> Iterator[tuple[Node, Node]]:
    """Yield (the value or a view of it, a node that computes with it)."""
    queue = [node]
    while queue:
        value = queue.pop()
        for user in real_users(value):
            if c.sources.get(user) is value:
                queue.append(user)
            else:
                yield value, user


def refuse(
    c: Canonical,
    nodes: Iterable[Node],
    final: Node,
    operands: Iterable[Key],
    also_final: Iterable[Node] = (),
) -> Refusal | None:
    """Return why these nodes may not be replaced by one kernel at `final`, or None.

    Checks the same as `unsafe`, and that all operands have one dtype that kernels compute in, or
    are cast to it as they are read.
    """
    keys, nodes = list(operands), list(nodes)
    why = unsafe(c, nodes, final, keys, also_final=also_final)
    if why is not None:
        return why
    wanted = c.dtype(final)
    if wanted not in DTYPES:
        return Refusal(
            "dtype",
            f"dtype {dtype_name(wanted)} has no kernel",
            final,
        )
    # Steps compute in float32 inside of a kernel, and it casts what it reads; products, which
    # read and round what they read, have to compute in its dtype.
    values = [key for n in nodes for key in (*c.virtuals.get(n, ()), n)]
    for key in [key for key in values if isinstance(c.forms.get(key), Product)] + keys:
        dtype = c.dtype(key)
        if dtype not in (DTYPES if key in keys else (wanted,)):
            names = f"{dtype_name(dtype)} and {dtype_name(wanted)}"
            return Refusal("dtype", f"dtypes differ: {names}", owner_of(key))
    return None


def unsafe(
    c: Canonical,
    nodes: Iterable[Node],
    final: Node,
    operands: Iterable[Key],
    allowed: Collection[Node] = (),
    redirected: Iterable[Node] = (),
    also_final: Iterable[Node] = (),
) -> Refusal | None:
    """Return why nodes may not be replaced at `final` at all, or None.

    Checks other users, devices, tensor subclasses, writes and region edges crossed.
    `allowed` are writers among the nodes whose writes the caller has read, `redirected` are users
    that the caller will give another value; `also_final` are further results.
    """
    covered = set(nodes)
    keys = list(operands)
    return (
        crossed(c, covered, final, keys, allowed)
        or _used_elsewhere(c, covered - {final, *also_final}, covered.union(redirected))
        or _unfit_operand(c, covered, keys)
    )


def _used_elsewhere(c: Canonical, inner: set[Node], users: set[Node]) -> Refusal | None:
    """Return another user of an inner value than these."""
    for node in sorted(inner, key=c.effects.position.__getitem__):
        for user in real_users(node):
            if user in users or c.is_weight(node):
                continue
            what = "is returned" if user.op == "output" else f"is also used by {user.name}"
            return Refusal("other_user", f"an inner value {what}", node)
    return None


def _unfit_operand(c: Canonical, covered: set[Node], keys: list[Key]) -> Refusal | None:
    """Return an operand or a value of a tensor subclass, or on another device than the others."""
    device = None
    distributed = all(is_distributed(c.tensor(key)) for key in keys)
    for key in [*keys, *covered]:
        value, leaf = c.tensor(key), owner_of(c.base(key)[0]) if key in c.views else None
        if leaf in c.quantized and c.is_weight(key):
            continue  # the call reads the weight dequantized
        odd = value is not None and (type(value) not in PLAIN or value.layout != torch.strided)
        kind = c.subclasses.get(leaf, type(value).__name__ if odd else "")  # type: ignore[arg-type]
        if kind and not (distributed and kind == "DTensor"):
            return Refusal("device", f"operand is a tensor subclass, {kind}", owner_of(key))
        if value is None:
            continue
        device = device or value.device
        if value.device != device:
            return Refusal("device", f"operands on {device} and {value.device}", owner_of(key))
    return None


def operands(form: Form) -> list[Key]:
    """Return the values that a form is computed from."""
    given = itertools.chain(vars(form).values(), getattr(form, "inputs", ()))
    return [one for one in given if isinstance(one, (Node, Virtual))]


def covered(c: Canonical, end: Key, reads: Iterable[Key]) -> frozenset[Node]:
    """Return the nodes that compute a value from those that are read."""
    seen = {*reads}
    queue = [] if end in seen else [end]
    for key in queue:
        below = [c.sources[key]] if key in c.sources else operands(c.forms[key])
        new = [one for one in dict.fromkeys(below) if one not in seen]
        seen.update(new)
        queue += new
    helpers = (c.helpers.get(key, frozenset()) for key in queue)
    return frozenset(map(owner_of, queue)).union(*helpers)


def moving(c: Canonical, nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that only one match may take over: all but weights and inputs."""
    return {n for n in nodes if not (c.is_weight(n) or isinstance(c.forms.get(n), Leaf))}


def crossed(
    c: Canonical,
    covered: Iterable[Node],
    final: Node,
    keys: Iterable[Key],
    allowed: Collection[Node] = (),
) -> Refusal | None:
    """Return a write or a region edge between the first of the nodes and the last; allowed: writers
    whose writes the caller has read."""
    effects, covered = c.effects, {*covered}
    nodes = moving(c, covered)
    writers = nodes & effects.writers.keys() - {*allowed}
    seen = next((one for one in writers if not is_alone(c, one, covered)), None)
    if seen is not None:
        return Refusal("mutation", "an inner value is written in place", seen)
    if final in effects.transformed:
        return Refusal("region", "the chain stands inside a functorch transform", final)
    # a graph whose weights are inputs has views of x that count as weights
    start, end = min(effects.position[n] for n in nodes or covered), effects.position[final]
    stops = [n for n in (*effects.edges, *effects.writers) if start < effects.position[n] < end]
    read = (*covered, *map(owner_of, keys))
    touched = ANYTHING.union(*map(effects.storages, read)) if stops else frozenset()
    kept = [n for n in stops if n in effects.edges or effects.writers[n] & touched]
    barrier = min({*kept} - nodes, key=effects.position.__getitem__, default=None)
    if barrier is None:
        return None
    if barrier in effects.edges:
        edge = f"the chain crosses the edge of a region ({region_edge(barrier)})"
        return Refusal("region", edge, barrier)
    memory = "memory of an operand or an inner value is written between the products"
    return Refusal("mutation", memory, barrier)


# Tokens that a symbolic count stands for: a short prefill.
TYPICAL_TOKENS = 128


@once
def call_ways(c: Canonical, spec: KernelSpec) -> Ways:
    """Return the times of a call on the target and cores of the options."""
    return ways(spec, c.chip, c.options.lnc, source=c.options.price)


def slower(times: Ways, node: Node) -> Refusal | None:
    """Return a refusal of one call where smaller calls are predicted to be faster."""
    if times.fused <= times.separate:
        return None
    one = f"{times.fused:,.1f} us" if math.isfinite(times.fused) else "no kernel of this size"
    between = f" and a sum over {times.tp} devices" if times.tp > 1 else ""
    reason = (
        f"one call for {counted(times.tokens, 'token')}: {one} on {times.target}, smaller "
        f"calls{between} {times.separate:,.1f} us (predicted, {times.source})"
    )
    return Refusal("slower", reason, node)


def tokens_to_judge(count: Any) -> int:
    """Return the token count that decides: TYPICAL_TOKENS for a symbolic one."""
    return max(1, count) if isinstance(count, int) else TYPICAL_TOKENS


def too_wide(c: Canonical, chain: Any) -> Refusal | None:
    """Return a refusal where the rank of x u v is so large that one dense product is faster."""
    k, r, n, key = chain.u.k, chain.r, chain.n, chain.second.key
    if r * (k + n) < k * n:
        return None
    dtype = dtype_name(c.dtype(key))
    m = tokens_to_judge(views.product(list(chain.first.tokens.values())))
    text = f"r (k + n) >= k n: {r} * ({k} + {n}) >= {k} * {n}, so one dense product is cheaper"
    if dtype in LowRankSpec.dtypes:  # else no kernel has a price
        times = call_ways(c, LowRankSpec(m=m, k=k, r=r, n=n, dtype=dtype))
        assert times.dense is not None
        if times.dense > times.low:
            return None
        text += (
            f": {times.dense:,.1f} us for {counted(m, 'token')} on {times.target}, one call "
            f"{times.fused:,.1f}, two products {times.separate:,.1f} (predicted, {times.source})"
        )
    return Refusal("rank_too_large", text, key)
