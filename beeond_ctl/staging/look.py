"""Can the user read all of a source, and how much is in it? Asked while a job is pending.

Looks with the eyes of whoever calls. Knows nothing of jobs. What it sees may be written down for stage-in (`listing`).
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import zip_longest

from beeond_ctl.staging.child import starts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from beeond_ctl.staging.listing import Writer

_EXAMPLES = 3
_SLOW_S, _CERTAIN_S, _THREADS = 0.0003, 0.1, 15
"""Where entries take longer than this on average, and all of them so long, that many more threads walk."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


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
    unlisted: str = ""
    """Why there is no list of it, though one was wanted."""


def look(path: str, deadline: float, list_path: str = "") -> Look:
    """Walk `path` until it is all seen, or `time.monotonic()` has reached `deadline`.

    A directory is listed in `list_path`, if that is given, as far as it is seen, unless stage-in would fail.
    """
    seen = Look()
    try:
        info = os.stat(path)
        if stat.S_ISREG(info.st_mode):
            _count(seen, info, set())
            if not os.access(path, os.R_OK):
                _unreadable(seen, path, "Permission denied")
                seen.trouble = "cannot be read: Permission denied"
            seen.whole = True
        elif stat.S_ISDIR(info.st_mode):
            os.scandir(path).close()
            _walk_listing(seen, path, deadline, list_path)
        else:
            seen.trouble = "is neither a file nor a directory"
    except (FileNotFoundError, NotADirectoryError):
        seen.trouble = "does not exist"
    except OSError as error:
        seen.trouble = f"cannot be read: {error.strerror}"
    return seen


def _walk_listing(seen: Look, top: str, deadline: float, list_path: str) -> None:
    writer = None
    if list_path:
        from beeond_ctl.staging.listing import ListError, Writer

        try:
            writer = Writer(list_path, top)
        except (OSError, ListError) as error:
            seen.unlisted = str(error)
    try:
        seen.whole = _Walk(seen, top, deadline, writer).run()
    finally:
        if writer is not None:
            try:
                writer.close(keep=not (seen.unlisted or seen.unreadable))
            except OSError as error:
                seen.unlisted = str(error)


class _Walk:
    """A walk through `top`: by one thread, or by many, each with a directory of its own, where calls wait."""

    def __init__(self, seen: Look, top: str, deadline: float, writer: Writer | None) -> None:
        self.seen, self.top, self.deadline, self.writer = seen, top, deadline, writer
        self.lock = threading.Condition()
        self.pending = [""]
        self.busy = self.entries = 0
        self.late = False
        self.links: set[tuple[int, int]] = set()
        self.begun_s = time.monotonic()
        self.threads: list[threading.Thread] = []

    def run(self) -> bool:
        """Whether all of it was seen."""
        self._work()
        for thread in self.threads:
            thread.join()
        return not self.late

    def _work(self) -> None:
        """Take directories until none is left or to come."""
        while True:
            with self.lock:
                self.lock.wait_for(lambda: bool(self.pending) or not self.busy or self.late)
                if self.late or not self.pending:
                    return
                path = self.pending.pop()
                self.busy += 1
            below, late = list[str](), True  # whatever else may be raised: not all was seen
            try:
                below, late = self._visit(path)
            finally:
                with self.lock:
                    self.busy -= 1
                    self.pending += below
                    self.late = self.late or late
                    self._widen()
                    self.lock.notify_all()

    def _widen(self) -> None:
        """Have more threads if calls wait, and there is something to do for them."""
        slow = time.monotonic() - self.begun_s > max(_CERTAIN_S, self.entries * _SLOW_S)
        if slow and len(self.pending) > 1 and not self.threads:
            for _ in range(_THREADS):
                thread = threading.Thread(target=self._work, daemon=True)
                if not starts(thread):
                    break  # with those that the system allows
                self.threads.append(thread)

    def _visit(self, path: str) -> tuple[list[str], bool]:
        """The directories in the one at `path`, and whether there was no time for all that is in it."""
        full = f"{self.top}/{path}" if path else self.top
        try:
            fd = os.open(full, _DIRECTORY | (os.O_NOFOLLOW if path else 0))
        except (FileNotFoundError, NotADirectoryError):
            return [], False
        except OSError as error:
            self._unreadable(full, error.strerror)
            return [], False
        try:
            return self._read(path, full, fd)
        except OSError as error:
            self._unreadable(full, error.strerror)
            return [], False
        finally:
            os.close(fd)

    def _read(self, path: str, full: str, fd: int) -> tuple[list[str], bool]:
        """As `_visit`, of a directory that is open. Raises OSError."""
        below: list[str] = []
        noted = self.writer.begin(fd) if self.writer is not None else None
        with os.scandir(fd) as entries:
            for entry in entries:
                if time.monotonic() > self.deadline:
                    return below, True
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    noted = None
                    continue
                if stat.S_ISDIR(info.st_mode):
                    below.append(f"{path}/{entry.name}" if path else entry.name)
                elif stat.S_ISREG(info.st_mode):
                    self._file(f"{full}/{entry.name}", info)
                if noted is not None:
                    noted.add(entry.name, info)
                self.entries += 1
        if self.writer is not None and noted is not None:
            line = self.writer.line(path, noted)
            with self.lock:
                try:
                    self.writer.add(line)
                except OSError as error:
                    self.seen.unlisted = str(error)
        return below, False

    def _file(self, path: str, info: os.stat_result) -> None:
        readable = os.access(path, os.R_OK)
        with self.lock:
            _count(self.seen, info, self.links)
        if not readable:
            self._unreadable(path, "Permission denied")

    def _unreadable(self, path: str, why: str | None) -> None:
        with self.lock:
            _unreadable(self.seen, path, why)


def _count(seen: Look, info: os.stat_result, links: set[tuple[int, int]]) -> None:
    if info.st_nlink > 1:
        if (info.st_dev, info.st_ino) in links:
            return
        links.add((info.st_dev, info.st_ino))
    seen.files += 1
    seen.size += min(info.st_size, info.st_blocks * 512)
    seen.largest = max(seen.largest, min(info.st_size, info.st_blocks * 512))


def _unreadable(seen: Look, path: str, why: str | None) -> None:
    seen.unreadable += 1
    if len(seen.examples) < _EXAMPLES:
        seen.examples.append(f"{path}: {why}")


def look_at(paths: Sequence[str], within_s: float, list_paths: Sequence[str] = ()) -> bytes:
    """A `Look` at each of `paths`, as JSON. `list_paths`: where each is to be listed."""
    deadline = time.monotonic() + within_s
    seen = [look(path, deadline, to) for path, to in zip_longest(paths, list_paths, fillvalue="")]
    return json.dumps([asdict(each) for each in seen]).encode()


def forget(list_paths: Sequence[str]) -> bytes:
    """Remove lists that nobody will use."""
    from beeond_ctl.staging.listing import ListError, remove

    for path in list_paths:
        with suppress(OSError, ListError):
            remove(path)
    return b"0"
