from contextlib import nullcontext

import pytest
from processes import Executor

from nmm_compiler.codegen import build, build_many


@pytest.fixture
def here(monkeypatch):
    """Builds of this test run in this process; test_fill.py starts workers and kills them."""
    monkeypatch.setattr(build_many, "Workers", lambda count: nullcontext(Executor()))
    return Executor()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty kernel cache of this test, for its child processes too."""
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("NMM_CACHE_DIR", str(directory))
    build._KERNELS.clear()
    return directory
