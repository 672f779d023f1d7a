"""What every error of a kind has in common."""

from nmm_compiler.errors import UnknownNameError, nearest

MANY = [f"task_{i}" for i in range(10_000)]


def test_known_names_are_listed_up_to_eight_the_nearest_first():
    assert nearest("x", ["b", "a"]) == "b, a"
    shown = nearest("task_77", MANY)
    assert shown.startswith("task_77, ")
    assert shown.endswith(" and 9,992 more")
    assert shown.count(", ") == 7
    text = str(UnknownNameError("task", "task_x" * 1000, MANY, ("FILE.py",)))
    assert len(text) < 600
    assert text.endswith("; or FILE.py)")
