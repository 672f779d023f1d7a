"""The table of codes is whole: what the passes refuse with stands in it, and nothing else."""

import ast
from pathlib import Path

from nmm_compiler.passes import pipeline
from nmm_compiler.passes.chains.refusal_codes import CODES, FURTHER, distance

ROOM = Path(pipeline.__file__).parent


def words(text):
    tree = ast.parse(text)
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) is str}


def refused_with(text):
    """Return the codes of `Refusal(code, ...)` calls that are written out."""
    for node in ast.walk(ast.parse(text)):
        name = getattr(getattr(node, "func", None), "id", "")
        if name == "Refusal" and node.args and isinstance(node.args[0], ast.Constant):
            yield node.args[0].value


def test_every_code_is_in_the_table_and_used():
    files = [f for f in ROOM.rglob("*.py") if f.name != "refusal_codes.py"]
    texts = [f.read_text(encoding="utf-8") for f in files]
    known = {**CODES, **FURTHER}
    assert len(known) == len(CODES) + len(FURTHER)
    assert {code for text in texts for code in refused_with(text)} <= set(known)
    assert set(known) <= set().union(*map(words, texts))


def test_the_rank_is_the_order():
    assert [distance(code) for code in CODES] == list(range(len(CODES)))
    assert {distance(code) for code in (*FURTHER, "a code of a user")} == {len(CODES)}
