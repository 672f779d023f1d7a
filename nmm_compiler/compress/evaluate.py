"""The quality of a dense and a compressed model, side by side, on tasks of lm-eval.

`evaluate` runs EleutherAI's evaluation harness (package `lm_eval`, extra `eval`) and returns its
figures with their standard errors. Tasks are names that lm-eval knows, whose data it downloads, or
one of the presets below. The preset "local" needs no network: its two tasks are made from Python's
manual, which is part of every Python (`pydoc_data`).
"""

from __future__ import annotations

import functools
import json
import math
import random
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from nmm_compiler.compress.load import load_directory, load_tokenizer
from nmm_compiler.errors import (
    EvaluationError,
    MissingPackageError,
    OptionTypeError,
    UnknownNameError,
)
from nmm_compiler.records import Record
from nmm_compiler.report.parts import Grid, Line, Part
from nmm_compiler.report.shown import Shown
from nmm_compiler.report.text import counted

LOCAL = ("manual_perplexity", "manual_next_sentence")
PRESETS: dict[str, tuple[str, ...]] = {
    "local": LOCAL,
    "perplexity": ("wikitext", "paloma_ptb", "c4"),
    # Of the paper that the kernels follow (arXiv 2510.25977): three of perplexity, six of accuracy.
    "paper": (
        "wikitext", "paloma_ptb", "c4", "openbookqa", "arc_easy", "arc_challenge", "winogrande",
        "hellaswag", "piqa",
    ),
}  # fmt: skip
# The metric of a task that is usually quoted.
_QUOTED = ("acc_norm", "acc", "word_perplexity", "perplexity", "exact_match")
_LOWER_IS_BETTER = ("perplexity", "bits_per_byte")


@dataclass(frozen=True, kw_only=True)
class Score(Record):
    """One metric of one task: of the model, and of the dense one where there is one.

    error, dense_error: standard errors; None where lm-eval gives none.
    """

    task: str
    metric: str
    value: float
    error: float | None = None
    dense: float | None = None
    dense_error: float | None = None

    @property
    def lower_is_better(self) -> bool:
        """Whether less is better, as for perplexity."""
        return self.metric.endswith(_LOWER_IS_BETTER)


@dataclass(frozen=True, kw_only=True)
class EvaluationReport(Shown, Record):
    """The scores that `evaluate` measured. limit: items per task, None for all of them."""

    model: str
    dense: str | None
    scores: tuple[Score, ...]
    limit: int | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line: the models, the tasks and the number of items."""
        against = f" against {self.dense}" if self.dense else ""
        items = "all items" if self.limit is None else f"at most {counted(self.limit, 'item')}"
        tasks = len({score.task for score in self.scores})
        return f"{self.model}{against}: {counted(tasks, 'task')}, {items} of each"

    def parts(self) -> list[Part]:
        """Return the summary and the table of scores."""
        rows = [
            (
                _with_error(score.dense, score.dense_error),
                _with_error(score.value, score.error),
                f"{score.task}, {score.metric}"
                + (" (lower is better)" if score.lower_is_better else ""),
            )
            for score in self.scores
        ]
        figures = ("dense", "model")
        return [
            Line(self.summary(), "headline"),
            Grid.of((*figures, "task and metric"), rows, right=figures),
        ]


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"


def evaluate(
    model: nn.Module | str | Path,
    tasks: str | Iterable[str] = "local",
    *,
    dense: nn.Module | str | Path | None = None,
    tokenizer: Any = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> EvaluationReport:
    """Evaluate a causal language model, and the dense one beside it, on tasks of lm-eval.

    model, dense: directories that `from_pretrained` loads, or transformers models with their
        `tokenizer`.
    tasks: a preset ("local", "perplexity", "paper"), names of lm-eval's tasks, or both; all but
        "local" download their data when they run.
    limit: at most this many items of each task. batch_size: items at a time.

    Raises MissingPackageError without lm-eval, UnknownNameError for a task it does not know,
    FactorsFileError for a directory that is no whole model, EvaluationError when a task fails, for
    example because its data cannot be downloaded.
    """
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise OptionTypeError("limit", limit, "a positive whole number, or None")
    names = expand(tasks)
    manager = _manager(any(name not in LOCAL for name in names))
    unknown = [n for n in names if n not in LOCAL and not manager.match_tasks([n])]
    if unknown:
        raise UnknownNameError("task", unknown[0], (*PRESETS, *LOCAL, *manager.all_tasks))
    figures = [
        _run(one, tokenizer, names, manager, limit, batch_size)
        for one in ((model,) if dense is None else (model, dense))
    ]
    scores = []
    for (task, metric), (value, error) in figures[0].items():
        other = figures[1][task, metric] if dense is not None else (None, None)
        scores.append(
            Score(
                task=task, metric=metric, value=value, error=error, dense=other[0],
                dense_error=other[1],
            )
        )  # fmt: skip
    return EvaluationReport(
        model=_name(model), dense=None if dense is None else _name(dense), scores=tuple(scores),
        limit=limit, versions=_versions(),
    )  # fmt: skip


def expand(tasks: str | Iterable[str]) -> list[str]:
    """Return task names with presets spelled out, each once, in order."""
    given = tasks.split(",") if isinstance(tasks, str) else list(tasks)
    if not all(isinstance(name, str) and name.strip() for name in given) or not given:
        raise OptionTypeError("tasks", tasks, f"names of tasks, or one of {', '.join(PRESETS)}")
    names = [task for name in given for task in PRESETS.get(name.strip(), (name.strip(),))]
    return list(dict.fromkeys(names))


@functools.cache
def _manager(everything: bool) -> Any:
    """Return lm-eval's list of tasks; everything: with its own, thousands of files to read."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise MissingPackageError("lm_eval", "nmm eval", "eval") from None
    return TaskManager(include_defaults=everything)


