"""The results of `rewrite` and `explain`: the graph, the matches, the refusals, and a report.

Matches with equal text in several layers of a model share a row of the report: the numbers of their
paths become `*`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from nmm_compiler.errors import UnknownNameError
from nmm_compiler.passes import verify
from nmm_compiler.passes.graph_view import graph_parts
from nmm_compiler.passes.opportunities import Opportunity, calls_bring, could_bring
from nmm_compiler.passes.reproduce import reproducer
from nmm_compiler.passes.rules.base import Declined, Match
from nmm_compiler.report.headline import not_told
from nmm_compiler.report.parts import Grid, Line, Part, Section
from nmm_compiler.report.shown import Shown
from nmm_compiler.report.text import counted


@dataclass
class RuleCount:
    """What became of the places of a rule of the user.

    lost: how many places another rule took, by its name. nearest: how many values agree at the
    place where most of the pattern was found, and the difference there.
    """

    rule: str
    matched: int = 0
    refused: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    nearest: tuple[int, str] = (0, "")

    def add(self, other: RuleCount) -> None:
        """Add what became of the rule's places in another graph."""
        self.matched += other.matched
        self.refused += other.refused
        self.lost += other.lost
        self.nearest = max(self.nearest, other.nearest)

    def __str__(self) -> str:
        """Return one sentence for people."""
        if not (self.matched or self.refused or self.lost or self.nearest[1]):
            return f"rule {self.rule}: no node of the graph is what the pattern ends with"
        said = [f"{self.matched} matched", f"{self.refused} refused"]
        said += [f"{count} lost to {other}" for other, count in self.lost.items()]
        text = f"rule {self.rule}: {', '.join(said)}"
        if self.lost and not self.matched:
            text += f'; rules=[{self.rule}, "..."] asks it first'
        if self.nearest[1] and not self.matched:
            text += f"; the nearest: {self.nearest[1]}"
        return text


_BREAKS = (
    "the model has {} graphs: a chain with its products in two of them is not found; "
    "TORCH_LOGS=graph_breaks says where and why Dynamo broke"
)
# Places and layouts that a report names before it counts the rest.
_SHOWN = 3


