"""The write probe: a mount is not readiness, so each node writes, and another one reads it."""

from __future__ import annotations

import secrets
import threading
from typing import TypeVar, TYPE_CHECKING

from beeond_ctl.errors import NodeError

if TYPE_CHECKING:
    from pathlib import Path
    from collections.abc import Callable

T = TypeVar("T")


def within(deadline_s: float, what: str, action: Callable[[], T]) -> T:
    """The result of `action`, which may hang in the kernel. Raises NodeError with `what` when it does.

    The thread that hangs is left behind: it ends with this process, or with the mount.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(action())
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(deadline_s)
    if thread.is_alive():
        raise NodeError(f"{what} within {deadline_s:.0f} s; see the services' logs")
    if errors:
        error = errors[0]
        if isinstance(error, OSError):
            raise NodeError(f"{what} ({error}); see the services' logs") from error
        raise error
    return results[0]


def write(point: Path, node: str) -> None:
    """Leave this node's mark below the mount `point`. Making a directory needs every server of the file system."""
    directory = point / f".beeond-probe-{node}"
    directory.mkdir(mode=0o700)
    (directory / "mark").write_text(node)


def check(point: Path, node: str) -> None:
    """Read the mark of `node`, and remove it. Raises NodeError when it says something else, OSError when it is not there."""
    directory = point / f".beeond-probe-{node}"
    found = (directory / "mark").read_text()
    if found != node:
        raise NodeError(f"{point}: what {node} wrote reads {found!r} here; the file system is not one")
    (directory / "mark").unlink()
    directory.rmdir()


def touch(point: Path) -> None:
    """Make and remove a directory, which needs every server. Safe in a directory that a user owns: neither call
    follows a link, and the name cannot be guessed. Raises OSError."""
    path = point / f".beeond-probe-{secrets.token_hex(8)}"
    path.mkdir(mode=0)
    path.rmdir()
