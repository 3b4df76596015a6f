"""A node's share of a transfer: copier processes that do what a coordinator, wherever it is, hands out.

Knows nothing of how work and results travel: it is given two functions.
"""

from __future__ import annotations

import os
import threading
import time

from beeond_ctl.staging import wire
from beeond_ctl.staging.spawn import end, last_words, spawn, start

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from typing import Any

    from beeond_ctl.staging.job import Identity

    Work = dict[str, Any]
    Result = dict[str, Any]

KINDS = frozenset(
    {
        "look",
        "copy",
        "last",
        "apart",
        "make",
        "piece",
        "place",
        "drop",
        "link",
        "delete",
        "clean",
        "gone",
        "finish",
        "unmark",
    }
)
"""What a copier can be asked to do."""

_GRACE_S = 10.0


def default_processes() -> int:
    """Copiers that a node runs: one for each processor this process may use, within reason."""
    return max(1, min(16, len(os.sched_getaffinity(0))))


class Copier:
    """One copier process, restarted when it dies. For one thread."""

    def __init__(self, user: Identity | None) -> None:
        """Prepare; the process starts with the first work."""
        self._user = user
        self._child: subprocess.Popen[bytes] | None = None
        self._setup = ""
        self.since_s: float | None = None

    def run(self, work: Work) -> Result:
        """Do `work` (one of what `Coordinator.take` hands out) and return the result to report."""
        result: Result = {"id": work["id"], "attempt": work["attempt"]}
        self.since_s = time.monotonic()
        try:
            return {**self._ask(work), **result}
        except (OSError, wire.ProtocolError) as error:
            words = last_words(self._child) if self._child else ""
            self.close()
            return {**result, "died": words or str(error)}
        finally:
            self.since_s = None

    def start(self) -> None:
        """Start the process ahead of its first work. Raises OSError."""
        self._child = spawn("copier", self._user)

    def _ask(self, work: Work) -> Result:
        if work["kind"] not in KINDS:
            raise wire.ProtocolError("work of an unknown kind")
        child = self._child
        if child is None:
            child = self._child = spawn("copier", self._user)
            self._setup = ""
        if child.stdin is None or child.stdout is None:
            raise wire.ProtocolError("no pipes")
        if work["setup"] != self._setup:
            wire.send(child.stdin, "setup", work["setup"])
            self._setup = work["setup"]
        wire.send(child.stdin, work["kind"], work["tag"], *work["fields"])
        for fields in wire.lines(child.stdout):
            answer = wire.loads("\t".join(fields))
            if not isinstance(answer, dict) or answer.get("tag") != work["tag"]:
                raise wire.ProtocolError("an answer to another question")
            return answer
        raise wire.ProtocolError(f"copier ended with status {child.wait()}")

    def kill(self) -> None:
        """End the process from another thread; whoever waits for it gets a result that says so."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """End the process. It holds nothing that would be lost."""
        if self._child is not None:
            end(self._child)
            self._child = None


def serve(
    take: Callable[[], Work],
    report: Callable[[Result], None],
    user: Identity | None,
    stop: threading.Event,
    *,
    processes: int | None = None,
    pause: Callable[[float], object] | None = None,
    work_timeout_s: float = 600.0,
) -> None:
    """Take work, do it and report it, with `processes` copiers at once, until there is no more to do.

    `take` and `report` are called by several threads at once. `stop`, once set, kills the copiers; what they
    left is removed when the transfer is resumed. A copier that is busy with one work (64 MiB or 1024
    entries at most) for `work_timeout_s` is killed. Raises what `take` or `report` raised, TimeoutError when a
    copier cannot even be killed because a file system does not answer.
    """
    copiers = [Copier(user) for _ in range(processes or default_processes())]
    idle = copiers[::-1]  # the last one is asked first: a process that runs already rather than a new one
    errors: list[BaseException] = []

    def loop() -> None:
        try:
            while not stop.is_set():
                answer = take()
                if "done" in answer:
                    return
                if "wait" in answer:
                    (pause or stop.wait)(float(answer["wait"]))
                    continue
                copier = idle.pop()
                try:
                    result = copier.run(answer["work"])
                finally:
                    idle.append(copier)
                if not stop.is_set():
                    report(result)
        except BaseException as error:  # noqa: BLE001 (raised again below, in the caller's thread)
            errors.append(error)

    copiers[0].start()  # while the scanner starts
    threads: list[threading.Thread] = []
    try:
        for _ in copiers:
            thread = threading.Thread(target=loop, daemon=True, name="copier")
            try:
                start(thread)
            except OSError:
                if not threads:
                    raise
                break  # with those that the system allows
            threads.append(thread)
        _watch(copiers, threads, stop, work_timeout_s)
    finally:
        for copier in copiers:  # all at once, before any is waited for
            copier.kill()
        for copier in copiers:
            if copier.since_s is None:
                copier.close()
    if errors:
        raise errors[0]


def _watch(
    copiers: list[Copier], threads: list[threading.Thread], stop: threading.Event, work_timeout_s: float
) -> None:
    """Wait for `threads`, and end copiers that take too long, or all once `stop` is set. Raises TimeoutError."""
    stopped_s: float | None = None
    while (alive := next((thread for thread in threads if thread.is_alive()), None)) is not None:
        alive.join(0.2)
        now_s = time.monotonic()
        if stop.is_set():
            stopped_s = stopped_s or now_s
        for copier in copiers:
            since_s = copier.since_s
            late_s = now_s - since_s - work_timeout_s if since_s else -1.0
            if stopped_s or late_s > 0:
                copier.kill()
            if late_s > _GRACE_S or (since_s and stopped_s and now_s - stopped_s > _GRACE_S):
                raise TimeoutError("a copier cannot be ended: the file system it works on does not answer")
