"""A whole transfer by one process: the coordinator, this machine's copiers, and others that help, if there are any."""

from __future__ import annotations

import threading
import time

from beeond_ctl.staging.begin import Begun
from beeond_ctl.staging.spawn import start
from beeond_ctl.staging.worker import serve

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from beeond_ctl.staging.job import Identity, Job
    from beeond_ctl.staging.spread import Others
    from beeond_ctl.staging.transfer import Progress, Summary

_NODE = "localhost"
_LOOK_S = 0.25


def copy_local(
    job: Job,
    user: Identity | None = None,
    *,
    journal_dir: str | os.PathLike[str],
    progress: Callable[[Progress], None] | None = None,
    progress_every_s: float = 0.5,
    workers: int | None = None,
    stall_timeout_s: float = 600.0,
    others: Others | None = None,
    news: Callable[[str], None] | None = None,
) -> Summary:
    """Copy `job` as `user` (None: as we are) and say what came of it.

    `others` are further machines that copy; `news` gets a line for each of them that is lost or did not come.

    Stops when nothing was finished for `stall_timeout_s`. An exception that `progress` raises, and
    KeyboardInterrupt, stop the copiers and pass; the transfer can be resumed. Raises OSError when the journal
    cannot be written or no process started.
    """
    node = others.here if others else _NODE
    nodes = [node, *(others.nodes if others else ())]
    begun = Begun(job, user, journal_dir, len(nodes))
    try:
        from beeond_ctl.staging.coordinator import Coordinator  # while the scanner starts

        coordinator = Coordinator(job, begun, nodes)
    except BaseException:
        begun.undo()
        raise
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            serve(
                lambda: coordinator.take(node),
                lambda result: coordinator.report(node, result),
                user,
                stop,
                processes=workers,
                pause=coordinator.wait,
            )
        except BaseException as error:  # noqa: BLE001 (raised again below)
            errors.append(error)

    thread = threading.Thread(target=work, name="staging")
    try:
        start(thread)
    except OSError:
        coordinator.cancel("not begun")
        coordinator.close()
        raise
    try:
        due_s = time.monotonic() + progress_every_s
        over = False
        while not over:
            left_s = max(0.0, due_s - time.monotonic())
            thread.join(min(left_s, _LOOK_S) if others else left_s)
            over = not thread.is_alive()
            for line in others.look(coordinator) if others else ():
                (news or _ignore)(line)
            now = coordinator.progress()
            if over or time.monotonic() >= due_s:
                due_s = time.monotonic() + progress_every_s
                (progress or _ignore)(now)
            if now.idle_s > stall_timeout_s and not coordinator.finished():
                coordinator.cancel(f"nothing was finished for {stall_timeout_s:.0f} s; is it there?")
                stop.set()
    except BaseException:
        coordinator.cancel("interrupted")
        stop.set()
        raise
    finally:
        thread.join()
        if others is not None:
            others.close()
        coordinator.close()
    if errors:
        raise errors[0]
    return coordinator.summary()


def _ignore(_: object) -> None:
    return None
