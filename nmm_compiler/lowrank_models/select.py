"""Which layers of a model are factorized: found, or skipped with the reason.

In: any `nn.Module` and the user's patterns. Out: one `Site` per distinct linear (with all its names
in the model) and a `Skipped`, with the reason, per layer that is left alone. Nothing is changed
here. It is an error only if no site is left.

Some models spell x W^T + b themselves (transformers' FalconLinear); others add a router, a scale or
an activation, and the class name does not say which. So a few random rows go through a float64 copy
of a subclass of `nn.Linear`, and are compared with the product of its weight. Callers of
`F.multi_head_attention_forward` (WavLM) pass `self.q_proj.weight`, and factors would be multiplied
back on every call: such uses are found in the code of the module that holds the linear.
"""

from __future__ import annotations

import copy
import dis
import fnmatch
import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from nmm_compiler.errors import ModelError, OptionTypeError, closest, nearest
from nmm_compiler.lowrank_models.experts import ExpertLinear, StackedBase
from nmm_compiler.lowrank_models.modules import (
    LowRankLinear,
    QuantizedLinear,
    distinct_modules,
    is_conv1d,
    lowrank_layers,
    sizes_of,
)
from nmm_compiler.lowrank_models.report import Skipped

Patterns = str | Iterable[str] | None
_FOREIGN = ("linear", "router", "gate", "expert", "stacked", "multiheadattention")
_ROWS = 3  # of random numbers, which try what a subclass of nn.Linear computes


@dataclass(frozen=True)
class Site:
    """One linear to factorize: y = x W^T + b with W [n, k].

    names: every dotted name that leads to this module; the first is the one reported.
    """

    names: tuple[str, ...]
    module: Any
    k: int
    n: int

    @property
    def name(self) -> str:
        """The first of the names."""
        return self.names[0]

    @property
    def group(self) -> str:
        """The group that gets one rank: the experts stacked in one weight, else the name."""
        return self.name.rpartition(".")[0] if isinstance(self.module, ExpertLinear) else self.name

    @property
    def weight(self) -> Tensor:
        """The weight as [n, k], a view of the stored one, which GPT-2's Conv1D has as [k, n]."""
        stored: Tensor = self.module.weight.detach()
        return stored.T if is_conv1d(self.module) else stored


