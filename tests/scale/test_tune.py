"""Tuning: the same choice on any executor, nothing timed twice, and used by `build_kernel`."""

import dataclasses
import json
import warnings
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nmm_compiler.cache.store import Store
from nmm_compiler.cli import cache as cache_command
from nmm_compiler.cli.commands import app
from nmm_compiler.codegen import build, choose, tune, tuned
from nmm_compiler.codegen.build_many import request_text
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.codegen.search_space import Space
from nmm_compiler.codegen.tune import time_schedules
from nmm_compiler.codegen.workers import on_processes
from nmm_compiler.errors import CacheTrustError, UnknownNameError, WorkerError
from nmm_compiler.kernels.linear.specs import LowRankSpec, MatmulSpec
from nmm_compiler.options import LARGEST_BUCKET, Options
from nmm_compiler.prices.kernel import PRICES

SPEC = LowRankSpec(m=8, k=256, r=64, n=512)
SPECS = [SPEC, LowRankSpec(m=16, k=256, r=64, n=512)]


class Serial:
    """An executor that runs each task at once, here, and counts the schedules that it was given.

    most: tasks fail after so many of them. tasks: what it was asked to run, by name.
    """

    def __init__(self, most=None):
        self.timed, self.tasks, self.most = [], [], most

    def submit(self, function, text, /):
        future = Future()
        if self.most is not None and len(self.timed) >= self.most:
            future.set_exception(WorkerError(1, "the power is out"))
            return future
        self.tasks.append(function.__name__)
        told = json.loads(text)
        self.timed += [json.dumps(one, sort_keys=True) for one in told.get("schedules", [])]
        future.set_result(function(text))
        return future


class Fixed:
    """An executor that says what each schedule takes, by its place in the task, and the default."""

    def __init__(self, times, default):
        self.times, self.default = times, default

    def submit(self, function, text, /):
        future = Future()
        told = json.loads(text)
        if "timed" in told:
            future.set_result(json.dumps(tuned.plain_choice(self.default)))
            return future
        if "schedules" not in told:
            future.set_result(function(text))
            return future
        rows = [{"simulated_us": self.times[i], "in_order_us": 0.0, "instructions": 1}
                for i in range(len(told["schedules"]))]  # fmt: skip
        future.set_result(json.dumps(rows))
        return future


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch, cache):
    monkeypatch.setattr(tune, "TASK_SCHEDULES", 3)
    tuned.forget()
    yield
    tuned.forget()


def best_of(spec):
    chip = machine_target("trn2")
    entry = Store.open().get(tuned.tuning_key(spec, chip))
    return json.loads(entry.files[tuned.BEST])["schedule"]


def elsewhere(tmp_path, monkeypatch, name):
    directory = tmp_path / name
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("NMM_CACHE_DIR", str(directory))


def test_every_candidate_is_timed_once_and_asking_again_times_nothing():
    executor = Serial()
    (first,) = tune.tune([SPEC], executor=executor)
    assert executor.tasks == ["time_schedules"] * (len(executor.tasks) - 1) + ["find_default"]
    ranked = choose.rank(SPEC, machine_target("trn2"))
    default = choose.choose(SPEC)[0]
    beyond = default.schedule not in {choice.schedule for choice in ranked}
    assert first.simulated == first.candidates == len(ranked) + beyond > 10
    assert len(set(executor.timed)) == len(executor.timed) == len(ranked)
    assert first.best_us <= first.default_us == default.simulated_us
    (again,) = tune.tune([SPEC], executor=Serial(most=0))  # asks for nothing at all
    assert dataclasses.replace(first, simulated=0) == again


def test_this_process_simulates_nothing(monkeypatch):
    """Else it takes the time that the workers gain: it is one process, and they are many."""
    here = []
    real = choose.simulated

    def seen(*args):
        here.append(running)
        return real(*args)

    class Watches(Serial):
        def submit(self, function, text, /):
            nonlocal running
            running = True
            try:
                return super().submit(function, text)
            finally:
                running = False

    running = False
    monkeypatch.setattr(tune, "simulated", seen)
    monkeypatch.setattr(choose, "simulated", seen)
    tune.tune([SPEC], executor=Watches())
    tune.tune([SPEC], executor=Watches())
    assert here
    assert all(here)


