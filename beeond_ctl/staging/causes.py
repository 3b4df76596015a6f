"""Why an entry was not copied: the classes that failures are folded into. Pure."""

from __future__ import annotations

import errno

CAUSES = {
    "missing": "no longer there",
    "denied": "permission denied",
    "no-space": "no space left",
    "quota": "quota exceeded",
    "read-only": "read-only file system",
    "io-error": "input/output error",
    "stale": "stale file handle",
    "unreachable": "file system does not answer",
    "name-too-long": "name too long",
    "too-large": "file too large",
    "in-the-way": "something of another kind is in its place",
    "changed": "changed while it was copied",
    "mismatch": "reads back differently from what was written",
    "first-link": "its first hard link was not copied",
    "same-name": "its name is that of another entry, in another spelling,",
    "spelling": "what is wanted is there only in another spelling",
    "mounted": "another file system is mounted there",
    "is-source": "it is the source, or has it in it",
    "lost": "the process that copied it died",
    "other": "other error",
}
"""Each class and how it reads in a message."""

LOST = "lost"
"""Nobody can name what was not copied: its examples are reasons, not names."""

NO_ROOM = ("no-space", "quota")
"""What may be over when something else at the destination has been given up."""

_BY_ERRNO = {
    errno.ENOENT: "missing",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.ENOSPC: "no-space",
    errno.EDQUOT: "quota",
    errno.EROFS: "read-only",
    errno.EIO: "io-error",
    errno.ESTALE: "stale",
    errno.ENOTCONN: "unreachable",
    errno.EHOSTDOWN: "unreachable",
    errno.EHOSTUNREACH: "unreachable",
    errno.ETIMEDOUT: "unreachable",
    errno.ENAMETOOLONG: "name-too-long",
    errno.EFBIG: "too-large",
    errno.ELOOP: "in-the-way",
    errno.ENOTDIR: "in-the-way",
    errno.EISDIR: "in-the-way",
    errno.ENOTEMPTY: "in-the-way",
    errno.EEXIST: "in-the-way",
}


class StagingError(Exception):
    """One entry was not copied, for a reason that no errno stands for."""

    def __init__(self, cause: str, text: str = "") -> None:
        """`cause` is one of CAUSES; `text` says more."""
        super().__init__(text or CAUSES[cause])
        self.cause = cause


def cause_of(error: OSError | StagingError) -> str:
    """The class of `error`.

    >>> cause_of(OSError(errno.ENOSPC, "full"))
    'no-space'
    """
    if isinstance(error, StagingError):
        return error.cause
    return _BY_ERRNO.get(error.errno or 0, "other")


def text_of(error: OSError | StagingError) -> str:
    """What the system said, without a path."""
    if isinstance(error, StagingError):
        return str(error)
    return error.strerror or type(error).__name__
