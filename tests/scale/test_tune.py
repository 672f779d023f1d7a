"""Tuning: the same choice on any executor, nothing timed twice, and used by `build_kernel`."""

import dataclasses
import io
import json
import os
import signal
from pathlib import Path

import pytest
from processes import Executor

from nmm_compiler.cache.archive import pack
from nmm_compiler.cache.entry import make
from nmm_compiler.cache.store import Store
from nmm_compiler.cli import cache as cache_command
from nmm_compiler.codegen import build, choose, code_digests, tune, tuned
from nmm_compiler.codegen.build_many import fill
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.codegen.on_ray import RayExecutor
from nmm_compiler.codegen.tune import time_candidates
from nmm_compiler.errors import CacheError, SpecError, WorkerError
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.options import LARGEST_BUCKET, Options
from nmm_compiler.prices.kernel import PRICES

SPEC = LowRankSpec(m=8, k=256, r=64, n=512)
SPECS = [SPEC, LowRankSpec(m=16, k=256, r=64, n=512)]


class Serial(Executor):
    """Runs each task at once, here; it fails after `most` of them."""

    def __init__(self, most=None):
        super().__init__(self.run)
        self.tasks, self.most = [], most

    def run(self, function, text):
        if self.most is not None and len(self.tasks) >= self.most:
            raise WorkerError(1, "the power is out")
        self.tasks.append(json.loads(text)["spec"])
        return function(text)


@pytest.fixture(autouse=True)
def nothing_tuned(cache):
    tuned.forget()
    yield
    tuned.forget()


def best_of(spec):
    chip = machine_target("trn2")
    entry = Store.open().get(tuned.tuning_key(spec, chip))
    return tuned.choices_in(entry.files, tuned.BEST, spec)[0]


def elsewhere(tmp_path, monkeypatch, name):
    directory = tmp_path / name
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("NMM_CACHE_DIR", str(directory))
    tuned.forget()


def test_every_candidate_is_timed_once_and_asking_again_times_nothing(monkeypatch):
    """The best is the least of all in the chooser's order."""
    real, found = choose.simulated, {}

    def seen(spec, schedule, target):
        assert str(schedule) not in found
        found[str(schedule)] = real(spec, schedule, target)
        return found[str(schedule)]

    monkeypatch.setattr(tune, "simulated", seen)
    (first,) = tune.tune([SPEC], executor=Serial())
    every, budget = choose.rank(SPEC, machine_target("trn2")), Options().instruction_budget
    assert first.simulated == first.candidates == len(every) > 10
    timed = [choose.timed(choice, found.pop(str(choice.schedule))) for choice in every]
    assert not found
    least = min(choose.preference(choice, budget) for choice in timed)
    assert choose.preference(best_of(SPEC), budget) == least
    assert first.best_us <= first.default_us == choose.choose(SPEC)[0].simulated_us
    (again,) = tune.tune([SPEC], executor=Serial(most=0))  # asks for nothing at all
    assert dataclasses.replace(first, simulated=0) == again


def test_this_process_simulates_nothing(monkeypatch):
    """Else it takes the time that the workers gain: it is one process, and they are many."""
    answers = []

    def kept(function, text):
        answers.append(function(text))
        return answers[0]

    tune.tune([SPEC], executor=Executor(kept))
    Store.open().prune(0)
    for name in (tune, choose):
        monkeypatch.setattr(name, "simulated", None)
    (made,) = tune.tune([SPEC], executor=Executor(lambda *call: answers[0]))
    assert made.simulated == made.candidates


def test_a_search_that_was_ended_goes_on():
    first = Serial(most=1)
    with pytest.raises(WorkerError):
        tune.tune(SPECS, executor=first)
    second = Serial()
    done = tune.tune(SPECS, executor=second)
    assert [*first.tasks, *second.tasks] == [spec.to_dict() for spec in reversed(SPECS)]
    assert sorted(one.simulated > 0 for one in done) == [False, True]


def put_tuning(spec, schedule, simulated_us=9.0):
    """Put a tuning into the cache by hand: a schedule with some time; return the schedule."""
    best = choose.Choice(schedule, 1.0, simulated_us=simulated_us, in_order_us=simulated_us)
    key = tuned.tuning_key(spec, machine_target("trn2"))
    Store.for_kernels().get_or_build(key, lambda: tuned.files_of([best], best), {"tuning": "test"})
    tuned.forget()
    return schedule


def ranked(spec, place=-1):
    """Return one of the legal schedules, the last of them is another than the chosen one."""
    return choose.rank(spec, machine_target("trn2"))[place].schedule


def test_build_kernel_takes_the_tuned_schedule_and_verify_holds():
    chosen = build.build_kernel(SPEC)
    schedule = put_tuning(SPEC, ranked(SPEC))
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
    schedule = put_tuning(SPEC, ranked(SPEC))
    assert build.asked(SPEC).schedule == schedule
    changed = {**code_digests.code_digests(), "simulator": "0" * 16}
    with monkeypatch.context() as patch:
        patch.setattr(code_digests, "code_digests", lambda: changed)
        tuned.forget()
        assert build.asked(SPEC).schedule is None
    tuned.forget()
    assert build.asked(SPEC, options=Options(instruction_budget=39_999)).schedule is None
    assert build.asked(SPEC, "trn3").schedule is None
    assert build.asked(SPEC, options=Options(cache="off")).schedule is None


def test_a_tuning_that_is_not_legal_is_left_with_a_warning():
    put_tuning(SPEC, dataclasses.replace(ranked(SPEC), m_block=7))
    with pytest.warns(UserWarning, match="is not used"):
        kernel = build.build_kernel(SPEC)
    assert kernel.schedule == choose.choose(SPEC)[0].schedule