def test_an_entry_without_the_default_asks_a_worker_for_it():
    """One from elsewhere may lack it; what is known is not timed again."""
    (first,) = tune.tune([SPEC], executor=Serial())
    chip = machine_target("trn2")
    files = dict(Store.open().get(tuned.tuning_key(SPEC, chip)).files)
    assert files.pop(tuned.DEFAULT)
    Store.open().prune(0)
    tuned.keep_tuning(SPEC, chip, Options().instruction_budget, Store.open(), files)
    executor = Serial()
    (again,) = tune.tune([SPEC], executor=executor)
    assert executor.tasks == ["find_default"]
    assert again == dataclasses.replace(first, simulated=0)


def test_the_best_is_the_least_of_all_by_the_choosers_order():
    tune.tune([SPEC], executor=Serial())
    chip = machine_target("trn2")
    budget = Options().instruction_budget
    timed = []
    for choice in (*choose.rank(SPEC, chip), choose.choose(SPEC)[0]):
        us, count, in_order = choose.simulated(SPEC, choice.schedule, chip)
        more = {"simulated_us": us, "instructions": count, "in_order_us": in_order}
        timed.append(choose.preference(dataclasses.replace(choice, **more), budget))
    entry = Store.open().get(tuned.tuning_key(SPEC, chip))
    best = tuned.choice_of(json.loads(entry.files[tuned.BEST]), SPEC)
    assert choose.preference(best, budget) == min(timed)


@pytest.mark.long
def test_processes_give_the_choice_of_a_serial_run(tmp_path, monkeypatch):
    serial = tune.tune(SPECS, executor=Serial())
    want = [best_of(spec) for spec in SPECS]
    elsewhere(tmp_path, monkeypatch, "pool")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert tune.tune(SPECS, executor=pool) == serial
    assert [best_of(spec) for spec in SPECS] == want


