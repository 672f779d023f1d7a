"""Fixtures of the cache's tests."""

import pytest


@pytest.fixture
def directory(tmp_path):
    """A cache directory that does not exist yet."""
    return tmp_path / "cache"
