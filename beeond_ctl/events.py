"""The event log of a job on a node: one JSON object per line, for `status`, `report` and people.

Logging never stops work: a log that cannot be written is given up silently.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class EventLog:
    """Appends to the log of one job on one node."""

    def __init__(self, root: str, job_id: int, node: str) -> None:
        self._node = node
        self._path = log_path(root, job_id)
        self._file: int | None = None

    def log(self, event: str, **fields: Any) -> None:  # noqa: ANN401 - whatever JSON can say
        """Append one event. `fields` must be JSON-able; times are seconds since the epoch."""
        line = json.dumps({"t": round(time.time(), 4), "node": self._node, "event": event, **fields})
        with suppress(OSError):
            if self._file is None:
                self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._file = os.open(self._path, flags, 0o640)
            os.write(self._file, line.encode() + b"\n")

    @contextmanager
    def timed(self, step: str, **fields: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
        """Log how many seconds the block took; what it puts into the dict is logged with it."""
        start = time.monotonic()
        extra: dict[str, Any] = dict(fields)
        try:
            yield extra
        except BaseException as error:
            extra["failed"] = " ".join(str(error).split())[:500]
            raise
        finally:
            self.log("step", step=step, seconds=round(time.monotonic() - start, 4), **extra)


def log_path(root: str, job_id: int) -> Path:
    """Where the events of a job are."""
    return Path(root) / "jobs" / f"{job_id}.jsonl"


def read(root: str, job_id: int) -> list[dict[str, Any]]:
    """The events of a job on this node, oldest first; a line cut off by a crash is left out."""
    events = []
    with suppress(OSError), log_path(root, job_id).open(errors="replace") as file:
        for line in file:
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    events.append(event)
    return events