@dataclass(repr=False)
class RewriteResult(Shown):
    """A rewritten graph with its matches and refusals.

    graph_module is a new GraphModule that shares parameters with the original. rules: what became
    of the places of each rule of the user, by its name. reordered: products that stayed and read an
    operand in another memory order now, so that they may sum in another order: graph, node, terms.
    """

    graph_module: fx.GraphModule
    matches: list[Match]
    declined: list[Declined]
    opportunities: list[Opportunity] = field(default_factory=list)
    original: Any = None
    program: Any = None
    layouts: list[Any] = field(default_factory=list)
    transposes_before: int = 0
    transposes_after: int = 0
    rules: dict[str, RuleCount] = field(default_factory=dict)
    reordered: list[tuple[str, str, int]] = field(default_factory=list)
    target: str = "trn2"

    def check(self, *inputs: Any, **keywords: Any) -> float:
        """Run the graph before and after on real inputs; raise where the results differ.

        Return the largest error as a fraction of the bound, which is derived from dtypes and
        contraction lengths (`verify`). Raises VerificationError, ModelError.
        """
        both = self.original, self.graph_module
        return verify.check(*both, self.rewritten, inputs, keywords, self.reordered)

    def add(self, part: RewriteResult) -> None:
        """Add what was found in one of the graphs."""
        self.matches += part.matches
        self.declined += part.declined
        self.opportunities += part.opportunities
        self.layouts += part.layouts
        self.reordered += part.reordered
        self.transposes_before += part.transposes_before
        self.transposes_after += part.transposes_after
        for name, count in part.rules.items():
            self.rules.setdefault(name, RuleCount(name)).add(count)

    @property
    def rewritten(self) -> list[Match]:
        """Return the matches that changed the graph."""
        return [m for m in self.matches if m.rewritten]

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
        self, match: Match | str | None = None, inputs: Any = None, *, target: str = "trn2"
    ) -> str:
        """Return a Python script that rewrites one match alone and checks it, for an issue.

        match: one of `matches`, or the name of its node or module; None is the first. Its nodes
        become a function of tensors like those that it read, with random numbers. inputs: example
        inputs in order, for a graph without shapes. Raises UnknownNameError and ModelError.
        """
        found = match if isinstance(match, Match) else named_match(self.matches, match)
        return reproducer(self.original, found, inputs, target)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "matches": [m.to_dict() for m in self.matches],
            "declined": [d.to_dict() for d in self.declined],
            "opportunities": [o.to_dict() for o in self.opportunities],
            "layouts": [str(choice) for choice in self.layouts],
            "transposes": {"before": self.transposes_before, "after": self.transposes_after},
            "rules": [dataclasses.asdict(count) for count in self.rules.values()],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return the matches, refusals and opportunities as JSON."""
        return json.dumps(self.to_dict(), indent=indent, sort_keys=True)

    def summary(self) -> str:
        """Return one line: counts of matches, refusals and transposes."""
        return (
            f"{len(self.matches)} matched ({len(self.rewritten)} rewritten), "
            f"{len(self.declined)} declined; transposes of activations in the graph: "
            f"{self.transposes_before} -> {self.transposes_after}"
        )

    def parts(self) -> list[Part]:
        """Return the fused calls, the layouts, the refusals with reasons, and the opportunities."""
        return [
            Line(self.summary(), "headline"),
            *_gain(self.rewritten),
            *_matches(self),
            *(Line(str(count), "note") for count in self.rules.values()),
            *_layouts(self),
            *_declined(self.declined),
            *_opportunities(self.opportunities, self.target),
        ]

    def page_parts(self) -> list[Part]:
        """Return `parts` and pictures of the graph before and after, one for each kind of match."""
        pictures = graph_parts(self.original, self.graph_module, self.matches)
        summary, *rest = self.parts()
        return [summary, *pictures, *rest]

    def __repr__(self) -> str:
        return f"<RewriteResult: {self.summary()}>"


def named_match(matches: Sequence[Match], name: str | None) -> Match:
    """Return the match whose node or module has this name; the first for None.

    Raises UnknownNameError where there is none.
    """
    for match in matches:
        if name is None or name in (match.name, match.module):
            return match
    names = [name for match in matches for name in (match.name, match.module) if name]
    raise UnknownNameError("match", name, list(dict.fromkeys(names)))


def readable(module: Any) -> str:
    """Return the code of a graph and of the graphs inside it."""
    parts: list[str] = []
    for name, child in [("", module), *module.named_modules()]:
        if isinstance(child, fx.GraphModule) and (name or child is module):
            if name == "" and parts:
                continue
            parts.append((f"# {name}\n" if name else "") + child.code.strip())
    return "\n\n".join(parts)


@dataclass(repr=False)
class Explanation(Shown):
    """The results of every graph of a model: matches, refusals and opportunities."""

    results: list[RewriteResult]

    @property
    def matches(self) -> list[Match]:
        """Return the matches of all graphs."""
        return [m for r in self.results for m in r.matches]

    @property
    def declined(self) -> list[Declined]:
        """Return the refusals of all graphs."""
        return [d for r in self.results for d in r.declined]

    @property
    def opportunities(self) -> list[Opportunity]:
        """Return the dense products that could be factorized, of all graphs."""
        return [o for r in self.results for o in r.opportunities]

    def reproducer(self, match: Match | str | None = None, *, target: str = "trn2") -> str:
        """Return a script of one match of any graph, see `RewriteResult.reproducer`."""
        found = match if isinstance(match, Match) else named_match(self.matches, match)
        (result,) = (r for r in self.results if any(found is one for one in r.matches))
        return result.reproducer(found, target=target)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data, one entry per graph."""
        return {"graphs": [r.to_dict() for r in self.results]}

    def to_json(self, indent: int | None = 2) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, sort_keys=True)

    def parts(self) -> list[Part]:
        """Return the reports of all graphs."""
        return self._of_each([result.parts() for result in self.results])

    def page_parts(self) -> list[Part]:
        """Return the reports of all graphs with pictures."""
        return self._of_each([result.page_parts() for result in self.results])

    @staticmethod
    def _of_each(shown: list[list[Part]]) -> list[Part]:
        if not shown:
            return [Line("no graph was traced")]
        if len(shown) == 1:
            return shown[0]
        sections = [Section(f"graph {i}:", tuple(parts)) for i, parts in enumerate(shown)]
        return [*sections, Line(_BREAKS.format(len(shown)), "note")]

    def __repr__(self) -> str:
        counts = f"{len(self.matches)} matched, {len(self.declined)} declined"
        return f"<Explanation: {len(self.results)} graphs, {counts}>"


