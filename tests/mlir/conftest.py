"""torch lists every operator that it has anew for each export, which takes a sixth of the time."""

import functools

import pytest
import torch._export.utils


@pytest.fixture(scope="package", autouse=True)
def operators_listed_once():
    with pytest.MonkeyPatch.context() as patch:
        name = "_materialize_cpp_cia_ops"
        listed = getattr(torch._export.utils, name, None)
        if listed is not None:
            patch.setattr(torch._export.utils, name, functools.cache(listed))
        yield
