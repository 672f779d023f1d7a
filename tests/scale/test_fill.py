"""Many kernels in many processes: each built once, whatever is killed meanwhile."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import Executor

from nmm_compiler.cache.store import Store
from nmm_compiler.codegen import build, workers as module
from nmm_compiler.codegen.build_many import build_many, build_one, fill, fill_cache
from nmm_compiler.codegen.tune import tune
from nmm_compiler.codegen.workers import Workers, run
from nmm_compiler.errors import CacheError, WorkerError
from nmm_compiler.kernels.linear.specs import LowRankSpec, MatmulSpec
from nmm_compiler.options import Options

SPECS = [LowRankSpec(m=8, k=16, r=4, n=16 * n) for n in range(1, 7)]
REQUESTS = [(spec, "trn2") for spec in SPECS]
TOO_WIDE = LowRankSpec(m=8, k=16, r=4, n=16, dtype="float8_e4m3", scales="channel")


def raises(text):
    raise ValueError(f"no {text}")


def test_fill_counts_what_was_there_and_what_failed(cache, here):
    steps = []
    twice = [*REQUESTS[:3], REQUESTS[0]]
    first = fill(twice, executor=here, progress=lambda *step: steps.append(step))
    assert (first.kernels, first.present, first.built, first.failed) == (3, 0, 3, ())
    assert [(done, of) for _, done, of in steps] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert steps[-1][0].startswith("built lowrank")
    again = fill([*REQUESTS[:4], (TOO_WIDE, "trn1")], executor=here)
    assert (again.kernels, again.present, again.built) == (5, 3, 1)
    (failed,) = again.failed
    assert failed.target == "trn1"
    assert "SpecError" in failed.reason
    assert "1 failed" in str(again)


def test_a_read_only_cache_is_refused(cache):
    with pytest.raises(CacheError, match="NMM_CACHE=rw"):
        fill(REQUESTS, options=Options(cache="ro"))


def kill_and_fill(workers, requests, at):
    """Fill with workers, of which one is killed after each number of kernels in `at`."""
    killed = []

    def kill(said, done, of):
        if done in at and len(killed) < len(at):
            killed.append(next(iter(workers._processes.values())).pid)
            os.kill(killed[-1], signal.SIGKILL)

    filled = fill(requests, executor=workers, progress=kill)
    assert len(killed) == len(at)
    assert filled.failed == ()
    # A worker may die after it has published and before it answers: then nobody builds again.
    assert filled.built + filled.elsewhere == len(requests)
    infos = [info for info in Store.open().entries() if not info.digest.startswith(".")]
    assert [info.state for info in infos] == ["ok"] * len(requests)
    assert fill(requests).present == len(requests)


def test_a_killed_worker_is_replaced_and_nothing_is_lost_or_built_twice(cache):
    """And leaving early ends the one that took its place, with the calls that wait for it."""
    with Workers(1) as workers:
        kill_and_fill(workers, REQUESTS[:2], at=(1,))
        future = workers.submit(build_one, "{}")
        waits = [workers.submit(build_one, "{}") for _ in range(50)]
        with pytest.raises(WorkerError, match="SpecError"):  # what the call raised
            future.result()
        started = time.monotonic()
        workers.shutdown(cancel_futures=True)
        assert time.monotonic() - started < 10
        assert not workers._processes
        assert all(one.done() for one in waits)


def test_a_call_that_kills_every_worker_is_an_error_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(module, "_PROGRAM", "raise SystemExit(3)")
    with Workers(2) as workers:
        answers = dict(run(workers, build_one, ["{}", "{}", "{}"]))
    assert sorted(answers) == [0, 1, 2]
    assert all(isinstance(one, WorkerError) for one in answers.values())
    assert "short of memory" in str(answers[0])


def test_a_call_that_an_executor_loses_is_begun_again():
    calls = []

    def losing(function, text):
        calls.append(text)
        if len(calls) == 1:
            raise ConnectionError("the node has gone")
        return text

    assert dict(run(Executor(losing), build_one, ["a", "b"])) == {0: "a", 1: "b"}
    assert len(calls) == 3


@pytest.mark.long
def test_workers_run_beside_threads_of_the_caller():
    with Workers(2) as workers, ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda _: len(list(run(workers, raises, "ab"))), range(2))
        assert list(found) == [2, 2]


# Kernels built in several processes are those that one process builds.

FEW = [*SPECS[:2], MatmulSpec(m=8, k=16, n=16)]


def test_two_processes(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    apart, alone = (Options(cache=str(tmp_path / name)) for name in ("apart", "alone"))
    assert fill_cache([*FEW, FEW[0]], options=apart, jobs=2) == set(FEW)
    assert fill_cache(FEW, options=apart, jobs=2) == set()  # nothing is missing now
    with monkeypatch.context() as patch:
        patch.setattr(build, "choose", None)  # they come from the cache
        made = build_many(FEW, options=apart, jobs=2)
    assert [kernel.spec for kernel in made] == FEW
    build._KERNELS.clear()
    want = [build.build_kernel(spec, options=alone) for spec in FEW]
    assert [kernel.source for kernel in made] == [kernel.source for kernel in want]


def test_a_worker_that_ends_leaves_its_kernels_to_the_caller(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    options = Options(cache=str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_PROGRAM", "raise SystemExit(3)")
    assert fill_cache(FEW[:2], options=options, jobs=2) == set(FEW[:2])
    assert [k.spec for k in build_many(FEW[:2], options=options, jobs=2)] == FEW[:2]


def test_without_a_cache_nothing_is_started(monkeypatch):
    monkeypatch.setattr("nmm_compiler.codegen.build_many.fill", None)
    assert fill_cache(FEW, options=Options(cache="off"), jobs=2) == set(FEW)


def test_an_interrupt_says_what_is_done(tmp_path):
    tmp_path.chmod(0o700)
    options = Options(cache=str(tmp_path / "cache"))

    def after_one(said, done, whole):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as ended:
        fill([(spec, "trn2") for spec in FEW], options=options, executor=Executor(),
             progress=after_one)  # fmt: skip
    assert ended.value.__notes__ == ["1 of 3 kernels done; the same call goes on there"]
    with pytest.raises(KeyboardInterrupt) as ended:
        tune(FEW[:2], options=options, executor=Executor(), progress=after_one)
    assert ended.value.__notes__ == ["1 of 2 kernels done; the same call goes on there"]
