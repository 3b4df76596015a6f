"""Calls of the C library that Python has no way to make."""

from __future__ import annotations

import os


def call(name: str, *arguments: bytes | int) -> None:
    """Call the function `name`, which says by 0 that all went well, else by errno(3). Raises OSError."""
    import ctypes  # takes milliseconds, and is seldom needed where they count

    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
