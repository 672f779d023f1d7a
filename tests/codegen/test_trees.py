"""Walking and editing syntax trees: what counts as code, and what stays the same object."""

import libcst as cst

from nmm_compiler.codegen.trees import Editor, nodes

TEXT = """
def f(a, b: Part = c):
    # why
    if a.b > g(h, key=i):
        pass
    return [j]  # what
"""


def test_nodes_yields_the_names_of_variables_alone():
    found = [node.value for node in nodes(cst.parse_module(TEXT)) if isinstance(node, cst.Name)]
    assert sorted(found) == ["a", "a", "b", "c", "f", "g", "h", "i", "j"]


def test_into_says_what_is_followed():
    tree = cst.parse_expression("f(a) + g(b)")
    stop = nodes(tree, into=lambda node: () if isinstance(node, cst.Call) else None)
    assert sorted(type(node).__name__ for node in stop) == ["BinaryOperation", "Call", "Call"]
    names = {n.value for n in nodes(tree) if isinstance(n, cst.Name)}
    assert names == {"f", "a", "g", "b"}


class Rename(Editor):
    def leave_Name(self, original, updated):
        return updated.with_changes(value="new") if updated.value == "j" else updated

    def visit_If(self, node):
        return False

    def leave_Pass(self, original, updated):
        raise AssertionError("visit_If keeps the editor out")

    def leave_Comment(self, original, updated):
        raise AssertionError("comments are not code")


def test_an_edit_keeps_all_that_it_does_not_touch():
    tree = cst.parse_module(TEXT)
    edited = Rename().edit(tree)
    assert edited.code == TEXT.replace("[j]", "[new]")
    before, after = tree.body[0].body.body, edited.body[0].body.body
    assert after[0] is before[0]
    assert after[1] is not before[1]
    assert Editor().edit(tree) is tree


def test_removed_statements_leave_their_comments_and_white_space_is_edited_on_request():
    class Sweep(Editor):
        spelling = True

        def leave_If(self, original, updated):
            return cst.RemoveFromParent()

        def leave_Comment(self, original, updated):
            return updated.with_changes(value="# new")

    edited = Sweep().edit(cst.parse_module(TEXT))
    assert edited.code == "\ndef f(a, b: Part = c):\n    # why\n    return [j]  # new\n"
