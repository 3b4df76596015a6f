"""Where a transfer may not go, by what is there and not by names alone. Runs as the user."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def within(above: str, path: str) -> bool:
    """Whether `path` is the directory `above` or lies below it, whatever links lead there; neither needs to be there.

    Raises OSError.
    """
    top, path = os.path.realpath(above), os.path.realpath(path)
    try:
        root = _identity(top)
    except (FileNotFoundError, NotADirectoryError):
        root = None  # it can only be told by its name
    while path != top:
        try:
            if _identity(path) == root:
                return True
        except OSError:
            pass
        if path == "/":
            return False
        path = os.path.dirname(path)
    return True


def blocked(path: str) -> str:
    """Why `path`, which leads to nothing, cannot be taken for something that was never made; '' if it can.

    A link that leads nowhere, or a file where a directory should be, was put there by somebody who meant something.
    """
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    if not path or os.path.isdir(path):
        return ""
    name = os.path.basename(path)
    if os.path.exists(path):
        return f"{name!r} is not a directory; name a path that is there"
    return f"{name!r} is a symbolic link that leads nowhere; make what it leads to"


def _identity(path: str) -> tuple[int, int]:
    info = os.stat(path)
    return info.st_dev, info.st_ino


def _is_same(source: os.stat_result, path: str) -> bool:
    """Whether `path`, and not what a link there leads to, is what has the status `source`."""
    try:
        return os.path.samestat(source, os.lstat(path))
    except OSError:  # it is not there, or will be told by who makes it
        return False


def refusal(
    source: str, destination: str, *, name: str = "", delete: bool, outside: str, others: Iterable[str]
) -> str:
    """Why what is in `source` must not go to the directory `destination`; '' if it may.

    `name` is what it becomes there if it is a file. `delete`: what the source has not is then removed there; `others`
    are the destinations of the job's other transfers. `outside` is what the copy must not lie in. Raises OSError.
    """
    if name:
        if _is_same(os.stat(source), os.path.join(destination, name)):
            return "is the same file as the source"
        source = ""
    if source and _is_same(os.stat(source), f"{destination}/."):
        return "is the source itself"
    if source and within(source, destination):
        return "lies within the source"
    if outside and within(outside, destination):
        return f"lies in {outside}, which goes when the job has ended"
    if not (source and delete):
        return ""
    if within(destination, source):
        return "delete would delete the source, which lies in it; take the flag away, or name another place"
    for other in others:
        if within(destination, other):
            return (
                f"delete would delete what another transfer copies to {other}; "
                "take the flag away, or name another place"
            )
    return ""
