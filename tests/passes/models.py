"""Models for tests: weights with a function of them, and small random transformers models.

In those of transformers every large enough linear is replaced by two factors.
"""

import torch
from torch import nn
from toy_models import Model as Model, Pair as Pair

from nmm_compiler.passes.pipeline import explain, run
from nmm_compiler.passes.rules import Match, Rule


class LlamaNorm(nn.Module):
    """RMSNorm as transformers spell it."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(size) + 0.5), eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def three():
    """Return two chains of x, added up behind an abs, and a third that reads the sum turned."""

    def function(p, x):
        h = torch.tanh(p.p(x) + p.q(x).abs())
        return p.s(h), h.t().cumsum(0)

    return Model(function, p=Pair(32, 3, 24), q=Pair(32, 3, 24), s=Pair(24, 3, 32))


class Backend:
    """A backend of torch.compile that rewrites each graph; the results are its items.

    before: called with each graph and its inputs, before the passes.
    """

    def __init__(self, options=None, rules=None, before=lambda module, inputs: None):
        torch._dynamo.reset()
        self.options, self.rules, self.before, self.results = options, rules, before, []

    def __call__(self, module, inputs):
        self.before(module, inputs)
        self.results.append(run(module, inputs, self.options, self.rules))
        return self[-1].graph_module.forward

    def __getitem__(self, index):
        return self.results[index]

    def __len__(self):
        return len(self.results)


def match_of(rule, node):
    """Return the match of a rule, by name, that takes over one node."""
    return Match(rule=rule, node=node, nodes=frozenset({node}))


class OwnRule(Rule):
    """A rule of functions; it matches each node of which `ends` is true unless `checks` differs."""

    def __init__(self, name, ends, rewrites=None, checks=None, combines=None):
        self.name, self.ends, self.rewrites = name, ends, rewrites
        self.checks, self.combines = checks, combines

    def pattern(self, graph, node):
        if self.ends(node):
            yield node

    def check(self, graph, candidate):
        return self.checks(candidate) if self.checks else match_of(self.name, candidate)

    def combine(self, graph, matches):
        return self.combines(graph, matches) if self.combines else matches

    def rewrite(self, graph, match, editor):
        return self.rewrites(match, editor)


# The rewrite compares both graphs itself, and a fault of ours is no refusal.
VERIFIED = {"verify": True, "strict": True}


def trace_and_run(model, *inputs, **options):
    """Return the result of the passes on the symbolic trace of a model."""
    return run(torch.fx.symbolic_trace(model), inputs, options)


def kinds_of(result):
    """Return the kinds of the matches of a result, in order; each word of "lowrank norm"."""
    return [kind for match in result.matches for kind in match.kind.split()]


def codes_of(result):
    """Return the codes of the refusals of a result, in order."""
    return [declined.code for declined in result.declined]


def compiled(model, **options):
    """Return a model compiled by the backend; no code that was compiled before is used."""
    torch._dynamo.reset()
    return torch.compile(model, backend="nmm", options={"inner": "eager", **options})


def explained(model, inputs, **options):
    """Return the rules that match in a model, and the refusals as text."""
    torch._dynamo.reset()
    found = explain(model, inputs, options=options)
    return [match.rule for match in found.matches], [str(one) for one in found.declined]


def calls_of(result):
    """Return the nodes that call our ops in the graph of a result."""
    nodes = result.graph_module.graph.nodes
    return [node for node in nodes if str(node.target).startswith("nmm.")]


def kernel_calls(module, packed=None):
    """Return (node, the spec that it launches) for each kernel call of a graph.

    packed: turns a weight that the runtime packs once, as its kernel reads it.
    """
    from nmm_compiler.ops.lower import lower, op_name, tokens

    found = []
    for node in module.graph.nodes:
        name = op_name(node.target)
        if name is not None:
            args = torch.fx.node.map_arg(
                node.args, lambda n: n.meta.get("example_value", n.meta.get("val"))
            )
            count = tokens(args[0], node.kwargs)
            found.append((node, lower(name, args, dict(node.kwargs), count, packed).spec))
    return found
