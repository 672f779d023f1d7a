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
    # fp32 logits of two layers; contractions of at most 2048 terms, each layer adds its own:
    # eps * sqrt(2048) per product, seven products a layer, logits of order one.
    assert difference <= 2**-23 * 2048**0.5 * 7 * 2
    assert "2 x gated_mlp m=64" in done.stdout