def test_a_search_that_was_ended_goes_on():
    first = Serial(most=5)
    with pytest.raises(WorkerError):
        tune.tune([SPEC], executor=first)
    (journal,) = Path(Store.open().directory, "tuning").iterdir()
    lines = journal.read_text().splitlines()
    assert 1 <= len(lines) <= len(first.timed)
    journal.write_text(journal.read_text() + lines[0][: len(lines[0]) // 2])  # a kill in a write
    second = Serial()
    (done,) = tune.tune([SPEC], executor=second)
    assert done.simulated == len(second.timed) == done.candidates - len(lines)
    assert second.tasks.count("find_default") == 1
    assert not journal.exists()


def slowest(spec):
    """Put another schedule than the chosen one into the cache as tuned; return it."""
    chip = machine_target("trn2")
    last = choose.rank(spec, chip)[-1]
    key = tuned.tuning_key(spec, chip)
    Store.open().get_or_build(key, lambda: tuned.files_of(last, [last]))
    tuned.forget()
    return last.schedule


def test_build_kernel_takes_the_tuned_schedule_and_verify_holds():
    chosen = build.build_kernel(SPEC)
    schedule = slowest(SPEC)
    assert schedule != chosen.schedule
    kernel = build.build_kernel(SPEC)
    assert kernel.schedule == schedule
    assert kernel.meta["tuning"] == tuned.tuning_key(SPEC, machine_target("trn2")).digest
    assert kernel.source == build.build_kernel(SPEC, schedule=schedule).source
    key = build.asked(SPEC).key
    assert key.to_dict()["schedule"] == schedule.to_dict()
    rows = Store.open().verify(cache_command._rebuild)
    states = sorted(row.state.partition(":")[0] for row in rows)
    assert states == ["same", "same", "skipped"], states  # the tuning is no kernel


def test_a_tuning_of_other_code_or_another_machine_is_not_used(monkeypatch):
    schedule = slowest(SPEC)
    assert build.asked(SPEC).schedule == schedule
    real = tuned.code_fields()
    changed = {**real, "code": {**real["code"], "simulator": "0" * 16}}
    with monkeypatch.context() as patch:
        patch.setattr(tuned, "code_fields", lambda: changed)
        tuned.forget()
        assert build.asked(SPEC).schedule is None
    tuned.forget()
    assert build.asked(SPEC, options=Options(instruction_budget=39_999)).schedule is None
    assert build.asked(SPEC, "trn3").schedule is None
    assert build.asked(SPEC, options=Options(cache="off")).schedule is None


def test_a_tuning_that_is_not_legal_is_left_with_a_warning():
    chip = machine_target("trn2")
    last = choose.rank(SPEC, chip)[-1]
    bad = dataclasses.replace(last, schedule=dataclasses.replace(last.schedule, m_block=7))
    Store.open().get_or_build(tuned.tuning_key(SPEC, chip), lambda: tuned.files_of(bad, [bad]))
    tuned.forget()
    with pytest.warns(UserWarning, match="is not used"):
        kernel = build.build_kernel(SPEC)
    assert kernel.schedule == choose.choose(SPEC)[0].schedule


def test_a_remote_tuning_is_asked_for_only_where_the_kernel_is_missing(tmp_path, monkeypatch):
    remote = tmp_path / "remote"
    remote.mkdir()
    monkeypatch.setenv("NMM_REMOTE_CACHE", f"file://{remote}")
    schedule = slowest(SPEC)
    Store.open().push()
    elsewhere(tmp_path, monkeypatch, "fresh")
    tuned.forget()
    assert build.asked(SPEC).schedule == schedule
    elsewhere(tmp_path, monkeypatch, "has-the-kernel")
    monkeypatch.delenv("NMM_REMOTE_CACHE")
    tuned.forget()
    build.build_kernel(SPEC)
    monkeypatch.setenv("NMM_REMOTE_CACHE", f"file://{remote}")
    tuned.forget()
    assert build.asked(SPEC).schedule is None


def test_a_worker_with_other_code_refuses():
    told = json.loads(build_request())
    told["code"]["kernels"] = "0" * 16
    with pytest.raises(WorkerError, match="another version"):
        time_schedules(json.dumps(told))


def build_request():
    texts = []

    class Keeps:
        def submit(self, function, text, /):
            texts.append(text)
            future = Future()
            future.set_exception(WorkerError(1, "kept"))
            return future

    with pytest.raises(WorkerError, match="kept"):
        tune.tune([SPEC], executor=Keeps())
    return texts[0]


def test_an_unknown_search_is_named():
    with pytest.raises(UnknownNameError, match="candidates"):
        tune.tune([SPEC], search="all")


def test_the_grid_has_every_candidate_and_its_best_is_right(monkeypatch):
    spec = MatmulSpec(m=8, k=64, n=128)
    space = Space(spec, machine_target("trn2"), Options().instruction_budget)
    grid = list(space.grid())
    assert {c.schedule for c in space.candidates} <= {c.schedule for c in grid}
    asked = []

    def refuse_the_first(text):
        asked.append(json.loads(text)["schedule"])
        return json.dumps(len(asked) > 1)

    monkeypatch.setattr(tune, "prove_schedule", refuse_the_first)
    monkeypatch.setattr(Space, "candidates", ())  # none is known to be right
    times = {0: 3.0, 1: 1.0, 2: 2.0}
    default = dataclasses.replace(grid[0], simulated_us=3.0)
    monkeypatch.setattr(Space, "grid", lambda self: iter(grid[:3]))
    (made,) = tune.tune([spec], search="grid", executor=Fixed(times, default))
    assert len(asked) == 2
    assert asked[0] == grid[1].schedule.to_dict()
    assert made.best_us == 2.0
    assert made.candidates == 2  # the wrong one is gone


def test_a_wrong_kernel_is_told_from_a_right_one(monkeypatch):
    told = json.loads(request_text(SPEC, "trn2", Options()))
    told["schedule"] = choose.rank(SPEC, machine_target("trn2"))[0].schedule.to_dict()
    assert tune.prove_schedule(json.dumps(told)) == "true"
    exact = LowRankSpec.reference
    monkeypatch.setattr(LowRankSpec, "reference", lambda self, *a: 1.5 * exact(self, *a))
    assert tune.prove_schedule(json.dumps(told)) == "false"


@pytest.mark.long
def test_guided_search_is_the_same_twice_and_stays_within_its_trials(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna marks parts of itself as experimental
        (first,) = tune.tune([SPEC], search="guided", trials=24, executor=Serial())
        elsewhere(tmp_path, monkeypatch, "twice")
        with on_processes(2) as workers:
            (second,) = tune.tune([SPEC], search="guided", trials=24, executor=workers)
    assert first == second
    assert first.candidates <= 24 + 1  # the default too, which may be a step beyond all of them
    assert first.best_us <= first.default_us


@pytest.mark.long
def test_build_tunes_before_it_builds(cache, tmp_path):
    specs = tmp_path / "specs.jsonl"
    specs.write_text(json.dumps({"family": "lowrank", "spec": SPEC.to_dict()}))
    done = CliRunner().invoke(
        app, ["build", str(specs), "--search", "candidates", "--jobs", "2", "--json"]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["tuned"][0]["simulated"] == told["tuned"][0]["candidates"]
    assert told["built"] == 1
    tuned.forget()
    assert build.build_kernel(SPEC).meta["tuning"]
    shown = CliRunner().invoke(app, ["build", str(specs), "--search", "candidates"])
    assert "timed now" in shown.output


def put_tuning(spec, schedule, simulated_us):
    """Put a tuning into the cache by hand: a legal schedule with some time."""
    chip = machine_target("trn2")
    best = choose.Choice(schedule, 1.0, simulated_us=simulated_us, in_order_us=simulated_us)
    key = tuned.tuning_key(spec, chip)
    Store.for_kernels().get_or_build(key, lambda: tuned.files_of(best, [best]), {"tuning": "test"})
    tuned.forget()


def test_predictions_take_tuned_times_where_they_are_asked_to(cache):
    from nmm_compiler.prediction.prices import Machine, kernel_price  # as in the next test

    chip = machine_target("trn2")
    second = choose.rank(SPEC, chip)[1].schedule
    before = {name: price(SPEC, "trn2") for name, price in PRICES.items()}
    assert before["tuned"] == before["simulated"]
    put_tuning(SPEC, second, 1.25)
    assert PRICES["simulated"](SPEC, "trn2") == before["simulated"]
    assert PRICES["tuned"](SPEC, "trn2") == 1.25
    for price, us in (("tuned", 1.25), ("simulated", before["simulated"])):
        assert kernel_price(SPEC, Machine(chip, lnc=1, price=price)).us == us
    # a long call is as many launches
    launch = dataclasses.replace(SPEC, m=LARGEST_BUCKET)
    put_tuning(launch, choose.rank(launch, chip)[0].schedule, 7.5)
    assert PRICES["tuned"](dataclasses.replace(SPEC, m=3 * LARGEST_BUCKET + 8), "trn2") == 23.75


def test_a_compiled_file_brings_its_tunings(cache, tmp_path, monkeypatch):
    """What `aot_compile` saves of a tuned kernel makes another cache build and find that kernel."""
    from nmm_compiler.backend import ahead_of_time  # takes two seconds: every process collects

    chip, options = machine_target("trn2"), Options()
    other = choose.rank(SPEC, chip)[1].schedule
    put_tuning(SPEC, other, 1.25)
    kernel = build.build_kernel(SPEC)
    assert kernel.schedule == other
    saved = json.loads(json.dumps(ahead_of_time._saved(kernel, options)))
    for name in ("there", "elsewhere"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("NMM_CACHE_DIR", str(tmp_path / "there"))
    tuned.forget()
    build._KERNELS.clear()
    monkeypatch.setattr(build, "choose", None)  # nothing can be chosen there
    ahead_of_time._restore(saved, options)
    assert build.build_kernel(SPEC, options=Options(cache="require")).schedule == other
    # a file whose tuning is another one is another kernel, and one that is none is refused
    monkeypatch.setenv("NMM_CACHE_DIR", str(tmp_path / "elsewhere"))
    tuned.forget()
    best = json.loads(saved["tuning"]["best.json"])
    best["schedule"]["m_block"] += 128
    changed = {**saved["tuning"], "best.json": json.dumps(best)}
    ahead_of_time._restore({**saved, "tuning": changed}, options)
    assert not list(Store.open().entries())
    with pytest.raises(CacheTrustError, match="is none: KeyError"):
        ahead_of_time._restore({**saved, "tuning": {"best.json": "{}"}}, options)
