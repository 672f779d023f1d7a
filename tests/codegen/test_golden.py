"""Golden sources of two kernels, small shapes for trn2, read by people when they change.

`pytest tests/codegen/test_golden.py --update-golden` writes them anew. Of the other families,
whose sources are longer than a golden may be, properties are asserted, those of attention in
tests/kernels/test_attention.py.
"""

from pathlib import Path

import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.emitted_file import kernel_source
from nmm_compiler.kernels.linear.schedule import LinearSchedule
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, LowRankSpec, MatmulSpec
from nmm_compiler.nki_api.lint import lint_source
from nmm_compiler.targets import get, names

GOLDEN = Path(__file__).parent.parent / "golden"
SPECS = {
    "lowrank": LowRankSpec(m=64, k=128, r=128, n=512, x_layout="col"),
    "matmul": MatmulSpec(m=64, k=128, n=512, x_layout="col"),
}


@pytest.mark.parametrize("target", names())
def test_a_gated_mlp_in_one_kernel(target):
    """x is loaded once, h stays on chip, and each product is one chain of matmuls."""
    kernel = build_kernel(GatedMLPSpec(m=64, k=128, n=128, x_layout="col"), target)
    assert lint_source(kernel.source) == ()
    assert max(map(len, kernel.source.splitlines())) <= 100
    profile = kernel.profile()
    assert profile.instructions["tensor"] == {"nc_matmul": 3}
    assert sum(profile.instructions["dma"].values()) == 5  # x, three weights, y
    assert profile.hbm_read_bytes == 2 * (128 * 64 + 3 * 128 * 128)


# The second kernel of lowrank is the same in the older dialect, for its hardware.
GOLDENS = [("lowrank", "trn2", ""), ("matmul", "trn2", ""), ("lowrank", "trn1", "_neuronxcc")]


@pytest.mark.parametrize(("family", "target", "dialect"), GOLDENS)
def test_golden(family, target, dialect, request):
    kernel = build_kernel(SPECS[family], target, dialect=dialect.removeprefix("_") or "nki")
    assert lint_source(kernel.source) == ()
    path = GOLDEN / f"{family}_{target}{dialect}.py.txt"
    if request.config.getoption("--update-golden", default=False):
        path.write_text(kernel.source, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == kernel.source, (
        f"{path.name} differs; if that is meant, run pytest with --update-golden and read the diff"
    )


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda p: p.stem)
def test_goldens_stay_small_and_readable(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= 100
    code = lines[next(at for at, line in enumerate(lines) if line.startswith("import ")) :]
    assert sum(bool(line.strip()) for line in code) <= 85


def test_same_input_same_bytes():
    spec, target = SPECS["lowrank"], get("trn2")
    schedule = build_kernel(spec, target).schedule
    first = kernel_source(spec, schedule, target)
    again = kernel_source(
        LowRankSpec.from_json(spec.to_json()), LinearSchedule.from_json(schedule.to_json()), target
    )
    assert first == again
