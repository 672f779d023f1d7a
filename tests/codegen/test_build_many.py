"""Kernels built in several processes are those that one process builds."""

import pytest
from processes import Executor

from nmm_compiler.codegen import build, workers
from nmm_compiler.codegen.build_many import build_many, fill, fill_cache
from nmm_compiler.codegen.tune import tune
from nmm_compiler.kernels.linear.specs import LowRankSpec, MatmulSpec
from nmm_compiler.options import Options

SPECS = [LowRankSpec(m=8, k=16, r=4, n=16), LowRankSpec(m=8, k=16, r=4, n=32),
         MatmulSpec(m=8, k=16, n=16)]  # fmt: skip


def test_two_processes(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    apart, alone = (Options(cache=str(tmp_path / name)) for name in ("apart", "alone"))
    assert fill_cache([*SPECS, SPECS[0]], options=apart, jobs=2) == 3
    assert fill_cache(SPECS, options=apart, jobs=2) == 0  # nothing is missing now
    with monkeypatch.context() as patch:
        patch.setattr(build, "choose", None)  # they come from the cache
        made = build_many(SPECS, options=apart, jobs=2)
    assert [kernel.spec for kernel in made] == SPECS
    build._KERNELS.clear()
    want = [build.build_kernel(spec, options=alone) for spec in SPECS]
    assert [kernel.source for kernel in made] == [kernel.source for kernel in want]


def test_a_worker_that_ends_leaves_its_kernels_to_the_caller(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    options = Options(cache=str(tmp_path / "cache"))
    monkeypatch.setattr(workers, "_PROGRAM", "raise SystemExit(3)")
    assert fill_cache(SPECS[:2], options=options, jobs=2) == 0
    assert [k.spec for k in build_many(SPECS[:2], options=options, jobs=2)] == SPECS[:2]


def test_without_a_cache_nothing_is_started():
    assert fill_cache(SPECS, options=Options(cache="off"), jobs=2) == 0


def test_an_interrupt_says_what_is_done(tmp_path):
    tmp_path.chmod(0o700)
    options = Options(cache=str(tmp_path / "cache"))

    def after_one(said, done, whole):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as ended:
        fill([(spec, "trn2") for spec in SPECS], options=options, executor=Executor(),
             progress=after_one)  # fmt: skip
    assert ended.value.__notes__ == ["1 of 3 kernels done; the same call goes on there"]
    with pytest.raises(KeyboardInterrupt) as ended:
        tune(SPECS[:2], options=options, executor=Executor(), progress=after_one)
    assert ended.value.__notes__ == ["1 of 2 kernels done; the same call goes on there"]
