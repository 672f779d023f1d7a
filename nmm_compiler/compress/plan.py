"""Which rank every matrix gets, from a config and what calibration collected.

`make_plan` is the only caller of the allocators in `ranks.py`. A `Plan` is a record, so that an
interrupted run can read it again (`journal.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from nmm_compiler.compress import ranks as allocation
from nmm_compiler.compress.calibrate import Statistics
from nmm_compiler.compress.choose_ranks import (
    all_slower,
    found_slower,
    global_ranks,
    uniform_ranks,
)
from nmm_compiler.compress.config import CompressionConfig
from nmm_compiler.compress.factorize import spectrum
from nmm_compiler.compress.moments import Moments, regularize
from nmm_compiler.compress.predicted_time import Prices
from nmm_compiler.compress.progress import Steps
from nmm_compiler.compress.report import Timed
from nmm_compiler.compress.select import Site, matches
from nmm_compiler.errors import CalibrationError, OptionTypeError, RankError, closest
from nmm_compiler.records import Record


@dataclass(frozen=True, kw_only=True)
class Decision(Record):
    """The rank of one matrix [n, k], None for dense, and a remark for the report.

    counted: whether the ratio is over this matrix, too; not where it has to stay dense.
    dense_us, us: its share of its call's predicted time, before and after. slower: whether its
    call would be faster with it dense.
    """

    name: str
    k: int
    n: int
    rank: int | None
    note: str = ""
    counted: bool = True
    dense_us: float | None = None
    us: float | None = None
    slower: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """All decisions, and how they were reached ("auto" resolved).

    workload: predicted times of all decided layers, before and after. priced: how, in words.
    only_read: layers that the model reads and never calls; there is no decision for them.
    """

    method: str
    allocation: str
    align: int
    decisions: tuple[Decision, ...]
    workload: tuple[Timed, ...] = ()
    priced: str = ""
    calibration_tokens: int = 0
    only_read: tuple[str, ...] = ()


@dataclass
class Measured:
    """What the plan needs of the statistics, collected part by part of the model.

    losses: per layer, the loss of keeping rank 0, 1, 2, ... in a unit common to all; empty where
    ranks are not allocated globally. unused: layers that the output does not depend on.
    """

    losses: dict[str, list[float]] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    tokens: int = 0
    only_read: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ways:
    """A config's "auto" choices, resolved for one call.

    gradients: whether the statistics need them. sensitive: whether global allocation compares
    matrices by them; it does not with sensitivity="output", whatever the statistics hold.
    """

    method: str
    allocation: str
    gradients: bool
    sensitive: bool


def resolve(config: CompressionConfig, calibrated: bool, meta: bool) -> Ways:
    """Return the method and allocation of a config for the given calibration.

    Raises OptionTypeError for a method that needs calibration when there is none, and for
    combinations that contradict each other.
    """
    if config.rank is not None:
        chosen = "explicit"
    elif config.allocation == "auto":
        chosen = "global" if calibrated or config.budget == "latency" else "uniform"
    else:
        chosen = config.allocation
    if config.budget == "latency" and chosen != "global":
        raise OptionTypeError(
            "budget",
            "latency",
            "it with a ratio and allocation='global': uniform ranks have no budget",
        )
    if meta and (calibrated or chosen == "global"):
        raise OptionTypeError(
            "calibration" if calibrated else "allocation",
            "given" if calibrated else chosen,
            "neither calibration nor global allocation for a model on the meta device, which has "
            "shapes and no weights",
        )
    if config.method in ("whitened", "two-sided") and not calibrated:
        raise OptionTypeError(
            "method", config.method, "calibration= with it, or method='svd' without"
        )
    if config.sequential and not calibrated:
        raise OptionTypeError(
            "sequential", True, "calibration= with it: layers are fitted to what it gives them"
        )
    sensitive = calibrated and config.sensitivity == "gradient" and chosen == "global"
    method = config.method
    if method == "auto":
        method = ("two-sided" if sensitive else "whitened") if calibrated else "svd"
    return Ways(method, chosen, sensitive or method == "two-sided", sensitive)


def check_statistics(
    statistics: Statistics, sites: Sequence[Site], config: CompressionConfig, ways: Ways
) -> Statistics:
    """Return statistics collected beforehand, if they fit the sites and the config.

    Raises CalibrationError naming the layers they lack, OptionTypeError with sequential=True.
    """
    if config.sequential:
        raise OptionTypeError(
            "calibration", "statistics", "batches with sequential=True, which runs them again"
        )
    for kind, found in (("inputs", statistics.inputs), ("gradients", statistics.gradients)):
        if kind == "gradients" and not ways.gradients:
            continue
        sizes = {name: moment.size for name, moment in found.items()}
        wanted = {s.name: s.k if kind == "inputs" else s.n for s in sites if s.group == s.name}
        if kind == "gradients" and found:  # some layers do not reach the output, and so have none
            wanted = {name: size for name, size in wanted.items() if name in sizes}
        lacking = [name for name, size in wanted.items() if sizes.get(name) != size]
        if lacking:
            more = f" and {len(lacking) - 12} more" if len(lacking) > 12 else ""
            raise CalibrationError(
                f"the statistics have no {kind} of {', '.join(lacking[:12])}{more}; calibrate "
                "this model, with the same include, exclude and filter_fn"
                + (", and gradients=True" if kind == "gradients" else "")
            )
    return statistics


def moments_of(
    site: Site, method: str, statistics: Statistics | None, config: CompressionConfig
) -> Moments:
    """Return the regularized moments a method weighs a site's error with."""
    if method == "svd" or statistics is None:
        return Moments()
    if site.name not in statistics.inputs or not statistics.inputs[site.name].tokens:
        return Moments()  # an expert that no token reached
    inputs = regularize(statistics.inputs[site.name], config.damping, config.shrinkage)
    gradient = statistics.gradients.get(site.name)
    if method == "whitened" or gradient is None:
        return Moments(inputs)
    return Moments(inputs, regularize(gradient, config.damping, config.shrinkage))


