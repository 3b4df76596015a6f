"""Sizes as people write them. Pure."""

from __future__ import annotations

import re

from beeond_ctl.errors import shortened

_SIZE = re.compile(r"(\d{1,19})(?:(k|m|g|t|p)(i?b)?|b)?", re.IGNORECASE | re.ASCII)
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_size(text: str) -> int:
    """Bytes meant by `text`: `512k`, `1MiB`, `2TB`, `4096`.

    All multiples are binary, as in BeeGFS's and Slurm's own options.

    >>> parse_size("1MiB"), parse_size("2g"), parse_size("10")
    (1048576, 2147483648, 10)

    Raises ValueError when `text` is not a positive size below 8 EiB.
    """
    match = _SIZE.fullmatch(text.strip())
    value = int(match[1]) * 1024 ** _POWER.get((match[2] or "").lower(), 0) if match else 0
    if not 0 < value < 2**63:  # more is no size of a file (off_t)
        raise ValueError(f"{shortened(text)!r} is not a size such as 512KiB, 1MiB or 2TiB")
    return value


def check_chunk(size: int) -> int:
    """`size`, if BeeGFS can have chunks of so many bytes: 32 bits, and a power of two. Raises ValueError."""
    if not 64 * 1024 <= size <= 2 * 1024**3 or size & (size - 1):
        raise ValueError("want a power of two from 64KiB to 2GiB, such as 1MiB")
    return size


def format_size(size: int) -> str:
    """`size` bytes with the largest binary unit that keeps it short.

    >>> format_size(1536), format_size(2**40), format_size(7)
    ('1.5KiB', '1TiB', '7B')
    """
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            return f"{value:.1f}".rstrip("0").rstrip(".") + unit
        value /= 1024
    return f"{value:.1f}".rstrip("0").rstrip(".") + "PiB"


def format_entries(count: int) -> str:
    """A number of files, directories and the like.

    >>> format_entries(1), format_entries(2)
    ('1 entry', '2 entries')
    """
    return "1 entry" if count == 1 else f"{count} entries"


def duration(seconds: float) -> str:
    """`seconds` as a person says it: 42 s, 3:07 min, 2:05 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
