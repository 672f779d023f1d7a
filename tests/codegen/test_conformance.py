"""Every construct of every emitted kernel has an AWS document, or a kernel of AWS, that allows it.

conformance.toml has the rows.
"""

import ast
import dataclasses
import itertools
import random
import re
import tomllib
from pathlib import Path

import pytest
from constructs import of_source, of_trace
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from kernels.specs import SPECS

from nmm_compiler import LowRankSpec, build_kernel
from nmm_compiler.cache.foreign import check_shape
from nmm_compiler.codegen.choose import on_device, refusal
from nmm_compiler.codegen.emitted_file import kernel_source
from nmm_compiler.errors import CapacityError, SpecError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.nki_api.api import VERSIONS
from nmm_compiler.nki_api.lint import lint_source
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.targets import get

HERE = Path(__file__).parent

ROWS = tomllib.loads((HERE / "conformance.toml").read_text(encoding="utf-8"))["row"]
KNOWN = {construct for row in ROWS for construct in row["constructs"]}
GOLDEN = HERE.parent / "golden"
DOCUMENTS = (
    "nki-language-guide", "nki-library d2ad3a5, ", "nki.", "nki-dge", "nki/", "release notes of NKI"
)  # fmt: skip
# A kernel that fails is shown as it was drawn: to shrink it takes minutes.
RANDOM = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate),
}


def drawn(family, data, dtype=None):
    """Return an emitted kernel of any spec and any legal schedule, half of them with a loop.

    A loop over tokens needs two whole blocks, of 512 at least in a family, so those specs have
    more. dtype: that of the spec; None for any.
    """
    specs = SPECS[family].filter(lambda spec: dtype in (None, spec.dtype))
    spec = data.draw(specs, label="spec").on_cores(data.draw(st.sampled_from((1, 2)), label="lnc"))
    targets = [name for name in ("trn2", "trn3") if refusal(spec, get(name)) is None]
    target = get(data.draw(st.sampled_from(targets), label="target"))
    order = random.Random(data.draw(st.integers(0, 10**6), label="order"))
    loops = family != "adapters" and order.random() < 0.5
    if loops and spec.splits_tokens:
        spec = dataclasses.replace(spec, m=spec.m + 1024)
    candidates = list(itertools.islice(FAMILIES[family].schedules(spec, target), 400))
    order.shuffle(candidates)
    legal = (s for s in candidates if _legal(s, spec, target))
    schedule = next(legal)
    if loops:
        some = (on_device(spec, s, target) for s in (schedule, *itertools.islice(legal, 50)))
        schedule = next(filter(None, some), schedule)
    name, source = kernel_source(spec, schedule, target)
    return spec, target, name, source


def _legal(schedule, spec, target):
    try:
        schedule.check(spec, target)
    except (CapacityError, SpecError):
        return False
    return True


def check_kernel(family, data, folder, dtype=None):
    """Every construct has a row; the lint finds what is too young, and nothing else."""
    spec, target, name, source = drawn(family, data, dtype)
    path = folder / "kernel.py"
    path.write_text(source, encoding="utf-8")
    arrays = [ArraySpec(t.shape, t.dtype) for t in spec.inputs()]
    run = simulate(f"{path}:{name}", *arrays, target=target, mode="timing", turns=2, grid=spec.lnc)
    assert not run.warnings, run.warnings
    new = (of_source(source) | of_trace(run.trace.instructions)) - KNOWN
    assert not new, f"{new}: add rows to conformance.toml, with the document that allows them"
    assert not behind_return(source)
    check_versions(source)
    check_shape("kernel.py", source)


def behind_return(source):
    """Return the lines of statements that no run can reach, because a return stands before them."""
    blocks = (
        block
        for node in ast.walk(ast.parse(source))
        for _, block in ast.iter_fields(node)
        if isinstance(block, list)
    )
    ends = (ast.Return, ast.Raise, ast.Break, ast.Continue)
    return [
        after.lineno
        for block in blocks
        for before, after in itertools.pairwise(block)
        if isinstance(before, ends)
    ]


