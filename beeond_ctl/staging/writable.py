"""Can the user write where a stage-out is to go? A program that runs as the user, and the function that asks it.

Told before the job runs, a wrong destination costs a line; told afterwards, it costs the nodes that keep the data.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from beeond_ctl.staging.job import Identity


def unwritable(paths: Sequence[bytes], user: Identity | None, timeout_s: float) -> list[tuple[bytes, str]]:
    """Those of `paths` (absolute) at which `user` could not make or replace anything, and why.

    Storage that does not answer within `timeout_s` seconds is given the benefit of the doubt. Raises OSError when the
    program cannot be started.
    """
    import subprocess

    from beeond_ctl.staging.spawn import end, spawn

    child = spawn("writable", user)
    try:
        answer, _ = child.communicate(b"\0".join(paths), timeout_s)
    except subprocess.TimeoutExpired:
        return []
    finally:
        end(child)
    reasons = answer.decode(errors="replace").split("\0")
    if len(reasons) != len(paths):
        return []
    return [(path, reason[:200]) for path, reason in zip(paths, reasons, strict=True) if reason]


def why_not(path: bytes) -> str:
    """Why this process can put nothing at `path`; empty where it can.

    Looks at the nearest directory that exists: stage-out makes the rest.
    """
    place = path.rstrip(b"/") or b"/"
    if not os.path.isdir(place):
        place = os.path.dirname(place)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    shown = repr(os.fsdecode(place))
    if not os.path.isdir(place):
        return f"{shown} is not a directory"
    try:
        if not os.access(place, os.W_OK | os.X_OK):
            read_only = os.statvfs(place).f_flag & os.ST_RDONLY
            return f"{shown} is {'read-only' if read_only else 'not yours to write'}"
    except OSError as error:
        return f"{shown}: {error.strerror}"
    return ""


def main() -> None:
    """Answer the question on standard input: paths, separated by NUL; the answers likewise."""
    paths = sys.stdin.buffer.read().split(b"\0")
    sys.stdout.buffer.write("\0".join(map(why_not, paths)).encode(errors="backslashreplace"))
