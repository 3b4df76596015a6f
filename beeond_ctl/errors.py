"""Every exception of the product, in one place.

    BeeondError                what, where, why, next step: one line
    ├── UsageError             bad command line, request or configuration          exit 2
    │   ├── RequestError       what the user asked for is malformed or not allowed
    │   └── ConfigError        the site's configuration is malformed
    ├── UserError              a mistake of the job's user, found on a node: fails the job, drains nothing
    ├── NodeError              a fault of a node: fails the Prolog or Epilog there, and only there
    │   ├── EndedError         this process was told to end (SIGTERM, SIGINT)
    │   └── OutsideError       nobody's fault in bring-up (slurmctld is silent): fails the job, drains nothing
    ├── PeerError              another node failed or did not come; this one is innocent
    ├── JobGoneError           the job was cancelled or requeued while we worked for it
    ├── OutputError            what there is to say cannot be written
    └── RetainedError          the data was kept because it is not proved to be on global storage

Only `beeond_ctl.cli` turns an exception into a message and an exit code.
"""

from __future__ import annotations

from typing import Final

_SHOWN: Final = 500
"""Characters of a user's text in a message: slurmctld keeps and prints what it is told."""


class BeeondError(Exception):
    """Base of all: `str()` is one line that says what, where, why and what to do next."""

    exit_code = 1


class UsageError(BeeondError):
    """Bad command line, request or configuration."""

    exit_code = 2


class RequestError(UsageError):
    """What the user asked for is malformed or not allowed; names option, value and what would be right."""


class ConfigError(UsageError):
    """The site's configuration is missing, unreadable, unsafe or malformed. `mistakes` has a line for each."""

    def __init__(self, message: str, mistakes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.mistakes = mistakes or (message,)


class UserError(BeeondError):
    """A mistake of the job's user that only a node could find (a missing source, a full quota)."""


class NodeError(BeeondError):
    """A fault of this node (a dead device, a daemon that will not start)."""


class EndedError(NodeError):
    """This process was told to end, and has to roll back."""


class OutsideError(NodeError):
    """Why a job gets no file system though none of its nodes is at fault: slurmctld is silent, a user has its ports."""


class PeerError(BeeondError):
    """Another node of the job failed or did not come.

    `user_fault` tells whether what failed elsewhere was the user's mistake; `nodes` are those at fault, if any is.
    """

    def __init__(self, message: str, nodes: tuple[str, ...] = (), *, user_fault: bool = False) -> None:
        super().__init__(message)
        self.nodes = nodes
        self.user_fault = user_fault


class JobGoneError(BeeondError):
    """The job was cancelled, or ended, while its file system was still being made."""


class OutputError(BeeondError):
    """Standard output cannot be written. What was to be done may be done."""


class RetainedError(BeeondError):
    """Stage-out is not proved: the instance's data was kept."""


def visible(text: str) -> str:
    r"""`text` with escapes for what is not printable: users' names may hold what a terminal obeys.

    >>> visible("a\x1b[2Jé")
    'a\\x1b[2Jé'
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shortened(text: str, most: int = _SHOWN) -> str:
    """The beginning of `text`, where it is too long for a message.

    >>> shortened("a" * 500)[-2:], shortened("a" * 501)[-2:]
    ('aa', 'a…')
    """
    return text if len(text) <= most else f"{text[:most]}…"


def one_line(error: BaseException) -> str:
    """The message of `error` on one printable line; an error of the system gets its class name in front."""
    text = visible(" ".join(str(error).split())) or type(error).__name__
    if isinstance(error, (BeeondError, OSError)):
        return text
    return f"{type(error).__name__}: {text}"