def measure(
    known: Measured,
    sites: Sequence[Site],
    config: CompressionConfig,
    ways: Ways,
    statistics: Statistics | None,
    progress: bool,
) -> None:
    """Add the losses of these sites to `known`; they are a part of the model or all of it.

    A loss is, with sensitivity="gradient", half the expected g^T (dW x) squared, summed over the
    tokens; else the squared relative error of the matrix (weighted by its inputs when there is
    calibration).
    """
    if statistics is not None:
        known.tokens = max(known.tokens, statistics.tokens)
        known.only_read += statistics.only_read
        if ways.gradients:
            used = {s.group for s in sites if s.name in statistics.gradients}
            known.unused |= {s.name for s in sites if s.group not in used}
    if not config.effective_ratio or ways.allocation != "global":
        return
    sites = [site for site in sites if site.name not in known.unused]
    method = "two-sided" if ways.sensitive else "whitened"
    with Steps("measuring spectra", len(sites), progress) as steps:
        for site in sites:
            steps.show(site.name)
            moments = moments_of(site, method, statistics, config).to(site.weight.device)
            if statistics is not None and moments == Moments():  # an expert that no token reached
                known.losses.setdefault(site.group, [0.0] * (min(site.n, site.k) + 1))
                steps.advance()
                continue
            squares = spectrum(site.weight, moments, site.name)
            tail = torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)])
            if moments.gradients is not None:
                assert statistics is not None
                tail *= 0.5 * statistics.inputs[site.name].tokens
            elif tail[0] > 0:
                tail /= tail[0].clone()
            before = known.losses.get(site.group, [0.0] * len(tail))
            known.losses[site.group] = [a + b for a, b in zip(before, tail.tolist(), strict=True)]
            steps.advance()


