"""What the programs that touch files have in common. Runs as the user."""

from __future__ import annotations

import errno
import os
import sys
import time

from beeond_ctl.staging.engine import engine

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

PREFIX = ".beeond-ctl."
"""How every temporary name begins."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_parents(path: str) -> None:
    """Make the directory `path` and what is missing above it. Raises OSError.

    Nobody's umask is known here. What is made lets everybody read, as with the usual one, but nobody do more than in
    the directory that it is made in.
    """
    path = path.rstrip("/") or "/"
    try:
        missing = _make(path)
    except FileNotFoundError:
        make_parents(os.path.dirname(path))
        missing = _make(path)  # or it is there now: `missing/..`
    if not missing:
        return
    above = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        made = os.open(os.path.basename(path), _DIRECTORY, dir_fd=above)
        try:
            inherited = os.fstat(made).st_mode & 0o7000
            os.fchmod(made, inherited | 0o700 | os.fstat(above).st_mode & 0o055)
        finally:
            os.close(made)
        sync_directory(above)
    finally:
        os.close(above)


def _make(path: str) -> bool:
    """Make one directory; whether it was missing. Raises OSError."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return False
    return True


def sync_directory(fd: int) -> None:
    """Have the names in a directory survive a crash, where the file system can do that. Raises OSError."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP):
            raise


def used_s() -> tuple[float, float]:
    """Seconds that this thread has run, and those that it would have if there had been a processor for it.

    What passes beyond the latter, it waits for something: a file system, or another thread.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            ran, delayed = file.read(100).split()[:2]
        return int(ran) / 1e9, (int(ran) + int(delayed)) / 1e9
    except (OSError, ValueError):  # a kernel without scheduler statistics: as good as it can be told
        return time.thread_time(), time.thread_time()


def wanted_s() -> float:
    """The latter of `used_s`."""
    return used_s()[1]


def starts(thread: threading.Thread) -> bool:
    """Start `thread`; False where the system allows no more."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def run(main: Callable[[], None]) -> None:
    """Give up what is left of privileges, raise the limit on open files, and run `main` until its input
    ends. Other processes of the user can look into this one no more, nor have it do something else."""
    import gc
    import resource

    gc.freeze()
    gc.set_threshold(100_000)  # batches are trees of small lists that die by themselves

    engine.harden()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # the parent is gone, or wants no more
    except BaseException:  # noqa: BLE001 (it ends here)
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # nothing to clean up; a full exit takes 10 ms, and does not bear with threads that read
