"""The pipeline is a list of named steps, each dumped and checked."""

import pytest
import torch
from models import Three
from torch import fx

from nmm_compiler.errors import InternalFaultError
from nmm_compiler.passes import pipeline
from nmm_compiler.passes.pipeline import Attempt

X = torch.randn(6, 32)
NAMES = ["read", "match", "combine", "layout", "emit", "lint"]


def run(options=None):
    return pipeline.run(fx.symbolic_trace(Three()), (X,), options)


def test_dump_writes_the_graph_after_each_step(tmp_path, monkeypatch):
    monkeypatch.setenv("NMM_DUMP", str(tmp_path / "new"))
    for _ in range(2):
        run()
    folders = sorted(p.name for p in (tmp_path / "new").iterdir())
    assert folders == ["graph000", "graph001"]
    files = sorted((tmp_path / "new" / "graph001").iterdir())
    assert [f.name for f in files] == [f"{i:02d}_{n}.py" for i, n in enumerate(NAMES)]
    texts = {f.stem[3:]: f.read_text(encoding="utf-8") for f in files}
    assert "# p_b.product: Product(" in texts["read"]
    assert texts["match"].count("# lowrank at") == 3
    assert "# shared_x at" in texts["combine"]
    assert "row" in texts["layout"]
    assert "lowrank_matmul" not in texts["layout"].split("def forward")[1]
    assert "lowrank_matmul_shared_x" in texts["emit"].split("def forward")[1]
    for text in texts.values():
        compile(text, "dump", "exec")


def _forget_a_form(attempt):
    del attempt.c.forms[next(n for n in attempt.c.graph.nodes if n.name == "tanh")]


def _match_twice(attempt):
    from copy import copy

    attempt.matches.append(copy(attempt.matches[0]))


def _read_a_transpose_of_nothing(attempt):
    attempt.matches[0].data.x_layout = "col"


def _give_another_dtype(attempt):
    old, new = next(iter(attempt.editor.replaced.items()))
    attempt.c.values[new] = attempt.c.values[old].double()


def _leave_a_node(attempt):
    attempt.editor.at = next(iter(reversed(attempt.module.graph.nodes)))
    attempt.editor.call(torch.ops.aten.relu.default, attempt.editor.at.args[0][0])


# What a step may get wrong, and the words of the check that finds it.
WRONG = {
    "read": (_forget_a_form, "tanh has neither a form nor a view"),
    "match": (_match_twice, "both take over node"),
    "combine": (_match_twice, "both take over node"),
    "layout": (_read_a_transpose_of_nothing, "the transpose that nothing makes"),
    "emit": (_give_another_dtype, r"is torch.float64 .* in place of"),
    "lint": (_leave_a_node, "nothing reads the new node relu"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_step_is_checked(monkeypatch, name):
    breaks, words = WRONG[name]

    def broken(attempt, step):
        step.run(attempt)
        breaks(attempt)

    passes = tuple(
        pipeline.Pass(p.name, lambda a, p=p: broken(a, p), p.check) if p.name == name else p
        for p in pipeline.PASSES
    )
    assert [p.name for p in passes] == NAMES
    assert all(p.run.__qualname__.startswith(Attempt.__name__) for p in pipeline.PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)
    with pytest.raises(InternalFaultError, match=words):
        run({"strict": True})
    with pytest.warns(UserWarning, match="a fault in nmm_compiler"):
        assert not run().rewritten
