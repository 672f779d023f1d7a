"""Every record that a user meets prints on one line; the larger ones as a table and as HTML."""

import inspect
import json

import numpy as np
import pytest
import torch

import nmm_compiler as nmm
from nmm_compiler.lowrank_models.config import CompressionConfig
from nmm_compiler.report.shown import Shown


def low_rank():
    return torch.nn.Sequential(torch.nn.Linear(64, 16, bias=False), torch.nn.Linear(16, 96))


@pytest.fixture(scope="module")
def records():
    """Return a record of each kind by the name of its class."""
    x = torch.randn(8, 64)
    torch._dynamo.reset()
    options = nmm.Options(inner="eager")
    torch.compile(low_rank(), backend="nmm", options={"inner": "eager"})(x)
    result = nmm.rewrite(low_rank(), (x,))
    dense = torch.nn.Sequential(torch.nn.Linear(256, 256))
    squares = lambda x, u, v: (x @ u) @ v + x.sum()  # noqa: E731  (its sum is no chain)
    explained = nmm.explain(squares, (x, torch.randn(64, 16), torch.randn(16, 96)))
    kernel = nmm.build_kernel(nmm.LowRankSpec(m=8, k=64, r=16, n=96))
    arrays = [np.zeros(t.shape, t.dtype if t.dtype != "bfloat16" else "float32")
              for t in kernel.spec.inputs()]  # fmt: skip
    rule = nmm.rule(lambda a, b: a @ b, lambda a, b: torch.mm(a, b))
    made = [
        nmm.last_report(), result, result.matches[0], explained, options, kernel, kernel.spec,
        kernel.schedule, kernel.profile(), kernel.simulate(*arrays), rule,
        nmm.compress(dense, rank=16), CompressionConfig(rank=16),
        nmm.predict(low_rank(), inputs=(x,)), nmm.ArraySpec((8, 64), "bfloat16"),
        nmm.MatmulSpec(m=8, k=64, n=96), nmm.AttentionSpec(m=8, d=64), nmm.targets.get("trn2"),
        nmm.GatedMLPSpec(m=8, k=64, r=16, n=96),
        nmm.Refusal("dtype", "the factors differ in dtype", result.matches[0].node, "cast them"),
    ]  # fmt: skip
    return {type(one).__name__: one for one in made}


def test_every_record_prints_on_one_line(records):
    for name, record in records.items():
        for text in (repr(record), repr([record])):
            assert "\n" not in text, name
            assert " object at 0x" not in text, name
            assert len(text) < 1200 or not isinstance(record, Shown), name


def test_records_that_people_read_are_tables_and_html(records):
    shown = {name: one for name, one in records.items() if isinstance(one, Shown)}
    assert {"CompileReport", "RewriteResult", "CompressionReport", "ModelPrediction", "Profile",
            "Simulation"} <= set(shown)  # fmt: skip
    for name, record in shown.items():
        assert repr(record).startswith((f"<{name}", f"{name}(")), name
        assert str(record) != repr(record), name
        assert record._repr_html_().startswith('<div class="nmm">'), name
        assert json.loads(record.to_json()), name


def test_no_class_at_the_door_is_left_out(records):
    classes = {n for n in nmm.__all__ if inspect.isclass(getattr(nmm, n))}
    made = {base.__name__ for one in records.values() for base in type(one).__mro__}
    assert classes - made == {"NmmError"}
