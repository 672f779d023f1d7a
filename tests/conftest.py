"""Shared by all rooms: no test touches the user's own kernel cache."""

import gc
import os
from typing import NamedTuple

import pytest
from hypothesis import settings

# One thread a worker: the workers fill the cores, and the threads of torch and of BLAS, which wait
# by spinning, would take each other's time. Set before anything loads them; child processes too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor compiles where it is called: its own workers would import torch each.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Syntax trees and traces are millions of small objects, and few of them are in cycles.
gc.set_threshold(50_000, 20, 100)

# The quick suite draws the same examples every time, so that a failure is the change's own;
# `make test-long` draws new ones, and more (--hypothesis-profile=default).
settings.register_profile("quick", derandomize=True, max_examples=40)
settings.load_profile("quick")


@pytest.fixture(scope="session", autouse=True)
def _private_cache(tmp_path_factory):
    """Point NMM_CACHE_DIR (this process and its children) at a directory of this test run, which
    its workers share."""
    own = tmp_path_factory.getbasetemp()
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "nmm_cache"
    directory.mkdir(mode=0o700, exist_ok=True)
    before = {k: v for k, v in os.environ.items() if k.startswith("NMM_")}
    for name in before:
        del os.environ[name]
    os.environ["NMM_CACHE_DIR"] = str(directory)
    yield
    del os.environ["NMM_CACHE_DIR"]
    os.environ.update(before)


@pytest.fixture
def closed_form_only(monkeypatch):
    """The closed form in place of the simulator's prices, for tests that judge no time."""
    from nmm_compiler.lowrank_models.predicted_time import call_us
    from nmm_compiler.prices.kernel import PRICES, estimate_us

    call_us.cache_clear()
    monkeypatch.setitem(PRICES, "simulated", estimate_us)
    monkeypatch.setattr("nmm_compiler.prices.kernel.WORTH_WORKERS", 1 << 30)  # which simulate
    yield
    call_us.cache_clear()


class Ended(NamedTuple):
    """How a command line ended, and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def nmm(capfd, monkeypatch):
    """Return a function that runs a line and returns how it ended; pages are 200 columns wide."""
    monkeypatch.setenv("COLUMNS", "200")

    from nmm_compiler.cli.main import main

    def run(*words, code=None, traceback=False):
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        done = Ended(ended.value.code, *capfd.readouterr())
        assert code in (None, done.code), done
        assert ("Traceback (most recent call last)" in done.err) == traceback, done.err
        return done

    return run