def matches(name: str, pattern: str) -> bool:
    """Return whether a dotted module name matches a pattern.

    pattern: "re:..." is a regular expression for the whole name (as in torchao); anything else is
    a glob for consecutive parts of the name: "mlp", "layers.0.*", "q_proj", "*.attention".
    """
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    forms = (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*")
    return any(fnmatch.fnmatchcase(name, form) for form in forms)


def named(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Return whether one of these names matches one of these patterns."""
    return any(matches(name, pattern) for name in names for pattern in patterns)


def as_patterns(patterns: Patterns) -> tuple[str, ...]:
    """Return patterns as a tuple; one string is one pattern.

    Raises OptionTypeError for what is no pattern: not a string, or a broken regular expression.
    """
    listed = (patterns,) if isinstance(patterns, str) else tuple(patterns or ())
    for pattern in listed:
        if not isinstance(pattern, str):
            raise OptionTypeError("pattern", pattern, "a string, e.g. 'mlp' or 're:.*_proj'")
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise OptionTypeError("pattern", pattern, f"a valid expression ({error})") from error
    return listed


def find_sites(
    model: nn.Module,
    include: Patterns = None,
    exclude: Patterns = None,
) -> tuple[tuple[Site, ...], tuple[Skipped, ...]]:
    """Return (sites, skipped) of a model, in the order of `named_modules`.

    include: only names that match one of these patterns; it also brings in the output head, which
    is left alone otherwise. exclude: never these.

    Raises ModelError when no site is left, when an include pattern matches no linear,
    or when an exclude pattern matches no module at all; OptionTypeError for what is no pattern.
    """
    wanted, unwanted = as_patterns(include), as_patterns(exclude)
    if include is not None and not wanted:
        raise ModelError(
            "include has no patterns, which selects nothing; leave it out to select every linear"
        )
    modules, kind = distinct_modules(model), type(model).__name__
    every = [name for _, names in modules for name in names if name]
    for pattern in unwanted:
        if not named(every, [pattern]):
            raise ModelError(
                f"exclude pattern {pattern!r} matches no module of {kind}"
                f"{closest(pattern, every)}; leave it out, or name what is to stay dense"
            )
    holders: dict[int, list[str]] = defaultdict(list)  # by id: who holds a parameter
    for module, names in modules:
        for key, parameter in module.named_parameters(recurse=False):
            holders[id(parameter)].append(f"{names[0]}.{key}")
    head = None if wanted else getattr(model, "get_output_embeddings", lambda: None)()
    sites: list[Site] = []
    skipped: list[Skipped] = []
    seen: dict[str, str] = {}
    unmatched = list(wanted)
    inside = {id(part) for one in lowrank_layers(model).values() for part in one.children()}
    for module, names in modules:
        read = None if id(module) in inside else _read(module)
        if read is None:
            continue
        (shape, reason), name = read, names[0]
        seen[name] = f"{name} ({type(module).__name__} {list(shape)})"
        unmatched = [pattern for pattern in unmatched if not named(names, [pattern])]
        if (wanted and not named(names, wanted)) or named(names, unwanted):
            continue
        reason = reason or _refusal(module, name, model, holders, head)
        if reason:
            skipped.append(Skipped(name=name, shape=shape, reason=reason))
        else:
            n, k = shape[::-1] if is_conv1d(module) else shape
            sites.append(Site(tuple(names), module, k, n))
    listing = f"linear layers seen: {nearest('', seen.values()) or 'no nn.Linear or Conv1D'}"
    for pattern in unmatched:
        raise ModelError(
            f"include pattern {pattern!r} matches no linear layer of {kind}"
            f"{closest(pattern, seen)}; {listing}"
        )
    if not sites:
        reasons = "; ".join(f"{s.name}: {s.reason}" for s in skipped[:8])
        raise ModelError(
            f"{kind} has no layer to factorize with this include and exclude (left alone: "
            f"{reasons or 'none'}); {listing}"
        )
    return tuple(sites), tuple(skipped)


def _read(module: Any) -> tuple[tuple[int, ...], str] | None:
    """Return the stored shape of a layer's weight, and why it is no linear, "" for one that is.

    None for a module that multiplies by no weight. Those that do and are no nn.Linear are known by
    their names: quantizers' linears, routers, mixtures of experts that stack their weights.
    """
    kind = type(module).__name__
    if isinstance(module, LowRankLinear):
        return sizes_of(module), f"already low-rank (rank {module.rank})"
    if isinstance(module, nn.Linear) or is_conv1d(module):
        weight = module.weight
        lazy = f"{kind} has no weight yet; run the model once before compressing it"
        return ((), lazy) if is_lazy(weight) else (tuple(weight.shape), "")
    if not any(word in kind.lower() for word in _FOREIGN):
        return None
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    shapes = [tuple(tensor.shape) for tensor in own if tensor.dim() >= 2]
    reason = f"{kind} multiplies by a weight of its own and is not an nn.Linear"
    if isinstance(module, (QuantizedLinear, StackedBase)):
        reason = f"already quantized ({module.format})"
    return (shapes[0], reason) if shapes else None


def _refusal(
    module: Any,
    name: str,
    model: nn.Module,
    holders: dict[int, list[str]],
    head: nn.Module | None,
) -> str:
    """Return why this linear is left alone, "" when it can be factorized."""
    kind, weight = type(module).__name__, module.weight
    if parametrize.is_parametrized(module):
        return "its weight is parametrized; use torch.nn.utils.parametrize.remove_parametrizations"
    if not name:
        return "the model itself is a linear; wrap it, e.g. in nn.Sequential"
    plain = type(weight) in (nn.Parameter, Tensor) and weight.is_floating_point()
    if not plain or weight.dtype.itemsize < 2:
        return (
            f"its weight is a {type(weight).__name__} of {weight.dtype}, not a plain tensor of "
            "floats; load it as bfloat16, and quantize the factors afterwards"
        )
    others = [held for held in holders[id(weight)] if held != f"{name}.weight"]
    if others:
        return f"its weight is tied to {', '.join(others)}"
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return "it has forward hooks or a forward of its own, which a replacement would lose"
    owner = model.get_submodule(name.rpartition(".")[0])
    if only_reads(owner, name.rpartition(".")[2]):
        return (
            f"{type(owner).__name__} reads its weight and never calls it: factors would be "
            "multiplied back each time"
        )
    if isinstance(module, nn.Linear):
        difference = difference_from_linear(module)
        if difference is not None:
            return f"a subclass of nn.Linear ({kind}) that {difference}"
    if module is head:
        return "the output head (name it in include= to factorize it)"
    return ""


# What a layer computes, and how a model uses it ------------------------------------------------


def difference_from_linear(module: nn.Linear) -> str | None:
    """Return None when the module's forward is x W^T + b up to rounding, else why it is not."""
    if type(module).forward is nn.Linear.forward:
        return None
    weight = module.weight.detach()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _ROWS, weight.shape[1], generator=generator, dtype=torch.float64)
    x = x.to(weight.device)
    # the bound on the difference of two orders of summation: k products, the bias, and the result,
    # for either of the two (Higham, 2002, section 3.1)
    eps = 2 * (weight.shape[1] + 2) * torch.finfo(torch.float64).eps
    try:
        twin = copy.deepcopy(module).double().requires_grad_(False)
        bias = twin.bias
        expected = functional.linear(x, twin.weight, bias)
        size = functional.linear(x.abs(), twin.weight.abs(), None if bias is None else bias.abs())
        for mode in (False, True):
            y = twin.train(mode)(x)
            same = isinstance(y, Tensor) and y.shape == expected.shape
            if not same or not bool(((y - expected).abs() <= eps * size).all()):
                return "computes something else than x W^T + b"
    except Exception as error:  # a forward that raises is a reason to leave the layer alone
        return f"cannot be called like an nn.Linear ({type(error).__name__}: {error})"
    return None


def only_reads(owner: nn.Module, name: str) -> bool:
    """Return whether the code that an owner's forward reaches reads `self.name.weight`, and uses
    `self.name` for nothing but such parameters.

    That code is `forward` and the methods of the class that it names. A use that cannot be told
    from a call, as of the module itself, counts as one.
    """
    kind = type(owner)
    reached, waiting, uses = {""}, ["forward"], set[str]()
    while waiting:
        method = inspect.unwrap(getattr(kind, waiting.pop(), None) or object)
        codes = [method.__code__] if inspect.isfunction(method) else []
        for code in codes:  # grows by the functions inside
            codes += [one for one in code.co_consts if inspect.iscode(one)]
            waiting += [one for one in code.co_names if one not in reached and hasattr(kind, one)]
            reached.update(code.co_names)
            for one, after in itertools.pairwise(dis.get_instructions(code)):
                if one.argval == name and one.opname.startswith("LOAD"):
                    uses.add(after.argval if after.opname == "LOAD_ATTR" else "")
    return "weight" in uses and uses <= {"weight", "bias"}
