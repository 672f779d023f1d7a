"""A torch that was never tested is said, once."""

import warnings

import pytest
import torch

from nmm_compiler.backend.compile_graph import NEWEST, OLDEST, warn_if_untested


@pytest.mark.parametrize("version", ["2.8.1", "3.0.0", f"2.{NEWEST[1] + 1}.0a0+git12"])
def test_another_version_is_one_warning(version):
    with pytest.warns(UserWarning, match="tested with torch 2.9 to 2.13"):
        warn_if_untested(version)
    with warnings.catch_warnings(action="error"):
        warn_if_untested(version)


@pytest.mark.parametrize(
    "version", [torch.__version__, f"{OLDEST[0]}.{OLDEST[1]}.0", "2.13.1+cpu", "unknown"]
)
def test_tested_versions_are_silent(version):
    with warnings.catch_warnings(action="error"):
        warn_if_untested(version)
