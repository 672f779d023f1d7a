"""The result of `rewrite` and `explain`: the graph, the matches, the refusals, and a report.

Matches with equal text in several layers of a model share a row of the report: the numbers of their
paths become `*`. Each dense product is priced by itself, as the passes price a chain: dense, and
low-rank. A page has the graph before and after as pictures too, one for each kind of match: its
nodes with their inputs and readers, and the call that replaces them.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import fx, nn

from nmm_compiler.errors import ModelError, NmmError
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.passes import verify
from nmm_compiler.passes.chains.chain import read_stage
from nmm_compiler.passes.chains.safety import Refusal
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical, dtype_name, owner_of
from nmm_compiler.passes.graph.read_graph import TURNED
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.reproduce import reproducer
from nmm_compiler.passes.rules.base import Declined, Match, module_path
from nmm_compiler.passes.rules.lowrank import products_at
from nmm_compiler.prices.ways import Ways, ways
from nmm_compiler.records import Record
from nmm_compiler.report.charts import GraphNode, graph
from nmm_compiler.report.headline import headline, not_told
from nmm_compiler.report.parts import Drawing, Grid, Line, Part, Section
from nmm_compiler.report.shown import Shown
from nmm_compiler.report.text import counted

_T = TypeVar("_T")
NEXT = (
    "next: nmm plan DIRECTORY names the form of the weights that pays for the whole model (fp8, "
    "few bits with a branch, low rank); nmm_compiler.compress(model, 0.2) makes this one"
)


@dataclass(frozen=True)
class Opportunity(Record):
    """A dense product that could be factorized, and the savings of rank `r`.

    node: the product. r is the rank that keeps 80 % of the parameters. m: tokens of the product,
    None for a symbolic count; dtype: its operands'. saved_bytes are bytes of weight read per call.
    """

    node: str
    module: str
    m: int | None
    k: int
    n: int
    r: int
    dtype: str
    saved_bytes: int


def could_bring(chains: Iterable[Any], target: str) -> str:
    """Return the sentence for `Opportunity`s of a graph; "" where there are none to price."""
    ways_of_each = (_ways_at_a_rank(one, target) for one in chains)
    said = _sentence(
        [times for times in ways_of_each if times is not None],
        "in the products that could be low-rank (at 80 % of their parameters)",
        could=True,
        quality="the quality is not known before calibration",
        remedy="more tokens a call, or the larger layers alone, may gain more",
    )
    return f"{said}; {NEXT}" if said else ""


def calls_bring(predicted: Iterable[dict[str, Any]]) -> str:
    """Return the sentence for the calls of a graph, from their `Match.info["predicted"]`."""
    judged = [Ways(**one) for one in predicted if one["dense"] is not None]
    return _sentence(
        judged,
        "in the fused calls",
        quality="its quality is not judged here",
        remedy="a smaller rank, or more tokens a call, would help",
    )


def _sentence(priced: list[Ways], what: str, **said: Any) -> str:
    """Return the headline of computations one after the other, on one target; "" for none."""
    if not priced:
        return ""
    gain = sum(times.dense or 0.0 for times in priced) / sum(times.low for times in priced)
    tokens = max(times.tokens for times in priced)
    source = priced[0].source.replace("_", " ")
    where = f"({counted(tokens, 'token')}, {source}) on {priced[0].target}"
    error = max(times.error for times in priced)
    return headline([(gain, what)], where, error=error, **said)


def _ways_at_a_rank(one: Any, target: str) -> Ways | None:
    """Return the times of a dense product at the rank of an Opportunity; None where a dtype or a
    size has no kernels, or its tokens are symbolic."""
    if not one.m or one.dtype not in LowRankSpec.dtypes:
        return None
    tile = next((size for size in (128, 64, 32) if one.r >= 4 * size), 1)
    try:
        spec = LowRankSpec(m=one.m, k=one.k, r=one.r // tile * tile, n=one.n, dtype=one.dtype)
        return ways(spec, target)
    except NmmError:
        return None


def _looked_up(weight: fx.Node) -> bool:
    """Return whether an embedding reads the weight too; `compress` leaves such tied weights
    dense."""
    leaves = (node for node in weight.all_input_nodes if node.op in ("placeholder", "get_attr"))
    readers = (user for node in (weight, *leaves) for user in node.users)
    return any("embedding" in getattr(user.target, "__name__", "") for user in readers)


def opportunities(c: Canonical, covered: set[fx.Node]) -> list[Opportunity]:
    """Return the dense products with a constant 2-D weight that factors would make smaller."""
    places: list[Opportunity] = []
    left = (node for node in c.graph.nodes if node not in covered)
    for key, form in (product for node in left for product in products_at(c, node)):
        rhs = c.is_constant(form.rhs)
        (data, _), (weight, _) = form.orders[not rhs]
        if c.is_constant(data) or not c.is_constant(weight) or _looked_up(owner_of(weight)):
            continue
        stage = read_stage(c, key, form, rhs, False)
        if isinstance(stage, Refusal):
            continue
        k, n = stage.weight.k, stage.weight.n
        r = int(0.8 * k * n / (k + n))
        if r < 1:
            continue
        m, dtype = views.product([*stage.tokens.values()]), c.dtype(key)
        saved_bytes = (k * n - r * (k + n)) * (2 if dtype is None else dtype.itemsize)
        name, module = owner_of(key).name, module_path(owner_of(key))
        static = m if isinstance(m, int) else None
        places.append(Opportunity(name, module, static, k, n, r, dtype_name(dtype), saved_bytes))
    return places


_MOST_NODES = 40


def graph_parts(
    original: fx.GraphModule, rewritten: fx.GraphModule, matches: Iterable[Match]
) -> list[Part]:
    """Return a section with the picture before and after for each kind of match."""
    kinds = grouped((str(match).replace(f" at {match.name}", ""), match) for match in matches)
    parts: list[Part] = []
    for kind, same in kinds.items():
        match = same[0]
        fused, added = {node.name for node in match.nodes}, set(match.added)
        before = _picture(original, match.graph, fused, "fused", "before")
        after = _picture(rewritten, match.graph, added, "call", "after")
        title = f"{len(same)} x {kind} at {places_of(m.module or m.name for m in same)}"
        parts.append(Section(title, (before, after)))
    return parts


def _picture(module: fx.GraphModule, path: str, names: set[str], kind: str, when: str) -> Drawing:
    """Return the picture of nodes of the graph at a path, marked as a kind, and of their
    neighbours."""
    inner: Any = module.get_submodule(path)
    centre = [node for node in inner.graph.nodes if node.name in names]
    around = {n for node in centre for n in (node, *node.all_input_nodes, *node.users)}
    shown = [node for node in inner.graph.nodes if node in around and node.op != "output"]
    drawn = [
        GraphNode(
            node.name,
            _what(node),
            tuple(n.name for n in node.all_input_nodes),
            "transpose" if target_name(node) in TURNED else kind if node.name in names else "",
        )
        for node in shown[:_MOST_NODES]
    ]  # fmt: skip
    count = counted(len(centre), "node")
    return graph(drawn, f"{when}: {count}, with what they read and who reads them")


def _what(node: fx.Node) -> str:
    """Return what a node computes and the shape of its value, in few words."""
    value: Any = node.meta.get("example_value", node.meta.get("val"))
    shape = f" [{', '.join(map(str, value.shape))}]" if hasattr(value, "shape") else ""
    if node.op == "get_attr" or isinstance(value, nn.Parameter):
        return f"parameter{shape}"
    if node.op == "placeholder":
        return f"input{shape}"
    name = target_name(node) or str(getattr(node.target, "__name__", node.target))
    where = module_path(node)
    return f"{name}{shape}" + (f"  in {where}" if where else "")


@dataclass(frozen=True)
class RuleCount:
    """What became of the places of a rule of the user.

    nearest: how many values agree at the place where most of the pattern was found, and the
    difference there.
    """

    rule: str
    matched: int
    refused: int
    nearest: tuple[int, str]

    def __str__(self) -> str:
        """Return one sentence for people."""
        if not (self.matched or self.refused or self.nearest[1]):
            return (
                f"rule {self.rule}: no node of the graph is what the pattern ends with, once the "
                f'rules before it have run; rules=[{self.rule}, "..."] asks it first'
            )
        text = f"rule {self.rule}: {self.matched} matched, {self.refused} refused"
        if self.nearest[1] and not self.matched:
            text += f"; the nearest: {self.nearest[1]}"
        return text


_BREAKS = (
    "the model has {} graphs: a chain with its products in two of them is not found; "
    "TORCH_LOGS=graph_breaks says where and why Dynamo broke"
)
# Places that a report names before it counts the rest.
_SHOWN = 3


@dataclass(repr=False)
class RewriteResult(Shown):
    """A rewritten graph with its matches and refusals.

    graph_module is a new GraphModule that shares parameters with the original. nearest: for each
    rule of the user the nearest place that is no match, as a `RuleCount` has it. results: of a
    model that has no single graph, those of each; it has no graph_module.
    """

    graph_module: Any
    matches: list[Match]
    declined: list[Declined]
    opportunities: list[Opportunity] = field(default_factory=list)
    original: Any = None
    transposes_before: int = 0
    transposes_after: int = 0
    nearest: dict[str, tuple[int, str]] = field(default_factory=dict)
    target: str = "trn2"
    results: list[RewriteResult] = field(default_factory=list)

    def check(self, *inputs: Any, **keywords: Any) -> float:
        """Run the graph before and after on real inputs; raise where the results differ.

        Return the largest error as a fraction of the bound, which is derived from dtypes and
        contraction lengths (`verify`). Raises VerificationError, ModelError.
        """
        return verify.check(self.original, self.graph_module, self.matches, inputs, keywords)

    def add(self, part: RewriteResult) -> None:
        """Add what was found in one of the graphs."""
        self.matches += part.matches
        self.declined += part.declined
        self.opportunities += part.opportunities
        self.transposes_before += part.transposes_before
        self.transposes_after += part.transposes_after
        for name, near in part.nearest.items():
            self.nearest[name] = max(near, self.nearest.get(name, near))

    @property
    def rules(self) -> dict[str, RuleCount]:
        """Return what became of the places of each rule of the user, by its name."""
        return {
            name: RuleCount(
                name,
                sum(match.rule == name for match in self.matches),
                sum(one.rule == name for one in self.declined),
                near,
            )
            for name, near in self.nearest.items()
        }

    @property
    def chains(self) -> int:
        """Return how many factor pairs the matches hold; groups hold several."""
        return sum(int(m.info.get("chains", 0)) for m in self.matches)

    def diff(self) -> str:
        """Return a unified diff of the graph's readable code, before against after."""
        return "\n".join(
            difflib.unified_diff(
                readable(self.original).splitlines(),
                readable(self.graph_module).splitlines(),
                "before",
                "after",
                lineterm="",
            )
        )

    def reproducer(
        self, match: Match | None = None, inputs: Any = None, *, target: str = "trn2"
    ) -> str:
        """Return a Python script that rewrites one match alone and checks it, for an issue.

        match: one of `matches`, by default the first. Its nodes become a function of tensors like
        those that it read, with random numbers. inputs: example inputs in order, for a graph
        without shapes. Raises ModelError for such a graph without inputs, and without a match.
        """
        if not self.matches:
            raise ModelError(f"there is no match to reproduce: {self.summary()}")
        chosen = match or self.matches[0]
        (own,) = (r for r in self.results or [self] if any(chosen is one for one in r.matches))
        return reproducer(own.original, chosen, inputs, target)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "matches": [m.to_dict() for m in self.matches],
            "declined": [d.to_dict() for d in self.declined],
            "opportunities": [o.to_dict() for o in self.opportunities],
            "transposes": {"before": self.transposes_before, "after": self.transposes_after},
            "rules": [dataclasses.asdict(count) for count in self.rules.values()],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return the matches, refusals and opportunities as JSON."""
        return json.dumps(self.to_dict(), indent=indent, sort_keys=True)

    def summary(self) -> str:
        """Return one line: counts of matches, refusals and transposes."""
        return (
            f"{len(self.matches)} matched, {len(self.declined)} declined; transposes of "
            f"activations in the graph: {self.transposes_before} -> {self.transposes_after}"
        )

    def parts(self) -> list[Part]:
        """Return the fused calls, the refusals with reasons, and the opportunities."""
        gain = calls_bring(m.info["predicted"] for m in self.matches if "predicted" in m.info)
        broken = [_BREAKS.format(len(self.results))] if self.graph_module is None else []
        return [
            Line(self.summary(), "headline"),
            *([Line(gain, "headline")] if gain else []),
            *_matches(self),
            *(Line(str(count), "note") for count in self.rules.values()),
            *declined_parts(self.declined),
            *_opportunities(self.opportunities, self.target),
            *(Line(text, "note") for text in broken),
        ]

    def page_parts(self) -> list[Part]:
        """Return `parts` and pictures of the graph before and after, one for each kind of match."""
        summary, *rest = self.parts()
        each = (graph_parts(r.original, r.graph_module, r.matches) for r in self.results or [self])
        return [summary, *itertools.chain(*each), *rest]

    def __repr__(self) -> str:
        return f"<RewriteResult: {self.summary()}>"


def readable(module: Any) -> str:
    """Return the code of a graph and of the graphs inside it."""
    graphs = [(n, one) for n, one in module.named_modules() if isinstance(one, fx.GraphModule)]
    return "\n\n".join((f"# {name}\n" if name else "") + one.code.strip() for name, one in graphs)


# -- the parts of a report ----------------------------------------------------------------------


def grouped(rows: Iterable[tuple[Any, _T]]) -> dict[Any, list[_T]]:
    """Return key -> what has it, in the order in which keys come."""
    groups: dict[Any, list[_T]] = {}
    for key, place in rows:
        groups.setdefault(key, []).append(place)
    return groups


def places_of(names: Iterable[str]) -> str:
    """Return paths in short: differing numbers as `*`, the first few paths, and how many more."""
    patterns = grouped((re.sub(r"\b\d+\b", "*", name), name) for name in dict.fromkeys(names))
    shown = [pattern if len(same) > 1 else same[0] for pattern, same in patterns.items()]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _matches(result: RewriteResult) -> list[Part]:
    groups = grouped(
        (
            (
                m.kind,
                *(str(m.info.get(key, "-")) for key in ("m", "k", "r", "n")),
                f"{m.info['x_layout']}>{m.info['out_layout']}" if "x_layout" in m.info else "-",
                *_figures(m),
                m.notes,
            ),
            m.module or m.name,
        )
        for m in result.matches
    )
    rows = [(len(where), *key[:-1], places_of(where)) for key, where in groups.items()]
    head = ("calls", "fused", "m", "k", "r", "n", "layout", "us", "smaller", "dense", "where")
    parts: list[Part] = [Grid.of(head, rows)] if rows else []
    parts += [Line(text, "note") for text in _prices(result.matches)]
    notes = Counter(note for m in result.matches for note in m.notes)
    return [*parts, *(Line(f"note, {n} x: {note}", "note") for note, n in notes.items())]


def _figures(match: Match) -> list[str]:
    """Return microseconds of one call, of the smaller calls that compute it, and dense."""
    predicted = match.info.get("predicted", {})
    each = (predicted.get(way) for way in ("fused", "separate", "dense"))
    return ["-" if us is None else f"{us:,.1f}" for us in each]


def _prices(matches: list[Match]) -> list[str]:
    """Return what the figures mean, and from how many tokens chains near break-even pay."""
    priced = [m for m in matches if "predicted" in m.info]
    if not priced:
        return []
    how = {
        f"{one['source']}, error {100 * one['error']:.0f} %"
        for one in (m.info["predicted"] for m in priced)
    }
    lines = [
        f"us, smaller, dense: predicted microseconds ({', '.join(sorted(how))}) of one call, of "
        "the smaller calls that compute it, and of the fastest dense way"
    ]
    slower = {text: None for m in priced if (text := slower_than_dense(m))}
    return [*lines, *slower]


def slower_than_dense(match: Match) -> str:
    """Return the note on a match that dense weights are predicted to beat; "" for any other."""
    predicted = match.info.get("predicted")
    if predicted is None or predicted["dense"] is None or predicted["dense"] >= predicted["fused"]:
        return ""
    what = str(match).replace(f" at {match.name}", "")
    near = not_told(predicted["dense"] / predicted["fused"], predicted["error"], "dense")
    return (
        f"{near}{what}: dense weights are predicted to take less ({predicted['source']}); use a "
        "smaller rank or keep the layer dense"
    )


def declined_parts(declined: Sequence[Declined]) -> list[Part]:
    """Return each reason once, with its nodes and what would have to change."""
    groups: dict[tuple[str, str, str], list[Declined]] = {}
    for one in reversed(declined):  # rules search from the end of the graph
        # without the numbers of nodes and layers, so that equal reasons meet
        reason = re.sub(r"(?<=\.)\d+(?=\.)", "*", re.sub(r"(\w)_\d+\b", r"\1", one.reason))
        groups.setdefault((one.rule, reason, one.remedy), []).append(one)
    lines = []
    for (rule, _, remedy), alike in groups.items():
        count = f"{len(alike)} x " if len(alike) > 1 else ""
        modules = places_of(one.module for one in alike if one.module)
        where = f"at {places_of(one.at for one in alike)}" + (f" in {modules}" if modules else "")
        where += f" ({alike[0].source})" if alike[0].source else ""
        lines += [
            Line(f"{count}{rule}: {alike[0].reason}", indent=2, hang=2),
            Line(where, indent=6, hang=3),
            Line(f"would help: {remedy}", indent=6, hang=3),
        ]
    return [Section("left alone", tuple(lines))] if lines else []


def _opportunities(places: list[Opportunity], target: str) -> list[Part]:
    groups = grouped(((o.k, o.n, o.r, o.saved_bytes), o.module or o.node) for o in places)
    if not groups:
        return []
    rows = [
        (len(at), k, n, r, f"{saved * len(at) / 2**20:.2f}", places_of(at))
        for (k, n, r, saved), at in groups.items()
    ]
    head = ("dense", "k", "n", "rank", "MiB saved", "could be factorized")
    total = sum(o.saved_bytes for o in places) / 2**20
    kept = f"keeping 80 % of these weights' parameters saves {total:.2f} MiB per pass"
    said = could_bring(places, target)
    return [
        Grid.of(head, rows),
        Line(kept),
        *([Line(said, "headline")] if said else []),
    ]
