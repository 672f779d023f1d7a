"""Completion as a user of bash gets it: the script that nmm prints, called as bash calls it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nmm_compiler.kernels import FAMILIES
from nmm_compiler.targets import names

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture(scope="module")
def completed(tmp_path_factory):
    """Return a function from the words of a line to what bash offers for the last one."""
    home = tmp_path_factory.mktemp("home")
    cache = home / "cache"
    command = Path(sys.executable).parent / "nmm"
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    environment |= {"HOME": str(home), "NMM_CACHE_DIR": str(cache), "NMM_CACHE": "rw"}
    words = ["kernel", "lowrank", "--m", "1", "--k", "128", "--r", "16", "--n", "128"]
    subprocess.run([command, *words], env=environment, capture_output=True, check=True)
    script = home / "nmm.bash"
    shown = subprocess.run(
        [command], env={**environment, "_NMM_COMPLETE": "source_bash"}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    script.write_text(shown.stdout)

    def offered(*words):
        line = " ".join(f"'{word}'" for word in words)
        asked = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1};"
        asked += '_nmm_completion nmm; printf "%s\\n" "${COMPREPLY[@]}"'
        found = subprocess.run(
            ["bash", "-c", asked], env=environment, capture_output=True, text=True, check=True
        )
        return found.stdout.split()

    return offered


def test_bash_completes_families_targets_models_and_options(completed):
    assert completed("nmm", "kernel", "lowrank") == [x for x in FAMILIES if "lowrank" in x]
    assert completed("nmm", "kernel", "lowrank", "--target", "tr") == list(names())
    assert {"llama-3.2-1b", "llama-3.2-3b"} <= set(completed("nmm", "plan", "llama-3.2"))
    assert "--time-limit" in completed("nmm", "profile", "--ti")


def test_bash_completes_the_entries_of_the_cache(completed):
    (entry,) = completed("nmm", "cache", "list", "")
    assert completed("nmm", "cache", "list", entry[:4]) == [entry]
    assert completed("nmm", "cache", "list", "zz") == []
