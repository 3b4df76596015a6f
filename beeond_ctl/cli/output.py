"""Standard output of commands that people type: closed, or where nothing can be written."""

from __future__ import annotations

import io
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from beeond_ctl.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator


def prepare() -> None:
    """See that there is one, and that its errors are not taken for those of what is copied."""
    told = sys.stdout
    if None in (sys.stdin, told, sys.stderr):
        _fill()
    encoding, errors = (told.encoding, told.errors) if told else ("utf-8", "strict")
    descriptor = open(1, "wb", closefd=False)  # noqa: SIM115 (for as long as we run)
    sys.stdout = _Output(descriptor, encoding, errors, line_buffering=os.isatty(1))


def _fill() -> None:
    """Have nothing where a descriptor of 0 to 2 is closed: a journal would get its number, and what is said."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115 (for as long as we run)
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8")  # noqa: SIM115


class _Output(io.TextIOWrapper):
    def write(self, text: str) -> int:
        with _told():
            return super().write(text)

    def flush(self) -> None:
        with _told():
            super().flush()


@contextmanager
def _told() -> Iterator[None]:
    """Raises OutputError for OSError, but not where nobody reads any more."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"standard output cannot be written: {error.strerror}; send it elsewhere"
        ) from error
