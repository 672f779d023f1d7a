"""Several simulated timelines in one Chrome trace: the cores of a grid, or rival schedules.

`Profile.to_chrome_trace` writes one; here each profile gets its own pair of processes, named after
its key, so that Perfetto (ui.perfetto.dev) shows them one below the other on one time axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nmm_compiler.simulator.chrome_trace import chrome_events, write_events
from nmm_compiler.simulator.profile import Profile

_PROCESSES_EACH = 10


def write_trace(profiles: Mapping[str, Profile], path: str | Path) -> Path:
    """Write the timelines of `profiles` to `path`, in order; return the path.

    Raises TimelineMissingError for a profile that came from JSON, OutputError if the file cannot
    be written.
    """
    return write_events(_events(profiles), path)


def _events(profiles: Mapping[str, Profile]) -> Iterator[dict[str, Any]]:
    for number, (name, profile) in enumerate(profiles.items()):
        for event in chrome_events(profile.timeline):
            event["pid"] += number * _PROCESSES_EACH
            if event["name"] == "process_name":
                event["args"]["name"] = f"{name}: {event['args']['name']}"
            yield event
