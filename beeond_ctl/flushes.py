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
