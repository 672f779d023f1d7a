"""The package door: every public name is there, and `import nmm_compiler` stays light."""

import subprocess
import sys

import pytest

import nmm_compiler


@pytest.mark.parametrize("name", nmm_compiler.__all__)
def test_every_public_name_loads(name):
    assert getattr(nmm_compiler, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        nmm_compiler.no_such_name  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_transformers():
    code = (
        "import sys, nmm_compiler\n"
        "assert not {'torch', 'transformers', 'libcst'} & set(sys.modules)\n"
        "print(nmm_compiler.targets.get('trn2').name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "trn2", done.stderr
