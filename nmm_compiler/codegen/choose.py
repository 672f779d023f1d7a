"""Chooses how a kernel runs: candidates -> legal -> closed-form cost -> six simulated -> the least.

`choose` returns the best legal schedules in order; `build_kernel` takes the first. There is no
table of sizes: a family yields candidates, and the target decides which are legal.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nmm_compiler.codegen.cost import closed_form_us, dma_us
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import CapacityError, SpecError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.options import INSTRUCTION_BUDGET
from nmm_compiler.records import Record
from nmm_compiler.report.parts import Grid
from nmm_compiler.targets import Target

SIMULATED_CANDIDATES = 6
# Instructions of one core's programs that are simulated for a choice, after the first candidate.
SIMULATED_INSTRUCTIONS = 30_000
# Instructions that neuronx-cc compiles ("over the threshold (5000000)", issue 987 of the Neuron
# SDK), and bytes of a chip of trn3, the largest.
LARGEST = 5_000_000, 144 << 30
# Over the least closed-form cost: of a kind of schedules whose best is simulated, too.
KIND_SHARE = 1.1
SHOWN = 12
# A compiler that keeps program order may cost a kernel a twentieth; what it costs more is charged.
IN_ORDER_SHARE = 0.05
# Two cores share an HBM stack. A share of the DMA time is added to a schedule's cost, so that of
# two about equally fast schedules the one with less traffic wins.
TRAFFIC_SHARE = 0.07


@dataclasses.dataclass(frozen=True)
class Choice(Record):
    """One legal schedule: its closed-form cost, and its simulated latency if it was tried.

    in_order_us: the latency if the compiler keeps program order on every engine and queue; 0 of a
        schedule that is slower than another even if the compiler does not.
    instructions: of the compiled program, where a loop on the device counts once; counted if it was
        tried, else by the closed form.
    traffic_us is the time of its DMAs, of which a share is charged: see TRAFFIC_SHARE.
    """

    schedule: Any
    cost_us: float
    simulated_us: float | None = None
    in_order_us: float = 0.0
    instructions: int = 0
    traffic_us: float = 0.0


def choose(
    spec: KernelSpec, target: str | Target = "trn2", budget: int = INSTRUCTION_BUDGET
) -> tuple[Choice, ...]:
    """Return legal schedules for `spec`, best first.

    budget: instructions of the compiled kernel. Larger kernels loop over blocks of tokens on the
    device; where that is impossible, the kernel keeps its size.
    Raises CapacityError, with the numbers of the nearest miss, when no candidate is legal.
    """
    return _choose(spec, machine_target(target), budget)


def schedule_table(choices: Sequence[Choice]) -> Grid:
    """Return the schedules that were tried: the chosen one whole, of the others what differs."""
    rows = []
    chosen = choices[0].schedule if choices else None
    for i, choice in enumerate(choices):
        differs = [
            f"{name}={value}"
            for name, value in vars(choice.schedule).items()
            if getattr(chosen, name) != value
        ]
        simulated = "-" if choice.simulated_us is None else f"{choice.simulated_us:.1f}"
        rows.append((
            str(i), simulated, f"{choice.cost_us:.1f}", f"{choice.instructions:,}",
            str(choice.schedule) if i == 0 else ", ".join(differs),
        ))  # fmt: skip
    head = ("rank", "us", "closed form us", "instr", "differs from rank 0 in")
    return Grid.of(head, rows, right=head[:-1])


Timing = Callable[[KernelSpec, Any, Target, float], tuple[float, int, float]]
"""What `simulated` returns for a schedule that is compared with a time."""


@functools.lru_cache(maxsize=1024)
def _choose(spec: KernelSpec, target: Target, budget: int) -> tuple[Choice, ...]:
    return search(spec, target, budget, simulated)


def search(spec: KernelSpec, target: Target, budget: int, timing: Timing) -> tuple[Choice, ...]:
    """Return what `choose` returns, with the schedules timed by `timing`."""
    ranked = list(rank(spec, target, budget))
    needs = ranked[0].instructions, sum(one.bytes for one in spec.inputs())
    if needs[0] > LARGEST[0] or needs[1] > LARGEST[1]:
        raise CapacityError(
            f"{spec.short()}: the kernel would have {needs[0]:,} instructions and read "
            f"{needs[1]:,} bytes; neuronx-cc compiles at most {LARGEST[0]:,}, and a chip holds "
            f"{LARGEST[1]:,} bytes; split the layer"
        )
    tried: dict[Any, Choice] = {}
    spent = 0
    for choice in _to_try(ranked):
        if tried and spent + choice.instructions > SIMULATED_INSTRUCTIONS:
            break
        spent += choice.instructions
        least_us = min(
            (preference(one, budget)[1] for one in tried.values() if one.instructions <= budget),
            default=math.inf,
        )
        times = timing(spec, choice.schedule, target, least_us - _charged(0.0, choice))
        tried[choice.schedule] = timed(choice, times)
    left = [choice for choice in ranked if choice.schedule not in tried]
    best = sorted(tried.values(), key=functools.partial(preference, budget=budget))
    return (*best, *left[: SHOWN - len(best)])


def timed(choice: Choice, times: tuple[float, int, float]) -> Choice:
    """Return a candidate with what `simulated` says of it."""
    latency, count, in_order = times
    return dataclasses.replace(
        choice, simulated_us=latency, in_order_us=in_order, instructions=count
    )


def _to_try(ranked: list[Choice]) -> list[Choice]:
    """Return the candidates to simulate: the best of each kind that is nearly the best of all, or
    is another way to share the kernel; then the best of all."""
    firsts: dict[tuple[Any, ...], Choice] = {}
    splits = set()
    for choice in ranked:
        near = choice.cost_us <= KIND_SHARE * ranked[0].cost_us
        if near or choice.schedule.split not in splits:
            firsts.setdefault(choice.schedule.kind, choice)
        splits.add(choice.schedule.split)
    first = list(firsts.values())
    return (first + [choice for choice in ranked if choice not in first])[:SIMULATED_CANDIDATES]


def preference(choice: Choice, budget: int) -> tuple[bool, float, float]:
    """Return the order of schedules that were timed: the least is the best.

    Both orders of the program count, program order within IN_ORDER_SHARE.
    """
    latency_us = max(choice.simulated_us or 0.0, choice.in_order_us / (1.0 + IN_ORDER_SHARE))
    return choice.instructions > budget, _charged(latency_us, choice), choice.cost_us


@functools.lru_cache(maxsize=1024)
def refusal(spec: KernelSpec, target: Target) -> Exception | None:
    """Return why no candidate is legal, or None if one is, without ranking or timing."""
    try:
        next(_legal(spec, target))
    except (CapacityError, SpecError) as error:
        return error
    return None


def _legal(spec: KernelSpec, target: Target) -> Iterator[Any]:
    """Yield the candidates that are legal; CapacityError, with the nearest miss, if none is."""
    spec.check(target)
    legal, misses = 0, dict[int, Exception]()
    for schedule in FAMILIES[spec.family].schedules(spec, target):
        try:
            schedule.check(spec, target)
        except (CapacityError, SpecError) as error:
            needs = schedule.sbuf_bytes(spec.share(schedule.split)).values()
            misses.setdefault(sum(needs), error)
        else:
            legal += 1
            yield schedule
    if not legal:
        raise CapacityError(f"no schedule fits {target.name}; the nearest: {misses[min(misses)]}")


def _charged(latency_us: float, choice: Choice) -> float:
    return latency_us + TRAFFIC_SHARE * choice.traffic_us


@functools.lru_cache(maxsize=1024)
def rank(spec: KernelSpec, target: Target, budget: int = INSTRUCTION_BUDGET) -> tuple[Choice, ...]:
    """Return the legal candidates by closed-form cost, those within the budget first.

    Of equal ones the order is the family's.
    """
    choices: dict[Any, Choice] = {}
    for schedule in _legal(spec, target):
        choice = priced(spec, schedule, target)
        while choice.instructions > budget:
            looped = on_device(spec, schedule, target)
            if looped is None:
                break
            choice = priced(spec, looped, target)
            if getattr(looped, "m_block", 0) < 256:
                break
            schedule = dataclasses.replace(schedule, m_block=128 * (looped.m_block // 256))
        choices.setdefault(choice.schedule, choice)
    return tuple(
        sorted(
            choices.values(),
            key=lambda one: (one.instructions > budget, _charged(one.cost_us, one)),
        )
    )


def priced(spec: KernelSpec, schedule: Any, target: Target) -> Choice:
    """Return a schedule with its closed-form cost, not timed."""
    family, dtype = FAMILIES[spec.family], str(getattr(spec, "dtype", "bfloat16"))
    cost = traffic = 0.0
    part = spec.share(schedule.split)
    turns = schedule.loop_turns(part)
    instructions = int(turns != [(1, part)])  # the bound of the loop, in a register
    for times, block in turns:
        work = family.work(block, schedule)
        instructions += work.instructions // (schedule.turns(block) or 1)
        cost += times * closed_form_us(work, dtype, target)
        traffic += times * dma_us(work.dmas, target)
    return Choice(schedule, cost, instructions=instructions, traffic_us=traffic)


def on_device(spec: KernelSpec, schedule: Any, target: Target) -> Any:
    """Return the schedule with a loop on the device; None if it cannot have one."""
    looped = schedule.in_loop(spec.share(schedule.split), target)
    try:
        looped.check(spec, target)
    except (CapacityError, SpecError):
        return None
    return looped


def simulated(
    spec: KernelSpec, schedule: Any, target: Target, least_us: float = math.inf
) -> tuple[float, int, float]:
    """Return the latency in the simulator's timing mode, and the instructions of the program.

    The third value is the latency if the compiler keeps program order, or 0 if the first one is
    over `least_us` already: that of a schedule that is better whatever the third one is.

    The template runs as it is, with the compile-time parameters that specialization would write
    into it: the same instructions, without the cost of emitting a file for every candidate.
    """
    from nmm_compiler.simulator.run import ArraySpec, simulate
    from nmm_compiler.simulator.timing.schedule import Timeline, time_trace

    family, turns = FAMILIES[spec.family], schedule.turns(spec.share(schedule.split)) or 1
    arrays: dict[str, Any] = {t.name: ArraySpec(t.shape, t.dtype) for t in spec.inputs()}
    run = simulate(
        f"{family.path}:{family.folder}", target=target, mode="timing", grid=spec.lnc,
        turns=min(turns, 2), one_of_ranks=spec.tp, **family.arguments(spec, schedule), **arrays,
    )  # fmt: skip
    assert run.profile is not None

    def of_all_turns(line: Timeline) -> float:  # turns do not overlap: the others take as long
        if turns <= 2:
            return line.latency_us
        first, stop, *_ = line.trace.turns[-1]
        turn_us = max(line.end[first:stop]) - max(line.end[:first])
        return line.latency_us + (turns - 2) * turn_us

    free = of_all_turns(run.profile.timeline)
    kept = 0.0
    if free <= least_us:
        kept = of_all_turns(time_trace(run.trace, target, reorder=False))
    return free, run.profile.program_instructions, kept
