"""A Ray cluster as an executor with `submit`, for `tune` and `fill`."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from nmm_compiler.codegen.workers import ATTEMPTS, Task
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
        self._remote: dict[Task, Any] = {}

    def submit(self, function: Task, text: str, /) -> Future[str]:
        """Return the future of `function(text)` on some worker."""
        if function not in self._remote:
            made = self._ray.remote(function)
            self._remote[function] = made.options(num_cpus=1, max_retries=ATTEMPTS)
        future: Future[str] = self._remote[function].remote(text).future()
        return future

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.shutdown()
