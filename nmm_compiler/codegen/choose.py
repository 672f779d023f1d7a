"""Chooses how a kernel runs: candidates -> legal -> closed-form cost -> simulated -> the least.

`choose` returns the best legal schedules in order; `build_kernel` takes the first. There is no
table of sizes: a family yields candidates, and the target decides which are legal. Of a small
kernel, one size of the best schedule is then changed at a time, as long as that makes it faster.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

from nmm_compiler.codegen.cost import closed_form_us, dma_us
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import CapacityError, SpecError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import KernelSpec, Tensors
from nmm_compiler.kernels.schedule import KernelSchedule
from nmm_compiler.options import INSTRUCTION_BUDGET
from nmm_compiler.targets import Target

# Instructions that a search may time on one core, at about 30 us each.
SIMULATED_INSTRUCTIONS = 36_000
SIMULATED_CANDIDATES = 6
# Small kernels cost little to time, so a search times more of them.
SMALL_INSTRUCTIONS = 36_000
SMALL_CANDIDATES = 24
SHOWN = 12
# Steps from the best candidate: only of kernels so small that several are timed in half a second.
STEPPED_INSTRUCTIONS = 24_000
STEPPED_SCHEDULES = 96
# A step has to gain this share, and less once none does; all of them together have to gain that of
# another schedule. A step that the closed form prices so much higher is not timed.
STEP_GAINS = (0.003, 0.0005)
GAIN_OF_ANOTHER = 0.02
PRICED_HIGHER = 1.25
# A compiler that keeps program order may cost a kernel a twentieth; what it costs more is charged.
IN_ORDER_SHARE = 0.05
# Two cores share an HBM stack. A share of the DMA time is added to a schedule's cost, so that of
# two about equally fast schedules the one with less traffic wins.
TRAFFIC_SHARE = 0.07


@dataclasses.dataclass(frozen=True)
class Choice:
    """One legal schedule: its closed-form cost, and its simulated latency if it was tried.

    in_order_us: the latency if the compiler keeps program order on every engine and queue.
    instructions: of the compiled program, where a loop on the device counts once; counted if it was
        tried, else by the closed form.
    traffic_us is the time of its DMAs, of which a share is charged: see TRAFFIC_SHARE.
    """

    schedule: Any
    cost_us: float
    simulated_us: float | None = None
    in_order_us: float | None = None
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


Timing = Callable[[KernelSpec, Any, Target], tuple[float, int, float]]
"""What `simulated` returns for a schedule."""


@functools.lru_cache(maxsize=1024)
def _choose(spec: KernelSpec, target: Target, budget: int) -> tuple[Choice, ...]:
    return search(spec, target, budget, simulated)


def search(spec: KernelSpec, target: Target, budget: int, timing: Timing) -> tuple[Choice, ...]:
    """Return what `choose` returns, with the schedules timed by `timing`."""
    spec.check(target)
    ranked = list(rank(spec, target, budget))
    tried: list[Choice] = []
    spent = 0
    ranked = _short_first(_varied(ranked))
    for choice in ranked[:SMALL_CANDIDATES]:
        few = len(tried) < SIMULATED_CANDIDATES
        limit = SIMULATED_INSTRUCTIONS if few else SMALL_INSTRUCTIONS
        if tried and spent + choice.instructions > limit:
            break
        spent += choice.instructions
        if len(ranked) > 1 or choice.instructions < STEPPED_INSTRUCTIONS:
            latency, count, in_order = timing(spec, choice.schedule, target)
            choice = dataclasses.replace(
                choice, simulated_us=latency, in_order_us=in_order, instructions=count
            )
        tried.append(choice)
    tried.sort(key=functools.partial(preference, budget=budget))
    if tried[0].simulated_us is not None:
        better = _stepped(spec, target, budget, tried, timing)
        return tuple(better + tried + ranked[len(tried) : SHOWN - len(better)])
    return tuple(tried + ranked[len(tried) : SHOWN])


def _stepped(
    spec: KernelSpec, target: Target, budget: int, tried: list[Choice], timing: Timing
) -> list[Choice]:
    """Return what changing one field at a time of the best schedule leads to; empty if nothing.

    A field that improves is changed on; it ends when no field does, or enough were timed. Steps may
    lead through schedules that program order costs more than it may cost a kernel.
    """
    first = tried[0]
    if not isinstance(first.schedule, KernelSchedule):
        return []
    best = found = first
    timed: dict[Any, Choice | None] = {choice.schedule: None for choice in tried}
    part = spec.share(best.schedule.split)
    room = min(STEPPED_SCHEDULES, STEPPED_INSTRUCTIONS // max(1, best.instructions))
    least, moved = STEP_GAINS[0], room >= STEPPED_SCHEDULES // 6
    while moved:
        moved = False
        for name in best.schedule.fields_to_vary(part):
            for schedule in best.schedule.steps(name, part):
                schedule = schedule.ordered(spec, target)
                if schedule not in timed and room:
                    timed[schedule] = _timed_step(spec, schedule, target, budget, best, timing)
                    room -= timed[schedule] is not None
                choice = timed.get(schedule)
                if choice is not None and _gains(choice, best, least, budget):
                    best, moved = choice, True
                    if _keeps_order(choice) and _gains(choice, found, 0.0, budget):
                        found = choice
        if not moved and least > STEP_GAINS[-1]:
            least, moved = STEP_GAINS[-1], True
    return [found] if _gains(found, first, GAIN_OF_ANOTHER, budget) else []


def _keeps_order(choice: Choice) -> bool:
    return (choice.in_order_us or 0.0) <= (1.0 + IN_ORDER_SHARE) * (choice.simulated_us or 0.0)


def _gains(choice: Choice, other: Choice, share: float, budget: int) -> bool:
    """Return whether a schedule that was timed costs so much less than another."""
    late, least = preference(other, budget)[:2]
    return preference(choice, budget)[:2] < (late, (1.0 - share) * least)


def _timed_step(
    spec: KernelSpec, schedule: Any, target: Target, budget: int, best: Choice, timing: Timing
) -> Choice | None:
    """Return a schedule with its times; None if it is illegal, or too dear to be the best."""
    try:
        schedule.check(spec, target)
    except (CapacityError, SpecError):
        return None
    choice = priced(spec, schedule, target)
    if choice.instructions > budget or choice.cost_us > PRICED_HIGHER * best.cost_us:
        return None
    free, count, kept = timing(spec, schedule, target)
    return dataclasses.replace(choice, simulated_us=free, in_order_us=kept, instructions=count)


def preference(choice: Choice, budget: int) -> tuple[bool, float, float]:
    """Return the order of schedules that were timed: the least is the best."""
    late = choice.instructions > budget
    return late, _charged(_either_order_us(choice), choice), choice.cost_us


@functools.lru_cache(maxsize=1024)
def refusal(spec: KernelSpec, target: Target) -> Exception | None:
    """Return why no candidate is legal, or None if one is, without ranking or timing."""
    nearest: Exception | None = None
    try:
        spec.check(target)
    except SpecError as error:
        return error
    for schedule in FAMILIES[spec.family].schedules(spec, target):
        try:
            schedule.check(spec, target)
        except (CapacityError, SpecError) as error:
            nearest = error
        else:
            return None
    return nearest


def _varied(ranked: list[Choice]) -> list[Choice]:
    """Return the choices with the best of each kind first, since similar schedules add little."""
    best: dict[tuple[Any, ...], Choice] = {}
    for choice in ranked:
        if choice.cost_us <= 1.05 * ranked[0].cost_us:
            best.setdefault((choice.schedule.split, *choice.schedule.kind()), choice)
    # of each way in which cores share the kernel, its best comes before the others
    firsts = {split: kind for kind in reversed(best) for split in kind[:1]}
    order = [*reversed(firsts.values()), *(kind for kind in best if kind not in firsts.values())]
    leaders = [best[kind] for kind in order][: SMALL_CANDIDATES * 2 // 3]
    return leaders + [choice for choice in ranked if choice not in leaders]


def _short_first(ranked: list[Choice]) -> list[Choice]:
    """Return the choices with short programs first, if the first one alone is too long to be timed.

    Such as loops over tokens on the device, which the closed form prices about the same.
    """
    most = 1.05 * ranked[0].cost_us
    if ranked[0].instructions <= SIMULATED_INSTRUCTIONS:
        return ranked
    return sorted(ranked, key=lambda c: c.cost_us > most or c.instructions > SIMULATED_INSTRUCTIONS)


def _either_order_us(choice: Choice) -> float:
    """Return the latency that both orders keep, program order within IN_ORDER_SHARE."""
    free, kept = choice.simulated_us or 0.0, choice.in_order_us or 0.0
    return max(free, kept / (1.0 + IN_ORDER_SHARE))


def _charged(latency_us: float, choice: Choice) -> float:
    return latency_us + TRAFFIC_SHARE * choice.traffic_us


@functools.lru_cache(maxsize=1024)
def rank(spec: KernelSpec, target: Target, budget: int = INSTRUCTION_BUDGET) -> tuple[Choice, ...]:
    """Return the legal candidates by closed-form cost.

    Candidates within the budget of instructions come first, and of these the ones whose loads
    overlap.
    """
    family = FAMILIES[spec.family]
    choices: list[tuple[tuple[bool, bool, float], Choice]] = []
    nearest: tuple[int, Exception] | None = None
    limit = target.sbuf_usable_bytes_per_partition
    seen: set[KernelSchedule] = set()
    for candidate in family.schedules(spec, target):
        part = spec.share(candidate.split)
        schedule = candidate = candidate.ordered(spec, target)
        if schedule in seen:
            continue
        seen.add(schedule)
        try:
            schedule.check(spec, target)
        except (CapacityError, SpecError) as error:
            need = sum(schedule.sbuf_bytes(part).values())
            if nearest is None or need < nearest[0]:
                nearest = need, error
            continue
        choice = priced(spec, schedule, target)
        if choice.instructions > budget:
            looped = on_device(spec, schedule, target)
            if looped is not None:
                if looped in seen:
                    continue
                seen.add(looped)
                choice = priced(spec, looped, target)
        late = choice.instructions > budget
        crowded = choice.schedule.overlapped_bytes(part) > limit
        choices.append(((late, crowded, _charged(choice.cost_us, choice)), choice))
    if not choices:
        assert nearest is not None
        raise CapacityError(f"no schedule fits {target.name}; the nearest: {nearest[1]}")
    choices.sort(key=lambda item: item[0])
    ties = itertools.groupby(choices, key=lambda item: item[0])
    equal = ([choice for _, choice in tie] for _, tie in ties)
    return tuple(c for same in equal for c in (sorted(same, key=_text) if len(same) > 1 else same))


def priced(spec: KernelSpec, schedule: Any, target: Target) -> Choice:
    """Return a schedule with its closed-form cost, not timed."""
    family, dtype = FAMILIES[spec.family], str(getattr(spec, "dtype", "bfloat16"))
    cost = traffic = 0.0
    part = spec.share(schedule.split)
    turns = schedule.loop_turns(part)
    looped = turns != [(1, part)]
    instructions = int(looped)  # the bound of the loop, in a register
    for times, block in turns:
        work = family.work(block, schedule.settled(block) if looped else schedule, target)
        instructions += work.instructions
        cost += times * closed_form_us(work, dtype, target)
        traffic += times * dma_us(work.dmas, target)
    return Choice(schedule, cost, instructions=instructions, traffic_us=traffic)


def _text(choice: Choice) -> str:
    return str(choice.schedule.to_json())


def on_device(spec: KernelSpec, schedule: Any, target: Target) -> Any:
    """Return the schedule with a loop on the device; None if it cannot have one."""
    looped = schedule.in_loop()
    if looped is None:
        return None
    looped = looped.ordered(spec, target)
    try:
        looped.check(spec, target)
    except (CapacityError, SpecError):
        return None
    return looped


def simulated(spec: KernelSpec, schedule: Any, target: Target) -> tuple[float, int, float]:
    """Return the latency in the simulator's timing mode, and the instructions of the program.

    The third value is the latency if the compiler keeps program order.

    The template runs as it is, with the compile-time parameters that specialization would write
    into it: the same instructions, without the cost of emitting a file for every candidate.
    """
    from nmm_compiler.simulator.run import ArraySpec, simulate
    from nmm_compiler.simulator.timing.timeline import time_trace

    part = spec.share(schedule.split)
    (turns, _), *rest = schedule.loop_turns(part)
    if turns > 2:
        two = spec.whole_of(part, schedule.so_many_turns(part, 2))
        latency, count, in_order = simulated(two, schedule, target)
        latency, in_order = latency * turns / 2, in_order * turns / 2
        for _, last in rest:
            last = spec.whole_of(part, last)
            more = simulated(last, schedule.without_loop(), target)
            latency, count, in_order = latency + more[0], count + more[1], in_order + more[2]
        return latency, count, in_order
    family = FAMILIES[spec.family]
    parameters = family.arguments(spec, schedule)
    arrays: dict[str, Any] = {t.name: ArraySpec(t.shape, t.dtype) for t in spec.inputs()}
    for name, value in parameters.items():
        if isinstance(value, Tensors):
            parameters[name] = tuple(arrays.pop(one) for one in value)
    where = f"{family.path}:{family.folder}"
    parameters |= {"one_of_ranks": spec.world_size}
    run = simulate(where, target=target, mode="timing", grid=spec.lnc, **parameters | arrays)
    assert run.profile is not None
    in_order = time_trace(run.trace, target, reorder=False).latency_us
    return float(run.profile.latency_us), run.profile.program_instructions, float(in_order)
