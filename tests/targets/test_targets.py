"""Targets: every number sourced, sums agree with the documented totals."""

import dataclasses
from pathlib import Path

import pytest

from nmm_compiler import targets
from nmm_compiler.errors import UnknownNameError
from nmm_compiler.nki_api.api import api
from nmm_compiler.simulator.isa.names import INSTRUCTIONS
from nmm_compiler.targets.base import Known, Source, Target

ALL = [targets.get(name) for name in targets.names()]
numbers = [
    field.name
    for field in dataclasses.fields(Target)
    if field.name not in ("name", "generation", "summary", "instances", "sources")
]


@pytest.mark.parametrize("target", ALL, ids=str)
def test_every_number_has_one_source(target):
    assert set(target.sources) == set(numbers)
    for name, source in target.sources.items():
        assert isinstance(source, Source), name
        assert source.kind in ("documented", "measured", "assumed"), name
        assert len(source.where) > 5, name


@pytest.mark.parametrize("target", ALL, ids=str)
def test_a_number_without_a_source_is_refused(target):
    fewer = {k: v for k, v in target.sources.items() if k != "tensor_clock_hz"}
    with pytest.raises(ValueError, match="tensor_clock_hz"):
        dataclasses.replace(target, sources=fewer)


@pytest.mark.parametrize(
    ("name", "sbuf_mib", "bf16_tflops", "fp32_tflops", "dma_gb_per_second"),
    [("trn1", 24, 91.75, 23, 272), ("trn2", 28, 78.6, 20, 368), ("trn3", 32, 78.6, 20, 528)],
)
def test_sums_agree_with_documented_totals(
    name, sbuf_mib, bf16_tflops, fp32_tflops, dma_gb_per_second
):
    target = targets.get(name)
    assert target.partitions * target.sbuf_bytes_per_partition == sbuf_mib << 20
    assert target.psum_banks * target.psum_bank_bytes_per_partition * target.partitions == 2 << 20
    assert target.peak_flops_per_second() / 1e12 == pytest.approx(bf16_tflops, rel=0.005)
    assert target.peak_flops_per_second("float32") / 1e12 == pytest.approx(fp32_tflops, rel=0.03)
    by_dma = target.dma_engines * target.dma_bytes_per_second_per_engine
    assert by_dma / 1e9 == pytest.approx(dma_gb_per_second)


def test_fp8_doubles_where_double_row_exists():
    rates = {t.name: t.peak_flops_per_second("float8_e4m3") for t in ALL}
    assert rates["trn2"] == 2 * targets.get("trn2").peak_flops_per_second()
    assert rates["trn1"] == targets.get("trn1").peak_flops_per_second()


@pytest.mark.parametrize("target", ALL, ids=str)
def test_values_are_sane(target):
    values = {name: getattr(target, name) for name in numbers}
    for ranks, size, us in values.pop("collective_points"):
        assert ranks > 1
        assert size > 0
        assert us > 0
    instructions = {name.removeprefix("nki.isa.") for name in api().functions}
    assert set(values.pop("absent_instructions")) <= instructions
    simulator = Path(targets.__file__).parents[1] / "simulator"
    code = "".join(path.read_text() for path in simulator.rglob("*.py"))
    for form in values.pop("absent_forms"):
        op, by_engine, chosen = form.partition("(engine=")
        known = INSTRUCTIONS[op].engines if by_engine else code
        assert (chosen.rstrip(")") or f'"{form}"') in known, form
    for name, value in values.items():
        assert value >= 0, name
        assert 0 < value <= 1 or not name.endswith("_fraction"), name
        assert value < 1e-3 or not name.endswith("_seconds"), name
    assert target.sbuf_usable_bytes_per_partition < target.sbuf_bytes_per_partition
    assert target.engine_streaming_overhead_cycles <= target.engine_isolated_overhead_cycles


def test_get_by_name_and_closest_name():
    assert targets.get("trn2") is targets.get(targets.get("trn2"))
    with pytest.raises(UnknownNameError, match="trn2"):
        targets.get("trn22")


def test_a_variant_carries_over_what_holds_and_says_what_it_assumes():
    trn2, trn3 = targets.get("trn2"), targets.get("trn3")
    assert trn3.tensor_min_interval_cycles == trn2.tensor_min_interval_cycles
    assert trn3.sources["tensor_min_interval_cycles"].kind == "documented"
    assert trn2.sources["semaphore_seconds"].kind == "measured"
    assert trn3.sources["semaphore_seconds"] == Source("assumed", "as trn2")
    assert trn3.hbm_bytes_per_second > trn2.hbm_bytes_per_second
    with pytest.raises(TypeError, match="hbm_bytes_per_minute"):
        trn2.variant(
            "trn4", generation="gen5", summary="", instances=(),
            hbm_bytes_per_minute=Known(1.0, trn2.sources["hbm_bytes_per_second"]),
        )  # fmt: skip


def test_every_instruction_exists_on_some_target():
    absent = [set(target.absent_instructions) for target in ALL]
    assert not set.intersection(*absent)
    assert targets.oldest_with(lambda t: "range_select" not in t.absent_instructions) == "trn2"
    assert targets.oldest_with(lambda t: "activate2" not in t.absent_instructions) == "trn3"
