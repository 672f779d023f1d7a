"""The README's first example is the tested file, word for word, and it runs."""

import re
from pathlib import Path

import pytest
from processes import ran

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = ROOT / "examples" / "quickstart.py"


def test_readme_shows_the_quickstart_file():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    code = QUICKSTART.read_text(encoding="utf-8").split('"""', 2)[2].strip()
    assert code in [block.strip() for block in blocks]


@pytest.mark.usefixtures("closed_form_only")
def test_quickstart_runs_and_agrees_with_eager(capsys):
    """In this process, with few words, prices that are not simulated and no C++ compiler."""
    pytest.importorskip("transformers")
    code = QUICKSTART.read_text(encoding="utf-8").replace(
        "(hidden_size", "(vocab_size=64, hidden_size"
    )
    exec(code.replace('"report": True', '"report": True, "inner": "eager"'), {})
    said = capsys.readouterr().out
    difference = float(said.rsplit(":", 1)[1])
    # bfloat16 logits of order one, summed in float32: eager rounds the results of seven products in
    # each of two layers, the fused call those of fewer.
    assert difference <= 2**-8 * 7 * 2
    assert "2 x gated_mlp m=64" in said


# The examples that no room's own tests run.

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("quickstart.py", {"largest difference to eager:": 1}),
        ("llama_mlp.py", {"proofs": 2}),
        # dense and low-rank, in two dtypes
        ("decoder_layer.py --tokens 1", {"5 launches": 4, "the whole layer": 2}),
        ("export_mlir.py", {'nmm.family = "lowrank"': 3, "call @nmm_lowrank_matmul_": 3}),
        *((f"tensor_parallel.py {split} 4", {f"{split} split, 4 processes": 2})
          for split in ("row", "rank")),
    ],
)  # fmt: skip
def test_an_example_prints_what_it_is_about(line, counts):
    name, *words = line.split()
    text = ran(EXAMPLES / name, *words, timeout=1500, COLUMNS="160").stdout
    assert {words: text.count(words) for words in counts} == counts


@pytest.mark.long
def test_a_trainer_trains_a_low_rank_model():
    text = ran(EXAMPLES / "finetune_lowrank.py", timeout=1500).stdout
    assert float(text.split("loss ")[-1].split(";")[0]) < 3.5  # of 64 equally likely tokens: 4.16
    assert "loaded again with 7 low-rank layers" in text