def check_versions(source):
    """No findings from the oldest version that has every name; below it, only those names."""
    views = re.search(r"\.(reshape_dim|permute|broadcast|select)\(", source)
    oldest = "0.6" if "fori_loop" in source else "0.5" if views else "0.3"
    for version in VERSIONS:
        findings = lint_source(source, nki=version)
        if version >= oldest:
            assert findings == ()
            continue
        assert {f.code for f in findings} == {"NKI-E102"}, findings
        named = {re.sub(r"(?:.* )?(\S+) (?:came|since).*", r"\1", f.message) for f in findings}
        young = {"nki.language.fori_loop"} if version == "0.5" else named
        assert named == young, (version, named, oldest)
        if version < "0.5":
            assert any("()" in name for name in named), named  # views came with 0.5


CURRENT = [path for path in sorted(GOLDEN.glob("*.txt")) if "_neuronxcc" not in path.name]


@pytest.mark.parametrize("path", CURRENT, ids=lambda p: p.stem)
def test_the_goldens(path):
    source = path.read_text(encoding="utf-8")
    assert of_source(source) <= KNOWN
    assert not behind_return(source)
    check_versions(source)
    check_shape("kernel.py", source)


def test_a_kernel_that_sums_over_ranks():
    kernel = build_kernel(LowRankSpec(m=6, k=512, r=256, n=384, tp=2, tp_axis="rows"), "trn2")
    arrays = [ArraySpec(one.shape, one.dtype) for one in kernel.spec.inputs()]
    run = simulate(kernel, *arrays, mode="timing", one_of_ranks=2)
    assert of_source(kernel.source) | of_trace(run.trace.instructions) <= KNOWN


@pytest.mark.parametrize("family", list(FAMILIES))
@given(data=st.data())
@settings(max_examples=2, **RANDOM)
def test_random_kernels(tmp_path, family, data):
    check_kernel(family, data, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, dtype) for family in FAMILIES for dtype in FAMILIES[family].spec_class.dtypes],
)
@given(data=st.data())
@settings(max_examples=20, **RANDOM)
def test_many_random_kernels(tmp_path, family, dtype, data):
    """Draws resemble each other, so each dtype has draws of its own."""
    check_kernel(family, data, tmp_path, dtype)


def test_a_statement_behind_a_return_is_found():
    text = "def k(x):\n    if x:\n        return x\n        x = 1\n    return x\n"
    assert behind_return(text) == [4]


def test_every_row_has_a_source_and_every_construct_one_row():
    for row in ROWS:
        assert row["source"].startswith(DOCUMENTS), row
        assert row["says"].endswith("."), row
        assert row["constructs"], row
        for cited, quote in row["quotes"]:
            assert re.match(
                r"(nki|src|release-notes)/[\w./-]+\.(py|rst)([#:][\w.]+)?$|https://", cited
            )
            assert len(quote) > 8, quote
        assert row["quotes"], row
    every = [construct for row in ROWS for construct in row["constructs"]]
    assert len(every) == len(set(every))


def test_a_new_construct_is_found():
    kernel = '@nki.jit\ndef k(x):\n    """Return x."""\n    {}\n    return x\n'
    for line in (
        "nisa.nc_transpose(dst=x, data=x, engine=nisa.engine.vector)",
        "nisa.dma_transpose(dst=x, src=x, axes=(3, 1, 2, 0))",
        "x.rearrange('a b -> b a')",
        "for i in nl.affine_range(4): pass",
        "nl.fori_loop(0, 4, x)",
        "y = [i for i in x]",
        "nisa.tensor_copy(dst=x, src=x, engine=nisa.vector_engine)",
        "y = x[0:4, 1, 2]",
    ):
        assert of_source(kernel.format(line)) - KNOWN, line
    assert not of_source(kernel.format("nisa.dma_copy(dst=x, src=x)")) - KNOWN
