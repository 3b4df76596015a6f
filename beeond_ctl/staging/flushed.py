"""What flushes during the job have proved, for a transfer of the whole that comes after them. Runs as the user.

A flush is a transfer of a part with the same source and destination as the whole, so that its journal's proofs are
those that the whole would have made. They are evidence of the same kind as an earlier run of the whole, and are used
in the same way: a file counts only if its size, times and inode are still those that were proved, and the destination
has a file of that size and time. Others could write to the source meanwhile and after: only what they had left alone
was proved (see `quiet`), and only journals of transfers that took care of that count (`live`).

The journals are the user's own files, and may say anything. Whoever forges them makes this program, which has no more
rights than they, leave out their own files, as if they had deleted them.
"""

from __future__ import annotations

import os
import stat
from array import array

from beeond_ctl.staging import wire
from beeond_ctl.staging.journal import records
from beeond_ctl.staging.proof import marks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MAX_JOURNALS = 4096
"""Not more are read."""

STALE_S = 1.5
"""A client of a network file system may show attributes that are older than that by a second, not more (GlusterFS's
attribute-timeout; BeeGFS's tuneDirSubentryCacheValidityMS)."""


class Flushed:
    """What flushes of a transfer have done: fingerprints of what they have proved, tokens of those that did not end in
    order, with the directories that these have written in and the mode that the destination's root had before them, and
    whether one of them made it."""

    def __init__(
        self,
        marks: array[int],
        tokens: list[str],
        dirs: list[list[str]] | None = None,
        *,
        root_made: bool = False,
        root_mode: int | None = None,
    ) -> None:
        self.marks, self.tokens, self.dirs = marks, tokens, dirs or []
        self.root_made, self.root_mode = root_made, root_mode


def known(directory: str, whole: dict[str, Any]) -> Flushed:
    """What the journals in `directory` tell of the transfer with the header `whole`. The rest proves nothing."""
    found, tokens, dirs, root_made, root_mode = array("Q"), [], [], False, None
    for fd in _journals(directory):
        token, written, mode = "", [], None
        try:
            for kind, text in records(fd):
                if kind == "header":
                    header = wire.loads(text)
                    token = str(header["token"]) if _counts(header, whole) else ""
                if not (token and kind):  # another transfer's, or zeros without end
                    break
                if kind == "proof":
                    found += marks(text)
                elif kind == "run":
                    tokens.append(token)
                elif kind == "dirs":
                    written.append([str(path) for path in wire.loads(text)])
                elif kind == "root":
                    root_made = True
                elif kind == "mode":
                    mode = int(text, 8) & 0o7777
                elif kind == "closed":
                    tokens.remove(token)
                    written.clear()
                    mode = None
        except (OSError, wire.ProtocolError, ValueError, TypeError, KeyError, AttributeError):
            continue  # what was read until there counts
        finally:
            os.close(fd)
            dirs += written
            root_mode = root_mode if mode is None else mode
    tokens = sorted({token for token in tokens if wire.is_token(token)})
    return Flushed(found, tokens, dirs, root_made=root_made, root_mode=root_mode)


def _journals(directory: str) -> Iterator[int]:
    """Descriptors of the journals in `directory`, each to be closed by the caller."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for flush in _listed(directory)[:MAX_JOURNALS]:
        names = _listed(os.path.join(directory, flush))
        for name in names[:8]:
            if not name.endswith(".journal"):
                continue
            try:
                fd = os.open(os.path.join(directory, flush, name), flags)
            except OSError:
                continue
            info = os.fstat(fd)
            if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
                yield fd
            else:
                os.close(fd)


def _listed(directory: str) -> list[str]:
    """What is in a directory of ours; nothing in what is another user's, a link, or not there."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return sorted(os.listdir(fd)) if os.fstat(fd).st_uid == os.geteuid() else []
    except OSError:
        return []
    finally:
        os.close(fd)


def _counts(header: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Whether what a journal with this `header` proves also proves it for the transfer `whole`. Raises ValueError."""
    return (
        all(header.get(key) == whole[key] for key in ("version", "hash"))
        and all(_path(header.get(key)) == _path(whole[key]) for key in ("source", "destination"))
        and header.get("durable") is True
        and header.get("live") is True
        and bool(header.get("read_back") or not whole["read_back"])
    )


def _path(text: object) -> bytes:
    return os.path.normpath(bytes.fromhex(str(text)))


def is_remote(path: str) -> bool:
    """Whether `path` may be on a file system of other machines: those on a device of this one have a device number."""
    return os.major(os.stat(path).st_dev) == 0
