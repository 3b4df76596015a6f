"""A whole transfer on this machine: coordinator and copiers in one process tree."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from beeond_ctl.staging.coordinator import Coordinator
from beeond_ctl.staging.worker import serve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from beeond_ctl.staging.transfer import Identity, Job, Progress, Summary

_NODE = "localhost"


def copy_local(
    job: Job,
    user: Identity | None = None,
    *,
    journal_dir: Path,
    progress: Callable[[Progress], None] | None = None,
    progress_every_s: float = 0.5,
    workers: int | None = None,
    stall_timeout_s: float = 600.0,
) -> Summary:
    """Copy `job` as `user` (None: as we are) and say what came of it.

    Stops when nothing was finished for `stall_timeout_s`. An exception that `progress` raises, and
    KeyboardInterrupt, stop the copiers and pass; the transfer can be resumed. Raises OSError when the journal
    cannot be written or no process started.
    """
    coordinator = Coordinator(job, user, journal_dir, [_NODE])
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            serve(
                lambda: coordinator.take(_NODE),
                lambda result: coordinator.report(_NODE, result),
                user,
                stop,
                processes=workers,
                pause=coordinator.wait,
            )
        except BaseException as error:  # noqa: BLE001 (raised again below)
            errors.append(error)

    thread = threading.Thread(target=work, name="staging")
    thread.start()
    try:
        while thread.is_alive():
            thread.join(progress_every_s)
            now = coordinator.progress()
            if progress is not None:
                progress(now)
            if now.idle_s > stall_timeout_s and not coordinator.finished():
                coordinator.cancel(f"nothing was finished for {stall_timeout_s:.0f} s; is it there?")
                stop.set()
    except BaseException:
        coordinator.cancel("interrupted")
        stop.set()
        raise
    finally:
        thread.join()
        coordinator.close()
    if errors:
        raise errors[0]
    return coordinator.summary()
