"""One S3 bucket behind a network that fails, and processes that are killed: every count is 0."""

import importlib.util

import pytest

from benchmarks import scale_s3

NEEDS = ("moto", "s3fs", "flask")


@pytest.mark.long
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in NEEDS), reason="make stress installs moto"
)
def test_nothing_is_lost_torn_or_built_twice(monkeypatch):
    monkeypatch.setattr(scale_s3, "PROCESSES", 3)
    monkeypatch.setattr(scale_s3, "KILLS", 2)
    found = scale_s3.run(seed=1)
    assert set(found.pop("faults")) == {"answered", "no answer", "500", "truncated"}
    assert found == {"killed": 2, "lost": 0, "torn": 0, "duplicated": 0}
