"""tests/size.py on a toy tree: what it counts, and which limits it says are broken."""

import pytest

from tests.size import Size, limits_of, main, size_of

LAYOUT = """# Rooms

| counted together | rooms | statements, at most | nodes a statement, at most |
| --- | --- | --- | --- |
| two | `product/first/` `product/*.py` | {two} | |
| apart | `product/first/deep/` | 5 | |
| product | `product/` | 1,000 | {nodes} |
| tests | `tests/` | 7 | |

More text.
"""
FILES = {
    "product/top.py": "x = 1\n\n\ndef f():\n    return x\n",  # 3 statements
    "product/first/a.py": "if x:\n    y = 1; z = 2\nelse:\n    pass\n",  # 4
    "product/first/deep/b.py": "class A:\n    async def f(self): ...\n",  # 3
    "tests/test_it.py": "def test_it():\n    assert True\n",  # 2
}


@pytest.fixture
def tree(tmp_path):
    def write(two="10", nodes="9.0", files=FILES):
        for name, text in {**files, "docs/layout.md": LAYOUT.format(two=two, nodes=nodes)}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_joined_lines_are_as_many_statements():
    size = size_of("x = 1; y = 2; f()\n")
    assert size == Size(statements=3, lines=1, nodes=13, functions=0)
    assert size.nodes_per_statement == pytest.approx(13 / 3)


def test_each_row_and_each_room_is_printed_once(tree, capsys):
    assert main(tree()) == 0
    printed = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert printed == [
        ["two", "7", "10"],
        ["product/*.py", "3", "5"],
        ["product/first/", "4", "4"],
        ["apart", "3", "5"],
        ["product/first/deep/", "3", "2"],
        ["product", "10", "1,000"],
        ["tests", "2", "7"],
        ["tests/*.py", "2", "2"],
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"two": "6"}, "two: 7 statements, over 6"),
        ({"nodes": "1.5"}, "product: 3.00 nodes a statement, over 1.50"),
        (
            {"files": {**FILES, "product/new/c.py": "x = 1\n"}},
            "product/new/ is in no row of docs/layout.md",
        ),
    ],
)
def test_a_broken_limit_is_said_and_is_the_exit_code(tree, capsys, changed, said):
    assert main(tree(**changed)) == 1
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_a_layout_without_the_table_is_refused():
    with pytest.raises(ValueError, match="no table"):
        limits_of("# Rooms\n")
