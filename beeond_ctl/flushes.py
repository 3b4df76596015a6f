"""The flushes of a job: where each keeps its journal and says how far it is, and what they say.

They are files of the user's in the instance, so that every node of the job sees them and they go with it. Only the
user's own processes read them; what is in them may be anything. Pure but for reading and writing these files.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

NAME: Final = ".beeond-flush"
"""The directory directly below $BEEOND. Stage-out leaves it out."""

BEAT_S: Final = 2.0
LOST_S: Final = 30.0
"""A flush that runs writes its status every `BEAT_S`; one that has not for `LOST_S` was killed."""

MAX: Final = 4096
"""Not more flushes of one job are looked at."""

_STATUS: Final = "status.json"
_TURN: Final = "turn."
_MAX_BYTES: Final = 1 << 20

Status = dict[str, Any]


def place(mount: str, source: bytes, destination: bytes, only: bytes) -> Path:
    """The directory of one flush: the same for the same paths, so that it goes on where it was stopped."""
    import hashlib

    key = hashlib.blake2b(b"\0".join((source, destination, only)), digest_size=8).hexdigest()
    return Path(mount) / NAME / key


def write(directory: Path, status: Status) -> None:
    """Replace the status in `directory`. Raises OSError."""
    import tempfile

    descriptor, temporary = tempfile.mkstemp(prefix=".status.", dir=directory)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump({**status, "beat": time.time()}, file)
        os.replace(temporary, directory / _STATUS)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def read(directory: Path) -> Status | None:
    """What the flush in `directory` says; None if there is nothing to be understood.

    `state` is `running`, `proved`, `failed`, `stopped` (in order: by a signal, or because the job ended), or `lost`.
    """
    try:
        fd = os.open(directory / _STATUS, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            status = json.loads(file.read(_MAX_BYTES))
        if not isinstance(status, dict) or not isinstance(status["state"], str):
            return None
        if status["state"] == "running" and time.time() - float(status["beat"]) > LOST_S:
            status["state"] = "lost"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return status


def read_all(mount: str) -> list[Status]:
    """The flushes of the instance at `mount`, the one that began first in front."""
    found = []
    with suppress(OSError):
        for name in sorted(os.listdir(Path(mount) / NAME))[:MAX]:
            status = read(Path(mount) / NAME / name)
            if status is not None:
                found.append(status)
    return sorted(found, key=lambda status: str(status.get("began", "")))


# --- taking turns -----------------------------------------------------------------------------------------
#
# Flushes of the same write one journal, and locks may not reach from node to node. What all nodes see is which files
# are there: `turn.N` with an odd N is a flush's that runs, with an even one nobody's. Numbers only go up, so that who
# has looked too long ago makes one that is there already, or is not the last.


def take_turn(directory: Path, node: str, run: str) -> int | None:
    """The number of the turn that `run` now has; None while another has it. Raises OSError.

    The caller holds the lock, which keeps those of its `node` apart: a turn of this node's is one that was killed.
    """
    last = _last_turn(directory)
    if last % 2 and not _is_over(directory, last, node):
        return None
    number = last + 1 + last % 2
    path = _turn(directory, number)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return None
    try:
        with open(fd, "w") as file:
            json.dump({"node": node, "run": run}, file)
        turns = _turns(directory)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    if max(turns, default=0) > number:
        path.unlink(missing_ok=True)
        return None
    for old in turns:
        if old < number:
            with suppress(OSError):
                _turn(directory, old).unlink()
    return number


def has_turn(directory: Path, number: int) -> bool:
    """Whether nobody has taken over from the turn `number`."""
    try:
        return _last_turn(directory) <= number
    except OSError:  # says nothing of that
        return True


def leave_turn(directory: Path, number: int) -> None:
    """Let the next one begin. Needs no room on a file system that is full."""
    with suppress(OSError):  # it was taken over; or the status says that it has ended
        os.rename(_turn(directory, number), _turn(directory, number + 1))


def _turn(directory: Path, number: int) -> Path:
    return directory / f"{_TURN}{number}"


def _turns(directory: Path) -> list[int]:
    names = [name.removeprefix(_TURN) for name in os.listdir(directory) if name.startswith(_TURN)]
    return [int(name) for name in names if name.isdecimal()]


def _last_turn(directory: Path) -> int:
    return max(_turns(directory), default=0)


def _is_over(directory: Path, number: int, node: str) -> bool:
    """Whether the flush that has the turn `number` has ended or was killed. Raises OSError."""
    try:
        fd = os.open(_turn(directory, number), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:  # it has just ended
        return False
    with open(fd, "rb") as file:
        made = os.fstat(fd).st_mtime
        try:
            claim = json.loads(file.read(_MAX_BYTES))
            of, run = claim["node"], claim["run"]
        except (ValueError, KeyError, TypeError, RecursionError):  # not written yet, or killed before
            of, run = None, None
    if of == node:
        return True
    status = read(directory)
    if status is not None and run is not None and status.get("run") == run:
        return bool(status["state"] != "running")
    # Not begun yet, or a status that could not be read; each that is written makes the directory newer.
    return time.time() - max(made, os.stat(directory).st_mtime) > LOST_S
