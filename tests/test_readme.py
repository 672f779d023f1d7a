"""The README's first example is the tested file, word for word, and it runs."""

import re
from pathlib import Path

from processes import ran

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = ROOT / "examples" / "quickstart.py"


def test_readme_shows_the_quickstart_file():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    code = QUICKSTART.read_text(encoding="utf-8").split('"""', 2)[2].strip()
    assert code in [block.strip() for block in blocks]


def test_quickstart_runs_and_agrees_with_eager():
    done = ran(QUICKSTART)
    difference = float(done.stdout.rsplit(":", 1)[1])
    # bfloat16 logits of order one, summed in float32: eager rounds the results of seven products in
    # each of two layers, the fused call those of fewer.
    assert difference <= 2**-8 * 7 * 2
    assert "2 x gated_mlp m=64" in done.stdout
