"""Appends a text to a file of the user's, such as the output of a job that has ended. A program of its own.

Reads the path, NUL and the text from standard input. Only a file that is there already is written to, and never through
a link in its place. Runs as the user.
"""

from __future__ import annotations

import os
import stat
import sys

from beeond_ctl.staging import child

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAX = 64 << 10


def append(path: bytes, text: bytes) -> str:
    """Append `text`, and say why it was not."""
    try:
        fd = os.open(path, _FLAGS)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return "not a file"
        os.write(fd, text)
    except OSError as error:
        return error.strerror or "unknown"
    return ""


def _main() -> None:
    path, _, text = sys.stdin.buffer.read(_MAX).partition(b"\0")
    sys.stdout.write(append(path, text))


def main() -> None:
    """The program (see `spawn`)."""
    child.run(_main)
