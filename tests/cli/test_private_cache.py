"""A cache directory that others can write: each command says once what follows for it."""

import pytest

from nmm_compiler.cli.main import main

SPEC = '{"family": "matmul", "spec": {"m": 8, "k": 64, "n": 64}}\n'
SIZES = ("--m", "8", "--k", "64", "--n", "64")
REFUSED, KEPT, SHOWN = (
    "error: cache directory", "warning: cache directory", "not used, kernels are kept in memory",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "follows"),
    [
        (("kernel", "matmul", *SIZES, "--check", "--schedules"), KEPT),
        (("plan", "smollm2-135m", "--ratio", "0.2", "--price", "tuned", "--prompt", "8"), KEPT),
        (("build", "specs.jsonl"), REFUSED),
        (("build", "specs.jsonl", "--search", "candidates"), REFUSED),
        (("cache", "list"), REFUSED),
        (("cache", "clear", "--yes"), REFUSED),
        (("doctor",), SHOWN),
    ],
    ids=lambda words: " ".join(words[:2]) if isinstance(words, tuple) else "",
)
def test_what_follows_is_said_once(words, follows, tmp_path, monkeypatch, capsys):
    if words[0] == "plan":
        pytest.importorskip("transformers")
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(0o777)
    (tmp_path / "specs.jsonl").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NMM_CACHE_DIR", str(directory))
    with pytest.raises(SystemExit) as ended:
        main(words)
    shown = capsys.readouterr()
    said = " ".join((shown.out + shown.err).split())
    assert ended.value.code == (2 if follows == REFUSED else 0), said
    assert said.count(follows) == 1
    assert said.count("chmod 700") == 1
    assert "Store(" not in said
    assert "CacheWarning" not in said
    assert not any(directory.iterdir())
