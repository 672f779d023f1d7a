"""The package door: every public name is there, and `import nmm_compiler` stays light."""

import inspect

import pytest
from processes import ran

import nmm_compiler

FIRST = """
import logging, os, torch._dynamo
for name in ("explain", "rule", "compress"):
    if os.fork() == 0:
        logger = logging.getLogger("torchao")
        logger.setLevel(logging.INFO)
        import nmm_compiler
        getattr(nmm_compiler, name)
        assert logger.level == logging.INFO
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.mark.parametrize("name", nmm_compiler.__all__)
def test_every_public_name_loads(name):
    assert getattr(nmm_compiler, name) is not None


def test_a_name_loads_as_the_first_of_a_process_and_leaves_the_level_of_a_logger():
    """Each in a process of its own, which a process forks that has loaded torch."""
    assert ran("-c", FIRST).stderr == ""


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        nmm_compiler.no_such_name  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_transformers():
    code = (
        "import sys, nmm_compiler\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "print(nmm_compiler.targets.get('trn2').name)"
    )
    assert ran("-c", code).stdout.strip() == "trn2"


def test_compress_is_the_function_and_its_room_stays_importable():
    """Importing a module of the room must not put the package in the function's place."""
    from nmm_compiler.lowrank_models import apply

    assert inspect.isfunction(nmm_compiler.compress)
    assert inspect.signature(nmm_compiler.compress) == inspect.signature(apply.compress)
    assert inspect.getdoc(nmm_compiler.compress) == inspect.getdoc(apply.compress)
