"""Processes that hold something until the test has seen what it wants to see."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def started(
    words: list[str], uid: int, *descriptors: int, stdin: int | None = None
) -> subprocess.Popen[bytes]:
    """A process of user `uid` that has said that it is ready."""
    child = subprocess.Popen(
        words, stdin=stdin, stdout=subprocess.PIPE, user=uid, group=uid, extra_groups=[], pass_fds=descriptors
    )
    assert child.stdout
    assert child.stdout.readline() == b"1\n"
    return child


@contextmanager
def ending(*children: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End them at last; what is yielded is the first."""
    try:
        yield children[0]
    finally:
        for child in children:
            child.kill()
            child.wait()
