"""Trees to copy, and a naive way to tell whether two are the same."""

from __future__ import annotations

import os
import random
import stat
from typing import Any

NAMES = (b"a", b"two words", b"new\nline", b"caf\xe9", b"\xff\xfe", b"-rf", b"tab\t", b"'\"\\", b"x" * 200)

Snapshot = dict[bytes, tuple[Any, ...]]


def build(root: bytes, seed: int, entries: int = 40) -> None:
    """A random tree of about `entries` entries: directories, files, links of both kinds, holes, attributes."""
    rng = random.Random(seed)
    os.makedirs(root)
    dirs, files = [root], list[bytes]()
    locked: list[tuple[bytes, int]] = []
    for number in range(entries):
        path = os.path.join(rng.choice(dirs), rng.choice(NAMES) + b"%d" % number)
        kind = rng.random()
        if kind < 0.2:
            os.mkdir(path)
            dirs.append(path)
            if rng.random() < 0.3:
                locked.append((path, rng.choice((0o500, 0o555, 0o2775, 0o1777, 0o750))))
        elif kind < 0.3:
            os.symlink(rng.choice((b"/etc/passwd", b"nowhere", b"..", b"caf\xe9")), path)
        elif kind < 0.4 and files:
            os.link(rng.choice(files), path, follow_symlinks=False)
        else:
            write(path, rng)
            files.append(path)
    for path, mode in reversed(locked):
        os.chmod(path, mode)


def write(path: bytes, rng: random.Random) -> None:
    """One random file."""
    size = rng.choice((0, 1, 100, 4096, 70_000, 3 << 20))
    with open(path, "wb") as file:
        if size > 1 << 20:
            file.truncate(size)
            file.seek(rng.randrange(size))
            file.write(rng.randbytes(5000))
        else:
            file.write(rng.randbytes(size))
    if rng.random() < 0.2:
        os.setxattr(path, "user.note", rng.randbytes(20))
    os.chmod(path, rng.choice((0o600, 0o644, 0o755, 0o400, 0o4755)))
    when = rng.randrange(10**18, 17 * 10**17)
    os.utime(path, ns=(when, when))


def snapshot(root: bytes) -> Snapshot:
    """Everything that a copy has to keep, by path; hard links as the first of their names."""
    found: Snapshot = {}
    first: dict[tuple[int, int], bytes] = {}

    def visit(path: bytes, name: bytes) -> None:
        info = os.lstat(path)
        kept: list[Any] = [info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns]
        if stat.S_ISDIR(info.st_mode):
            kept += attributes(path)
            for each in sorted(os.listdir(path)):
                visit(os.path.join(path, each), os.path.join(name, each))
        elif stat.S_ISLNK(info.st_mode):
            kept.append(os.readlink(path))
        elif stat.S_ISREG(info.st_mode):
            with open(path, "rb") as file:
                kept.append(file.read())
            kept += attributes(path)
        if not stat.S_ISDIR(info.st_mode):
            kept.append(first.setdefault((info.st_dev, info.st_ino), name))
        found[name] = tuple(kept)

    visit(root, b".")
    return found


def attributes(path: bytes) -> list[Any]:
    """Extended attributes and ACLs."""
    return [(name, os.getxattr(path, name)) for name in sorted(os.listxattr(path))]


def files_in(root: bytes) -> dict[bytes, bytes]:
    """The contents of all files below `root`."""
    contents = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                with open(path, "rb") as file:
                    contents[os.path.relpath(path, root)] = file.read()
    return contents


def leftovers(root: bytes) -> list[bytes]:
    """Temporary names below `root`."""
    return [
        name
        for _, dirs, names in os.walk(root)
        for name in (*dirs, *names)
        if name.startswith(b".beeond-ctl.")
    ]
