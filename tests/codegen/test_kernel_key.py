"""The key of a kernel: every field that can change its source changes the key, and is named."""

import dataclasses

import pytest
from kernels.judge import spec_of

import nmm_compiler
from nmm_compiler.codegen.build import kernel_key
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.nki_api.api import API_VERSION
from nmm_compiler.options import INSTRUCTION_BUDGET
from nmm_compiler.targets import get, names

SPECS = [
    spec_of(line)
    for line in (
        "lowrank m=256 k=256 r=128 n=512",
        "lowrank_shared m=256 k=256 pairs=128:256 pairs=64:256",
        "matmul m=256 k=256 n=512",
        "gated_mlp_up m=256 k=256 r=128 n=512",
        "gated_mlp m=256 k=256 r=128 n=512",
        "attention m=256 context=512 heads=4",
        "adapters m=256 k=256 r=16 n=512 groups=4",
        "experts m=8 k=256 n=512 groups=4",
        "linear m=8 k=256 n=512 rank=16",
        "linear_mlp m=8 k=256 n=512",
    )
]
# Another value for each kind of field; what a spec refuses is no other kernel.
OTHERS = ["col", "silu", "relu", "float32", "float16", "float8_e4m3", "channel", "tensor", True]
OTHERS += ["rms", "layer", 2.5, 384, ((64, (256,)),), ("row", "col")]


def variants(spec):
    """Yield (field, legal spec with another value in that field alone)."""
    for field in dataclasses.fields(spec):
        # what a norm has says something where there is a norm
        normed = {"inner_norm": True} if field.name == "inner_eps" else {}
        if field.name.startswith("norm_"):
            normed = {"norm": "rms"}
        if field.name == "norm_offset":
            normed |= {"norm_gain": True}
        for value in OTHERS:
            now = getattr(spec, field.name)
            if type(value) is type(now) and value != now:
                try:
                    yield field.name, dataclasses.replace(spec, **{field.name: value}, **normed)
                except NmmError:
                    continue


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_every_field_of_a_spec_reaches_the_key(spec):
    target, seen = get("trn2"), {}
    key = kernel_key(spec, target, None)
    for field, other in variants(spec):
        changed = kernel_key(other, target, None)
        assert key.diff(changed) == ("spec",), field
        seen.setdefault(changed.digest, (field, other))
        assert seen[changed.digest][1] == other
    own = {"attention": {"heads", "context"}, "experts": {"k", "weight_layout", "limit"}}
    some = own.get(spec.family, {"k", "x_layout"})
    assert {"m", "dtype", *some} <= {field for field, _ in seen.values()}


def test_families_with_the_same_fields_have_keys_of_their_own():
    target = get("trn2")
    up, whole = (kernel_key(spec, target, None) for spec in SPECS[3:5])
    assert "family" in up.diff(whole)
    assert {spec.family for spec in SPECS} == set(FAMILIES)


def test_targets_schedules_and_budgets_reach_the_key():
    spec, trn2 = SPECS[0], get("trn2")
    schedule = next(iter(FAMILIES[spec.family].schedules(spec, trn2)))
    other = dataclasses.replace(schedule, m_block=2 * schedule.m_block)
    keys = [kernel_key(spec, get(name), None) for name in names()]
    keys += [kernel_key(spec, trn2, given) for given in (schedule, other)]
    keys += [kernel_key(spec, trn2, None, INSTRUCTION_BUDGET + 1)]
    assert len({key.digest for key in keys}) == len(keys) == len(names()) + 3
    assert keys[-2].diff(keys[-3]) == ("schedule",)
    assert kernel_key(spec, trn2, None).diff(keys[-2]) == ("schedule",)
    assert keys[names().index("trn2")].diff(keys[names().index("trn3")]) == ("target",)
    assert kernel_key(spec, trn2, None).diff(keys[-1]) == ("instruction_budget",)
    entries = dict(keys[0].entries)
    assert {"code", "python"} <= set(entries)
    assert (entries["nki"], entries["version"]) == (API_VERSION, nmm_compiler.__version__)
