"""The 66,000 directories that every metadata server begins with. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def directories() -> Iterator[str]:
    """Those that a metadata server makes when it misses the last of them, parents first."""
    for top in ("inodes", "dentries", "buddymir", "buddymir/inodes", "buddymir/dentries"):
        yield top
        if top == "buddymir":
            continue
        for outer in range(128):
            yield f"{top}/{outer:X}"
            yield from (f"{top}/{outer:X}/{inner:X}" for inner in range(128))


def prototype() -> str:
    """The directories as a prototype file of mkfs.xfs(8)."""
    directory = "d--755 0 0"
    lines, open_ = ["/dev/null", "0 0", directory], list[str]()
    for path in directories():
        parts = path.split("/")
        while parts[:-1] != open_:  # an empty directory is closed when the next one is not in it
            open_.pop()
            lines.append("$")
        lines.append(f"{parts[-1]} {directory}")
        open_ = parts
    return "\n".join([*lines, *("$" for _ in open_), "$", ""])
