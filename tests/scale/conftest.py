import pytest

from nmm_compiler.codegen import build


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty kernel cache of this test, for its child processes too."""
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("NMM_CACHE_DIR", str(directory))
    build._KERNELS.clear()
    return directory
