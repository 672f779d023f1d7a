"""Emitted files follow the newest NKI: plain range, and nothing that any version deprecates."""

import pytest
from test_golden import SPECS

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, LowRankSpec
from nmm_compiler.nki_api.api import VERSIONS
from nmm_compiler.nki_api.lint import lint_source, oldest_version
from nmm_compiler.options import Options

EVERY = [*SPECS.values(), GatedMLPSpec(m=64, k=128, n=128, x_layout="col")]


def check(source):
    oldest = oldest_version(source)
    assert oldest <= "0.6"
    for version in VERSIONS[VERSIONS.index(oldest) :]:
        assert [str(one) for one in lint_source(source, nki=version)] == []
    assert "_range(" not in source


@pytest.mark.parametrize("spec", EVERY, ids=lambda spec: spec.short())
def test_no_version_has_a_remark(spec):
    check(build_kernel(spec).source)


def test_a_loop_on_the_device_is_one_of_the_newest():
    options = Options(instruction_budget=60)
    source = build_kernel(LowRankSpec(m=2048, k=256, r=64, n=256), options=options).source
    assert "fori_loop" in source
    check(source)
