"""docs/timing.md shows the constants that the targets have."""

import re
from pathlib import Path

from nmm_compiler import targets

PAGE = Path(__file__).resolve().parents[2] / "docs" / "timing.md"


def test_constants_on_the_page_are_current():
    rows = re.findall(
        r"^\| `(\w+)` \| (\S+) ([DMA]) \| (\S+) ([DMA]) \| (\S+) ([DMA]) \|", PAGE.read_text(), re.M
    )
    assert len(rows) > 35
    for name, *cells in rows:
        for target, value, kind in zip(targets.names(), cells[::2], cells[1::2], strict=True):
            record = targets.get(target)
            actual = getattr(record, name)
            shown = f"{actual:g}" if isinstance(actual, float) else str(actual)
            assert (shown, record.sources[name].kind[0].upper()) == (value, kind), (target, name)