# -- the parts of a report ----------------------------------------------------------------------


def _group(rows: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    """Return key -> places, in the order in which keys come."""
    groups: dict[Any, list[str]] = {}
    for key, place in rows:
        groups.setdefault(key, []).append(place)
    return groups


def _places(names: Iterable[str]) -> str:
    """Return paths in short: differing numbers as `*`, the first few paths, and how many more."""
    patterns: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        patterns.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    shown = [pattern if len(same) > 1 else same[0] for pattern, same in patterns.items()]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _matches(result: RewriteResult) -> list[Part]:
    groups = _group(
        (
            (
                m.kind if m.rewritten else f"({m.kind})",
                *(str(m.info.get(key, "-")) for key in ("m", "k", "r", "n")),
                f"{m.info['x_layout']}>{m.info['out_layout']}" if "x_layout" in m.info else "-",
                *_figures(m),
                m.notes,
            ),
            m.module or m.name,
        )
        for m in result.matches
    )
    rows = [(len(where), *key[:-1], _places(where)) for key, where in groups.items()]
    head = ("calls", "fused", "m", "k", "r", "n", "layout", "us", "smaller", "dense", "where")
    parts: list[Part] = [Grid.of(head, rows)] if rows else []
    if any(not m.rewritten for m in result.matches):
        parts.append(Line("(in brackets: reported, no kernel computes it yet)", "note"))
    parts += [Line(text, "note") for text in _prices(result.matches)]
    notes = Counter(note for m in result.matches for note in m.notes)
    return [*parts, *(Line(f"note, {n} x: {note}", "note") for note, n in notes.items())]


def _figures(match: Match) -> tuple[str, str, str]:
    """Return microseconds of one call, of the smaller calls that compute it, and dense."""
    found = match.info.get("predicted")
    if found is None:
        return ("-", "-", "-")
    ways = (found["fused"], found["separate"], found["dense"])
    return tuple("-" if us is None else f"{us:,.1f}" for us in ways)  # type: ignore[return-value]


def _prices(matches: list[Match]) -> list[str]:
    """Return what the figures mean, and from how many tokens chains near break-even pay."""
    priced = [m for m in matches if "predicted" in m.info]
    if not priced:
        return []
    targets = {m.info["predicted"]["target"] for m in priced}
    how = {
        f"{one['source']}, error {100 * one['error']:.0f} %"
        for one in (m.info["predicted"] for m in priced)
    }
    lines = [
        f"us, smaller, dense: predicted microseconds on {', '.join(sorted(targets))} "
        f"({', '.join(sorted(how))}) of one call, of the smaller calls that compute it, and of "
        "the fastest dense way"
    ]
    slower = {text: None for m in priced if (text := slower_than_dense(m))}
    return [*lines, *slower]


def slower_than_dense(match: Match) -> str:
    """Return the note on a match that dense weights are predicted to beat; "" for any other."""
    found = match.info.get("predicted")
    if found is None or found["dense"] is None or found["dense"] >= found["fused"]:
        return ""
    what = str(match).replace(f" at {match.name}", "")
    near = not_told(found["dense"] / found["fused"], found["error"], "dense")
    return (
        f"{near}{what}: predicted {found['fused']:,.1f} us, dense {found['dense']:,.1f} "
        f"({found['source']}); use a smaller rank or keep the layer dense"
    )


def _layouts(result: RewriteResult) -> list[Part]:
    """Return where transposes are left and their cost, in elements moved per token."""
    calls = [m.info for m in result.rewritten if "x_layout" in m.info]
    rows = [info for info in calls if info["x_layout"] == "row"]
    turned = [choice for choice in result.layouts if choice.layout == "col"]
    left = [c for c in result.layouts if min(c.row_cost, c.col_cost) > 0]
    lines = []
    if turned:
        through = sum(choice.through for choice in turned)
        more = f", {through} pointwise operations between them turned with it" if through else ""
        count = f"{len(turned)} result{'s' * (len(turned) > 1)}"
        lines.append(f"{count} passed [features, tokens] from kernel to kernel{more}")
    if rows:
        elements = sum(int(info["k"]) for info in rows)
        lines.append(
            f"{len(rows)} of {counted(len(calls), 'call')}: x is read [tokens, features] and "
            f"transposed by the load, {elements:,} elements per token"
        )
    for choice in left[:_SHOWN]:
        lines.append(
            f"{choice.node} stays {choice.layout}: row costs {choice.row_cost:,} elements moved "
            f"per token, col {choice.col_cost:,}"
        )
    if len(left) > _SHOWN:
        lines.append(f"and {len(left) - _SHOWN} more such results (result.layouts)")
    return [Section("layouts", tuple(map(Line, lines)))] if lines else []


def _declined(declined: list[Declined]) -> list[Part]:
    """Return each reason once, with its nodes and what would have to change."""
    groups: dict[tuple[str, str, str], list[Declined]] = {}
    for one in reversed(declined):  # rules search from the end of the graph
        groups.setdefault((one.rule, _without_names(one.reason), one.remedy), []).append(one)
    lines = []
    for (rule, _, remedy), found in groups.items():
        count = f"{len(found)} x " if len(found) > 1 else ""
        modules = _places(one.module for one in found if one.module)
        where = f"at {_places(one.at for one in found)}" + (f" in {modules}" if modules else "")
        where += f" ({found[0].source})" if found[0].source else ""
        helps = f"no remedy: {remedy[9:]}" if remedy[:9] == "nothing: " else f"would help: {remedy}"
        lines += [
            Line(f"{count}{rule}: {found[0].reason}", indent=2, hang=2),
            Line(where, indent=6, hang=3),
            Line(helps, indent=6, hang=3),
        ]
    return [Section("left alone", tuple(lines))] if lines else []


def _without_names(reason: str) -> str:
    """Return a reason without the numbers of nodes and layers, so that equal ones meet."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", re.sub(r"(\w)_\d+\b", r"\1", reason))


def _gain(matches: list[Match]) -> list[Part]:
    said = calls_bring(m.info["predicted"] for m in matches if "predicted" in m.info)
    return [Line(said, "headline")] if said else []


def _opportunities(found: list[Opportunity], target: str) -> list[Part]:
    groups = _group(
        ((o.k, o.n, o.r, o.break_even, o.saved_bytes, o.saved_flops_per_token), o.module or o.node)
        for o in found
    )
    if not groups:
        return []
    rows = [
        (len(at), k, n, r, even, f"{saved * len(at) / 2**20:.2f}", f"{flops * len(at) / 1e6:.3f}",
         _places(at))
        for (k, n, r, even, saved, flops), at in groups.items()
    ]  # fmt: skip
    head = ("dense", "k", "n", "rank", "break-even", "MiB saved", "MFLOP/token")
    total = sum(o.saved_bytes for o in found) / 2**20
    kept = f"keeping 80 % of these weights' parameters saves {total:.2f} MiB per pass"
    said = could_bring(found, target)
    return [
        Grid.of((*head, "could be factorized"), rows),
        Line(kept),
        *([Line(said, "headline")] if said else []),
    ]