def _run(
    model: nn.Module | str | Path, tokenizer: Any, names: list[str], manager: Any,
    limit: int | None, batch_size: int,
) -> dict[tuple[str, str], tuple[float, float | None]]:  # fmt: skip
    """Return {(task, metric): (value, standard error)} of one model."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    if not isinstance(model, nn.Module):
        tokenizer = load_tokenizer(model)
        where, model = model, load_directory(model)
        if tokenizer is None:
            raise OptionTypeError("model", str(where), "a directory with a tokenizer beside it")
    elif tokenizer is None:
        raise OptionTypeError("tokenizer", None, "the model's tokenizer, or a directory as model")
    with tempfile.TemporaryDirectory(prefix="nmm-eval-") as directory:
        local = local_tasks(Path(directory))
        try:
            judged = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
            found = simple_evaluate(
                model=judged, tasks=[local.get(name, name) for name in names],
                task_manager=manager, limit=limit, bootstrap_iters=1000,
            )  # fmt: skip
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            raise EvaluationError(
                f"lm-eval could not run {', '.join(names)} ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}); tasks other than "
                f"{', '.join(LOCAL)} download their data"
            ) from error
    assert found is not None
    return {
        (task, metric): figures
        for task, metrics in found["results"].items()
        for metric, figures in _quoted(metrics, found.get("samples", {}).get(task, ()))
    }


def _quoted(
    metrics: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
) -> list[tuple[str, tuple[float, float | None]]]:
    """Return [(metric, (value, error))] of the usually quoted metrics; else of all of them.

    items: the task's items with each metric's figures, for errors that lm-eval does not give.
    """
    found = {}
    for key, value in metrics.items():
        name, _, filtered = key.partition(",")
        if name.endswith("_stderr") or not isinstance(value, (int, float)) or not filtered:
            continue
        error = metrics.get(f"{name}_stderr,{filtered}")
        if not isinstance(error, (int, float)):
            error = perplexity_error([i[name] for i in items if isinstance(i.get(name), tuple)])
        found[name] = (float(value), error)
    quoted = {name: found[name] for name in _QUOTED if name in found}
    return list((quoted or found).items())


def perplexity_error(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the standard error of exp(-sum of l / sum of w) over items (l, w).

    None for fewer than two. It is that of a ratio of means, by the delta method (Cochran,
    Sampling Techniques, section 6.3).
    """
    if len(pairs) < 2:
        return None
    words = sum(weight for _, weight in pairs)
    mean = -sum(loss for loss, _ in pairs) / words
    spread = sum((-loss - mean * weight) ** 2 for loss, weight in pairs)
    return math.exp(mean) * math.sqrt(spread * len(pairs) / (len(pairs) - 1)) / words


def local_tasks(directory: Path) -> dict[str, dict[str, Any]]:
    """Write the data of the local tasks into a directory; return lm-eval's descriptions of them.

    manual_perplexity: perplexity of paragraphs of Python's manual. manual_next_sentence: choose
    which of four sentences follows two others; the three wrong ones are of other chapters.
    """
    from pydoc_data import topics as manual

    chapters = {
        name: re.split(r"(?<=[.!?]) (?=[A-Z])", " ".join(text.split()))
        for name, text in sorted(manual.topics.items())
    }
    chapters = {name: found for name, found in chapters.items() if len(found) >= 8}
    chance = random.Random(0)
    everything = [(name, s) for name, found in chapters.items() for s in found if len(s) < 300]
    passages: list[dict[str, Any]] = []
    choices: list[dict[str, Any]] = []
    for name, found in chapters.items():
        for i in range(0, len(found) - 6, 6):
            passages.append({"text": " ".join(found[i : i + 6])})
            others = [s for other, s in chance.sample(everything, 12) if other != name][:3]
            if len(others) == 3 and len(found[i + 2]) < 300:
                place = chance.randrange(4)
                others.insert(place, found[i + 2])
                query = " ".join(found[i : i + 2])
                choices.append({"query": query, "choices": others, "gold": place})
    described: dict[str, dict[str, Any]] = {}
    for name, rows in zip(LOCAL, (passages, choices), strict=True):
        chance.shuffle(rows)
        path = directory / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        described[name] = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(path)}},
            "test_split": "test",
        }
    words = {"metric": "word_perplexity", "aggregation": "weighted_perplexity"}
    described[LOCAL[0]] |= {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{**words, "higher_is_better": False}],
    }  # fmt: skip
    described[LOCAL[1]] |= {
        "output_type": "multiple_choice", "doc_to_text": "{{query}}", "doc_to_target": "gold",
        "doc_to_choice": "choices", "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in ("acc", "acc_norm")
        ],
    }  # fmt: skip
    return described


def _name(model: nn.Module | str | Path) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else str(model)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("lm_eval", "transformers", "torch")}
