"""Work on a file system that may hang, in a process that can be left behind.

A thread cannot: a process with one thread in uninterruptible sleep is not reaped, whatever its others do. Knows nothing
of what the work is.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import signal
import time
from contextlib import suppress

from beeond_ctl.errors import one_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


_CHECK_S = 0.1


def aside(work: Callable[[], bytes], *, within_s: float, check: Callable[[], object] = bool) -> bytes:
    """What `work` returns; nothing where it failed, or took longer than `within_s` seconds.

    `check`, called meanwhile, may end the waiting by raising something.

    The forked process has nothing open of ours but the way to answer: no pipe that somebody reads to its end, and no
    lock. It is killed when its time is over, where it can be, and never waited for. Raises OSError when there is none.
    """
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        raise
    if child == 0:
        try:
            answering = _leave(writing, within_s)
            answer = memoryview(work())
            while answer:
                answer = answer[os.write(answering, answer) :]
            os.close(answering)  # before what takes long: giving the memory back
        finally:
            os._exit(0)
    os.close(writing)
    try:
        return _answer(reading, time.monotonic() + within_s, check)
    finally:
        os.close(reading)
        with suppress(
            ProcessLookupError
        ):  # what hangs in a mount would keep it busy; what has answered is ending
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):  # one that still ends is reaped by who reaps us
            os.waitpid(child, os.WNOHANG)


def tried(work: Callable[[], object], *, within_s: float, check: Callable[[], object] = bool) -> str:
    """What went wrong with `work`, which may hang; empty where all went well. `check` as for `aside`.

    Nothing that it does to this process's memory stays.
    """

    def told() -> bytes:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the caller's to tell
            return one_line(error).encode(errors="backslashreplace") or b"failed"
        return b"\0"

    try:
        answer = aside(told, within_s=within_s, check=check)
    except OSError as error:
        return one_line(error)
    return answer.decode().strip("\0") if answer else f"no answer within {within_s:.0f} s"


def _leave(keep: int, within_s: float) -> int:
    """Part with everything of the process that forked this one but `keep`; the descriptor that it now has."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(math.ceil(within_s) + 1)
    # It may be one of the streams, where whoever started us had closed them.
    keep = fcntl.fcntl(keep, fcntl.F_DUPFD, 3)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            with suppress(OSError):  # the one that the listing itself used
                os.close(int(name))
    return keep


def _answer(reading: int, deadline: float, check: Callable[[], object]) -> bytes:
    parts: list[bytes] = []
    poll = select.poll()  # select(2) takes no descriptor from 1024 on, which the leader of many nodes has
    poll.register(reading, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        if not poll.poll(min(left_s, _CHECK_S) * 1000):
            check()
            continue
        part = os.read(reading, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return b""