def test_a_remote_tuning_is_asked_for_only_where_the_kernel_is_missing(tmp_path, monkeypatch):
    remote = tmp_path / "remote"
    remote.mkdir()
    monkeypatch.setenv("NMM_REMOTE_CACHE", f"file://{remote}")
    schedule = put_tuning(SPEC, ranked(SPEC))
    Store.open().push()
    elsewhere(tmp_path, monkeypatch, "fresh")
    assert build.asked(SPEC).schedule == schedule
    elsewhere(tmp_path, monkeypatch, "has-the-kernel")
    monkeypatch.delenv("NMM_REMOTE_CACHE")
    build.build_kernel(SPEC)
    monkeypatch.setenv("NMM_REMOTE_CACHE", f"file://{remote}")
    tuned.forget()
    assert build.asked(SPEC).schedule is None


def test_a_worker_with_other_code_refuses():
    def elsewhere(function, text):
        told = json.loads(text)
        told["code"]["kernels"] = "0" * 16
        return time_candidates(json.dumps(told))

    with pytest.raises(WorkerError, match="another version"):
        tune.tune([SPEC], executor=Executor(elsewhere))


def test_a_kernel_without_a_legal_schedule_is_refused_before_any_work():
    with pytest.raises(SpecError):
        tune.tune([SPEC, dataclasses.replace(SPEC, lnc=2)], "trn1", executor=Serial(most=0))


@pytest.mark.long
def test_build_tunes_before_it_builds(cache, tmp_path, nmm):
    specs = tmp_path / "specs.jsonl"
    specs.write_text(json.dumps({"family": "lowrank", "spec": SPEC.to_dict()}))
    line = ("build", specs, "--search", "candidates")
    told = json.loads(nmm(*line, "--jobs", "2", "--json", code=0).out)
    assert told["tuned"][0]["simulated"] == told["tuned"][0]["candidates"]
    assert told["built"] == 1
    tuned.forget()
    assert build.build_kernel(SPEC).meta["tuning"]
    assert "timed now" in nmm(*line).out


def test_predictions_take_tuned_times_where_they_are_asked_to(cache):
    from nmm_compiler.prediction.prices import Cores, kernel_price  # as in the next test

    chip = machine_target("trn2")
    before = {name: price(SPEC, chip) for name, price in PRICES.items()}
    assert before["tuned"] == before["simulated"]
    put_tuning(SPEC, ranked(SPEC, 1), 1.25)
    assert PRICES["simulated"](SPEC, chip) == before["simulated"]
    assert PRICES["tuned"](SPEC, chip) == 1.25
    for price, us in (("tuned", 1.25), ("simulated", before["simulated"])):
        assert kernel_price(SPEC, Cores(chip, lnc=1, price=price)).us == us
    # a long call is as many launches
    launch = dataclasses.replace(SPEC, m=LARGEST_BUCKET)
    put_tuning(launch, ranked(launch, 0), 7.5)
    assert PRICES["tuned"](dataclasses.replace(SPEC, m=3 * LARGEST_BUCKET + 8), chip) == 23.75


def test_a_compiled_file_brings_its_tunings(cache, tmp_path, monkeypatch):
    """What `aot_compile` saves of a tuned kernel makes another cache build and find that kernel."""
    from nmm_compiler.backend import ahead_of_time  # takes two seconds: every process collects

    options, other = Options(), put_tuning(SPEC, ranked(SPEC, 1))
    kernel = build.build_kernel(SPEC)
    assert kernel.schedule == other
    saved = io.BytesIO()
    pack(saved, ahead_of_time._entries([kernel], options))
    elsewhere(tmp_path, monkeypatch, "there")
    build._KERNELS.clear()
    monkeypatch.setattr(build, "choose", None)  # nothing can be chosen there
    ahead_of_time.take(saved.getvalue(), options)
    assert build.build_kernel(SPEC, options=Options(cache="require")).schedule == other
    # nothing of an archive that is cut, or that holds other code than a kernel, is taken
    key = build.asked(SPEC, options=Options(instruction_budget=7)).key
    foreign = io.BytesIO()
    pack(foreign, [make(key, {build.SOURCE_FILE: "import os\n"}, {})])
    entries = len(list(Store.open().entries()))
    for data in (saved.getvalue()[:2048], foreign.getvalue()):
        with pytest.raises(CacheError):
            ahead_of_time.take(data, options)
    assert len(list(Store.open().entries())) == entries


# A local Ray cluster whose workers are killed: the choice of a serial run, nothing lost.

LAYERS = [LowRankSpec(m=m, k=512, r=64, n=1024) for m in (8, 16, 64, 128)]


def descendants(root):
    """Return {pid: command} of the processes below `root`."""
    parents, commands = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                status = (folder / "stat").read_text()
                commands[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            parents[int(folder.name)] = int(status.rpartition(")")[2].split()[1])
    below = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        if not more:
            return {pid: commands[pid] for pid in below - {root}}
        below |= more


@pytest.mark.long
def test_a_cluster_with_killed_workers(cache, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    serial = tune.tune(LAYERS, jobs=1)
    elsewhere(tmp_path, monkeypatch, "ray")
    killed = []

    def kill(words, done, known):
        if len(killed) < done <= 3:
            below = descendants(os.getpid()).items()
            busy = [pid for pid, command in below if command.startswith("ray::time_cand")]
            if busy:
                os.kill(busy[0], signal.SIGKILL)
                killed.append(busy[0])

    with RayExecutor(cores=3) as executor:
        made = tune.tune(LAYERS, executor=executor, progress=kill)
        filled = fill([(spec, "trn2") for spec in LAYERS], executor=executor)
    assert killed
    assert made == serial  # every schedule once, with the same times and the same choice
    assert filled.built == len(LAYERS)
