"""The event log of a job on a node: one JSON object per line, for `status`, `report`, metrics and people.

What is logged also goes to systemd's journal, where there is one: `journalctl BEEOND_JOB_ID=42`. Logging never stops
work: a log that cannot be written is given up silently, but by `EventLog.keep`. Knows nothing of what the events mean.
"""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl.errors import shortened

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping, Sequence

JOURNAL: Final = "/run/systemd/journal/socket"
"""Takes `NAME=value` lines in datagrams: systemd's native protocol, https://systemd.io/JOURNAL_NATIVE_PROTOCOL/."""
LIMIT: Final = 8 * 1024**2
"""Bytes after which a log takes only what may not be lost. No job comes near it; one that is recovered for ever may."""
BEGINNINGS: Final = ("prolog", "up")
"""Events with which a run of a job begins; a tuple, since the files that users can write may say anything."""

_LONGEST: Final = 256 * 1024
"""Bytes after which a line keeps only the beginnings of texts and lists: who reads a log reads all of it."""
_TEXT, _ITEMS = 1000, 100

_ALWAYS: Final = frozenset([*BEGINNINGS, "epilog", "down", "recover", "proved", "drained", "clean"])
_NOT_TO_JOURNAL: Final = frozenset(["progress"])
_BAD: Final = frozenset([
    "failed", "gave-up", "drained", "not-drained", "revived", "not-revived", "remounted", "detached", "not-logged",
    "rebooted",
])  # fmt: skip
_WARNING, _INFO = 4, 6  # syslog(3)


class EventLog:
    """Appends to the log of one job on one node. `steps` are those timed by this process, with their seconds."""

    def __init__(self, root: str, job_id: int, node: str) -> None:
        self.steps: list[tuple[str, float]] = []
        self._node, self._job_id = node, job_id
        self._begun_s = time.monotonic()
        self._path = log_path(root, job_id)
        self._file: int | None = None
        self._full = False
        self._journal: socket.socket | None = None

    def log(self, event: str, **fields: Any) -> None:  # noqa: ANN401 - whatever JSON can say
        """Append one event. `fields` must be JSON-able; times are seconds since the epoch."""
        line = self._line(event, fields)
        with suppress(OSError):
            if self._file is None:
                self._file = self._open()
            if not self._full or event in _ALWAYS:
                os.write(self._file, line.encode() + b"\n")

    def keep(self, event: str, **fields: Any) -> None:  # noqa: ANN401
        """Append one event, and see that it is on the disk. Raises OSError."""
        line = self._line(event, fields).encode() + b"\n"
        file = self._open()  # anew: what was written last may have been cut off
        try:
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
        finally:
            os.close(file)

    def _line(self, event: str, fields: Mapping[str, Any]) -> str:
        """The event as it is written; systemd's journal is told."""
        fact = {"t": round(time.time(), 4), "node": self._node, "event": event, **fields}
        line = json.dumps(fact)
        if len(line) > _LONGEST:
            line = json.dumps(_beginnings(fact))
        if event not in _NOT_TO_JOURNAL:
            self._tell_journal(event, line, failed="failed" in fields)
        return line

    def _tell_journal(self, event: str, line: str, *, failed: bool) -> None:
        if self._journal is None and os.path.exists(JOURNAL):
            import socket

            self._journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._journal.setblocking(False)
        if self._journal is not None:
            priority = _WARNING if event in _BAD or failed else _INFO
            told = (
                f"MESSAGE=job {self._job_id}: {line}\nPRIORITY={priority}\nSYSLOG_IDENTIFIER=beeond-ctl\n"
                f"BEEOND_JOB_ID={self._job_id}\nBEEOND_EVENT={event}\n"
            )
            with suppress(OSError):  # a full queue, or a message larger than a datagram
                self._journal.sendto(told.encode(), JOURNAL)

    def _open(self) -> int:
        self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o640)
        size = os.fstat(file).st_size
        self._full = size > LIMIT
        if size and os.pread(file, 1, size - 1) != b"\n":  # a crash has cut the last line off
            os.write(file, b"\n")
        return file

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
            seconds = round(time.monotonic() - start, 4)
            self.steps.append((step, seconds))
            self.log("step", step=step, seconds=seconds, **extra)

    def took_s(self) -> float:
        """Seconds that this process has worked until now."""
        return round(time.monotonic() - self._begun_s, 2)

    def took(self) -> str:
        """Where this process's time went until now, on one line: what took longest, first."""
        parts: dict[str, float] = {}
        for step, seconds in self.steps:
            name = "waiting for other nodes" if step.startswith("meeting ") else step
            parts[name] = parts.get(name, 0.0) + seconds
        longest = sorted(parts.items(), key=lambda part: -part[1])[:4]
        told = ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest if seconds >= 0.005)
        return f"{self.took_s():.2f} s" + (f": {told}" if told else "")


def _beginnings(value: Any) -> Any:  # noqa: ANN401 - whatever JSON can say
    """`value` with all that is long in it cut, but for what there is one of for each node."""
    match value:
        case str():
            return shortened(value, _TEXT)
        case dict():
            return {name: _beginnings(each) for name, each in value.items()}
        case list() | tuple():
            return [_beginnings(each) for each in value[:_ITEMS]]
    return value


def log_path(root: str, job_id: int) -> Path:
    """Where the events of a job are."""
    return Path(root) / "jobs" / f"{job_id}.jsonl"


def length(root: str, job_id: int) -> int:
    """How many bytes the log of a job has on this node."""
    with suppress(OSError):
        return log_path(root, job_id).stat().st_size
    return 0


def read(root: str, job_id: int, *, since: int = 0) -> list[dict[str, Any]]:
    """The events of a job on this node, oldest first; a line cut off by a crash is left out.

    `since` is a `length` of before: only what was logged after it is returned.
    """
    with suppress(OSError), log_path(root, job_id).open("rb") as file:
        file.seek(since)
        return parse(file.read())
    return []


def last_run(logged: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """What was logged since the job last began: Slurm uses ids again, and a requeued job keeps its own."""
    begun = [number for number, event in enumerate(logged) if event.get("event") in BEGINNINGS]
    return logged[begun[-1] :] if begun else logged


def of_user(logged: Sequence[Mapping[str, Any]], uid: int) -> list[Mapping[str, Any]]:
    """Of a log that may be that of several jobs, since Slurm uses ids again, those runs that are the user's.

    Each run begins with an event that has a `uid`.
    """
    found = []
    theirs = False
    for event in logged:
        theirs = event["uid"] == uid if "uid" in event else theirs
        if theirs:
            found.append(event)
    return found


def parse(data: bytes) -> list[dict[str, Any]]:
    """The events in the lines of `data`; what is none is left out."""
    found = []
    for line in data.splitlines():
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict):
                found.append(event)
    return found
