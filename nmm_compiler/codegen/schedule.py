"""Chooses how a kernel runs: candidates -> legal -> closed-form cost -> simulated -> the least.

`choose` returns every legal schedule worth showing, best first; `build_kernel` takes the first.
There is no table of sizes anywhere: a family yields candidates, the target says what fits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from nmm_compiler.codegen.cost import closed_form_us, dma_us
from nmm_compiler.errors import CapacityError, SpecError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import KernelSchedule, KernelSpec, Tensors
from nmm_compiler.targets import Target, get

# Timing mode costs about 30 us an instruction: what a search may spend on one core.
SIMULATED_INSTRUCTIONS = 36_000
SIMULATED_CANDIDATES = 6
# Small kernels cost little to time: more of them are.
SMALL_INSTRUCTIONS = 36_000
SMALL_CANDIDATES = 24
# Fields whose best combinations are tried before near-twins of the best.
_KINDS = ("m_block", "u_block", "v_block", "v_still", "narrow_first")
SHOWN = 12
# Two cores share an HBM stack. A twentieth of the DMA time is charged to a schedule, so that of two
# that are about equally fast the one with less traffic wins.
TRAFFIC_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class Choice:
    """One legal schedule: its closed-form cost, and its simulated latency if it was tried.

    traffic_us is the time of its DMAs, of which a share is charged: see TRAFFIC_SHARE.
    """

    schedule: Any
    cost_us: float
    simulated_us: float | None = None
    instructions: int = 0
    traffic_us: float = 0.0


def choose(spec: KernelSpec, target: str | Target = "trn2") -> tuple[Choice, ...]:
    """Return legal schedules for `spec`, best first.

    Raises CapacityError, with the numbers of the nearest miss, when no candidate is legal.
    """
    return _choose(spec, get(target))


@functools.lru_cache(maxsize=1024)
def _choose(spec: KernelSpec, target: Target) -> tuple[Choice, ...]:
    spec.check(target)
    ranked = list(rank(spec, target))
    tried: list[Choice] = []
    spent = 0
    ranked = _varied(ranked)
    for choice in ranked[:SMALL_CANDIDATES]:
        few = len(tried) < SIMULATED_CANDIDATES
        limit = SIMULATED_INSTRUCTIONS if few else SMALL_INSTRUCTIONS
        if tried and spent + choice.instructions > limit:
            break
        spent += choice.instructions
        simulated = simulated_us(spec, choice.schedule, target) if len(ranked) > 1 else None
        tried.append(dataclasses.replace(choice, simulated_us=simulated))
    tried.sort(key=lambda choice: (_charged(choice.simulated_us or 0.0, choice), choice.cost_us))
    return tuple(tried + ranked[len(tried) : SHOWN])


@functools.lru_cache(maxsize=1024)
def refusal(spec: KernelSpec, target: Target) -> Exception | None:
    """Return why no candidate is legal, or None as soon as one is: nothing is ranked or timed."""
    nearest: Exception | None = None
    try:
        spec.check(target)
    except SpecError as error:
        return error
    for schedule in FAMILIES[spec.family].candidates(spec, target):
        try:
            schedule.check(spec, target)
        except (CapacityError, SpecError) as error:
            nearest = error
        else:
            return None
    return nearest


def _varied(ranked: list[Choice]) -> list[Choice]:
    """Return the choices with the best of each kind first: near-twins add little."""
    best: dict[tuple[Any, ...], Choice] = {}
    for choice in ranked:
        kind = tuple(getattr(choice.schedule, name, None) for name in _KINDS)
        if choice.cost_us <= 1.05 * ranked[0].cost_us:
            best.setdefault(kind, choice)
    leaders = list(best.values())[: SMALL_CANDIDATES * 2 // 3]
    return leaders + [choice for choice in ranked if choice not in leaders]


def _charged(latency_us: float, choice: Choice) -> float:
    return latency_us + TRAFFIC_SHARE * choice.traffic_us


@functools.lru_cache(maxsize=1024)
def rank(spec: KernelSpec, target: Target) -> tuple[Choice, ...]:
    """Return the legal candidates by closed-form cost, the ones whose loads overlap first."""
    family = FAMILIES[spec.family]
    choices: list[tuple[bool, float, str, Choice]] = []
    nearest: tuple[int, Exception] | None = None
    dtype = str(getattr(spec, "dtype", "bfloat16"))
    limit = target.sbuf_usable_bytes_per_partition
    seen: set[KernelSchedule] = set()
    for schedule in family.candidates(spec, target):
        if schedule in seen:
            continue
        seen.add(schedule)
        try:
            schedule.check(spec, target)
        except (CapacityError, SpecError) as error:
            need = sum(schedule.sbuf_bytes(spec).values())
            if nearest is None or need < nearest[0]:
                nearest = need, error
            continue
        work = family.work(spec, schedule, target)
        cost = closed_form_us(work, dtype, target)
        crowded = schedule.overlapped_bytes(spec) > limit
        choice = Choice(schedule, cost, None, work.instructions, dma_us(work.dmas, target))
        choices.append((crowded, _charged(cost, choice), schedule.to_json(), choice))
    if not choices:
        assert nearest is not None
        raise CapacityError(f"no schedule fits {target.name}; the nearest: {nearest[1]}")
    choices.sort(key=lambda item: item[:3])
    return tuple(choice for *_, choice in choices)


def simulated_us(spec: KernelSpec, schedule: Any, target: Target) -> float:
    """Return the latency in the simulator's timing mode.

    The template runs as it is, with the compile-time parameters that specialization would write
    into it: the same instructions, without the cost of emitting a file for every candidate.
    """
    from nmm_compiler.simulator.run import ArraySpec, simulate

    family = FAMILIES[spec.family]
    parameters = family.parameters(spec, schedule, target)
    arrays: dict[str, Any] = {t.name: ArraySpec(t.shape, t.dtype) for t in spec.inputs()}
    for name, value in parameters.items():
        if isinstance(value, Tensors):
            parameters[name] = tuple(arrays.pop(one) for one in value)
    where = f"{family.path}:{family.template}"
    run = simulate(where, target=target.name, mode="timing", **parameters | arrays)
    assert run.profile is not None
    return float(run.profile.latency_us)
