"""Can the user read all of a source, and how much is in it? Asked while a job is pending.

Looks with the eyes of whoever calls. Knows nothing of jobs. It does not say which files there are: what is copied is
what stage-in finds, which is later.
"""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import asdict, dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_EXAMPLES = 3


@dataclass(slots=True)
class Look:
    """What was seen of one source. `trouble` is why nothing of it can be had; `whole` whether all was seen."""

    trouble: str = ""
    files: int = 0
    size: int = 0
    """Bytes that a copy takes at least: holes and second names are not counted."""
    largest: int = 0
    unreadable: int = 0
    examples: list[str] = field(default_factory=list)
    """Some of what is unreadable, each with the reason."""
    whole: bool = False


def look(path: str, deadline: float) -> Look:
    """Walk `path` until it is all seen, or `time.monotonic()` has reached `deadline`."""
    seen = Look()
    try:
        info = os.stat(path)
        if stat.S_ISREG(info.st_mode):
            _file(seen, path, info, set())
            if seen.unreadable:
                seen.trouble = "cannot be read: Permission denied"
            seen.whole = True
        elif stat.S_ISDIR(info.st_mode):
            os.scandir(path).close()
            seen.whole = _walk(seen, path, deadline)
        else:
            seen.trouble = "is neither a file nor a directory"
    except (FileNotFoundError, NotADirectoryError):
        seen.trouble = "does not exist"
    except OSError as error:
        seen.trouble = f"cannot be read: {error.strerror}"
    return seen


def _walk(seen: Look, top: str, deadline: float) -> bool:
    """Whether all of `top` was seen."""
    pending, links = [top], set[tuple[int, int]]()
    while pending:
        path = pending.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if time.monotonic() > deadline:
                        return False
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISDIR(info.st_mode):
                        pending.append(entry.path)
                    elif stat.S_ISREG(info.st_mode):
                        _file(seen, entry.path, info, links)
        except FileNotFoundError:
            continue
        except OSError as error:
            _unreadable(seen, path, error.strerror)
    return True


def _file(seen: Look, path: str, info: os.stat_result, links: set[tuple[int, int]]) -> None:
    if info.st_nlink > 1:
        if (info.st_dev, info.st_ino) in links:
            return
        links.add((info.st_dev, info.st_ino))
    seen.files += 1
    seen.size += min(info.st_size, info.st_blocks * 512)
    seen.largest = max(seen.largest, min(info.st_size, info.st_blocks * 512))
    if not os.access(path, os.R_OK):
        _unreadable(seen, path, "Permission denied")


def _unreadable(seen: Look, path: str, why: str | None) -> None:
    seen.unreadable += 1
    if len(seen.examples) < _EXAMPLES:
        seen.examples.append(f"{path}: {why}")


def look_at(paths: Sequence[str], within_s: float) -> bytes:
    """A `Look` at each of `paths`, as JSON."""
    deadline = time.monotonic() + within_s
    return json.dumps([asdict(look(path, deadline)) for path in paths]).encode()
