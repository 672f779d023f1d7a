"""A Ray cluster as an executor with `submit`, for `tune` and `fill`."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from typing import Any

from nmm_compiler.codegen.workers import Task
from nmm_compiler.errors import MissingPackageError


class RayExecutor:
    """Runs each task on one core of a Ray cluster; Ray begins those again whose worker died.

    address: "ray://host:10001", "auto" for the cluster of this machine, or None to start one here
    with `cores` workers, which ends with this object's block. Workers need this package installed.
    """

    def __init__(self, address: str | None = None, cores: int | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise MissingPackageError("ray", "a cluster", "ray") from None
        self._ray: Any = ray
        here: dict[str, Any] = (
            {"num_cpus": cores, "include_dashboard": False} if address is None else {}
        )
        self._ray.init(address=address, log_to_driver=False, logging_level="ERROR", **here)
        self._remote = functools.cache(ray.remote)  # with one core a task and three retries

    def submit(self, function: Task, text: str, /) -> Future[str]:
        """Return the future of `function(text)` on some worker."""
        return self._remote(function).remote(text).future()

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.shutdown()