def make_plan(
    sites: Sequence[Site],
    config: CompressionConfig,
    ways: Ways,
    known: Measured,
    prices: Prices | None,
    allow_slower: bool = False,
) -> Plan:
    """Return the plan. Raises RankError when no legal ranks meet the ratio.

    Layers without gradients stay dense: the output does not depend on them, so the effect of an
    error in them is unknown. So do layers that would be slower low-rank, by `prices`.
    """
    aside = [_aside(s) for s in sites if s.name in known.unused]
    sites = [s for s in sites if s.name not in known.unused]
    shapes = [allocation.Shape(s.name, s.k, s.n) for s in sites]
    ratio = config.effective_ratio
    judge = None if allow_slower else prices
    if ratio is None:
        decisions, align = _explicit(sites, config, judge), config.align or 1
    else:
        align = config.align or allocation.choose_align(shapes, ratio)
        if ways.allocation == "uniform":
            ranks, slow = uniform_ranks(shapes, ratio, align, judge)
        else:
            groups = _groups(sites)
            grouped = [
                allocation.Shape(name, members[0].k, members[0].n, len(members))
                for name, members in groups.items()
            ]
            named = {name: [site.name for site in members] for name, members in groups.items()}
            ranks, slow = global_ranks(
                grouped, named, known.losses, config, align, prices, allow_slower
            )
        decisions = [_decide(s, ranks[s.name], align, slow.get(s.name, "")) for s in shapes]
    chosen = {decision.name: decision.rank for decision in decisions}
    timed = None if prices is None else prices.timed(chosen)
    if prices is not None:
        shares, slower = prices.shares(chosen), prices.slower(chosen)
        decisions = [
            replace(d, dense_us=shares[d.name][0], us=shares[d.name][1], slower=d.name in slower)
            for d in decisions
        ]
    return Plan(
        method=ways.method,
        allocation=ways.allocation,
        align=align,
        decisions=(*decisions, *aside),
        workload=timed or (),
        priced="" if prices is None else prices.note,
        calibration_tokens=known.tokens,
        only_read=known.only_read,
    )


def _groups(sites: Sequence[Site]) -> dict[str, list[Site]]:
    """Return the sites by group: stacked experts together, all others alone."""
    groups: dict[str, list[Site]] = {}
    for site in sites:
        groups.setdefault(site.group, []).append(site)
    return groups


def _decide(shape: allocation.Shape, rank: int | None, align: int, slow: str) -> Decision:
    counted = len(allocation.legal_ranks(shape, align)) > 0 and not slow
    note = slow if counted or slow else f"no multiple of {align} is below break-even"
    return Decision(name=shape.name, k=shape.k, n=shape.n, rank=rank, note=note, counted=counted)


def _aside(site: Site) -> Decision:
    note = "the model's output does not depend on it (see output=): kept dense"
    return Decision(name=site.name, k=site.k, n=site.n, rank=None, note=note, counted=False)


def _explicit(
    sites: Sequence[Site], config: CompressionConfig, prices: Prices | None
) -> list[Decision]:
    """Return the decisions of ranks the user gave; each pattern must match something."""
    given = {"*": config.rank} if isinstance(config.rank, int) else dict(config.rank or {})
    names = [name for site in sites for name in site.names]
    for pattern in given:
        if not any(matches(name, pattern) for name in names):
            raise RankError(
                f"rank pattern {pattern!r} matches none of the {len(sites)} selected layers"
                f"{closest(pattern, names)} (e.g. {', '.join(names[:4])})"
            )
    decisions = []
    for site in sites:
        rank = next(
            (r for p, r in given.items() if any(matches(name, p) for name in site.names)), None
        )
        shape = allocation.Shape(site.name, site.k, site.n)
        note = "no rank given: kept dense"
        if rank is not None:
            rank, note = allocation.check_explicit(shape, rank, config.align)
        decisions.append(Decision(name=site.name, k=site.k, n=site.n, rank=rank, note=note))
    ranks = {d.name: d.rank for d in decisions}
    slow: dict[str, str] = {}
    while found := found_slower(ranks, prices):
        slow |= found
        ranks |= dict.fromkeys(found, None)
    if prices is not None and slow and not any(ranks.values()):
        raise all_slower(len(slow), prices)
    return [
        replace(d, rank=ranks[d.name], note=slow.get(d.name, d.note), counted=d.name not in slow)
        for d in decisions
    ]


def by_reader(
    decisions: Sequence[tuple[int, Decision]], reads: Mapping[str, str]
) -> list[list[tuple[int, Decision]]]:
    """Group (index, decision) by the tensor that the layers read, in the order of execution."""
    order = {name: i for i, name in enumerate(reads)}
    groups: dict[str, list[tuple[int, Decision]]] = {}
    last = len(order)  # experts that no token reached
    for index, decision in sorted(decisions, key=lambda pair: order.get(pair[1].name, last)):
        groups.setdefault(reads.get(decision.name, decision.name), []).append((index, decision))
    return list(groups.values())


def check_dense(plan: Plan, sites: Sequence[Site]) -> None:
    """Raise when some planned layers are low-rank already: their originals are needed."""
    gone = sorted({decision.name for decision in plan.decisions} - {site.name for site in sites})
    if gone:
        raise OptionTypeError(
            "model",
            f"low-rank in {gone[0]} already",
            "the original model, loaded again, to resume with sequential=True: every layer is "
            "fitted to the original's outputs",
        )
