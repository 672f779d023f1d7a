"""What lm-eval writes while it runs: bars on terminals only, no remarks; what it cut is counted."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock


class Cut(logging.Handler):
    """Counts the items that lm-eval says it cuts; takes its other remarks and drops them."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count the record if it is about an item that is too long."""
        self.count += "Truncating" in record.getMessage()


@contextlib.contextmanager
def without_chatter() -> Iterator[Cut]:
    """Let lm-eval draw its bars on terminals only, and keep back its remarks on how it is called.

    It also asks git for the version of the directory that the command runs in, which need not be a
    repository.
    """
    import tqdm

    set_up = tqdm.std.tqdm.__init__

    def hidden(self: Any, *args: Any, **keywords: Any) -> None:
        set_up(self, *args, **{**keywords, "disable": True})

    cut, log = Cut(), logging.getLogger("lm_eval")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(log, "propagate", False))
        log.addHandler(cut)
        stack.callback(log.removeHandler, cut)
        for name in ("transformers", "datasets"):
            log = logging.getLogger(name)
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.ERROR)
        if not sys.stderr.isatty():
            stack.enter_context(mock.patch.object(tqdm.std.tqdm, "__init__", hidden))
        with contextlib.suppress(ImportError):  # `run` says what is missing
            from lm_eval import evaluator

            stack.enter_context(mock.patch.object(evaluator, "get_git_commit_hash", str))
        yield cut
