"""What a node is like at one moment, so that two moments can be compared: is anything left behind?

Knows nothing of the product. What Slurm itself changes with every job is left out by the visible lists
below and by nothing else.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from tests.testbed import host

if TYPE_CHECKING:
    from collections.abc import Iterator

# Files that Slurm and the services write while they do their work, as patterns on the path in the node.
CHURN_FILES = tuple(
    re.compile(pattern)
    for pattern in (
        r"/var/log/.*",
        r"/var/spool/slurmd/.*",
        r"/var/lib/slurm/slurmctld/.*",
        r"/var/lib/munge/.*",
        r"/run/munge/.*",
        r"/run/mount/.*",  # what mount(8) and blkid(8) note for themselves
        r"/run/blkid/.*",
        r"/tmp/glfs-bt-\w+",  # GlusterFS makes and removes it in one go; empty, from whoever was killed in between
    )
)
# Command lines that say more than who they are, and what they are shown as.
SAME_PROCESS = (
    (re.compile(r"(sshd: .* \[listener\]).*"), r"\1"),  # counts its connections
    (re.compile(r"(/usr/sbin/slurmd) -b"), r"\1"),  # started after a reboot
)
# Processes that go by themselves some time after the job or the login that they were of: one that was just about to
# when `before` was taken, and has gone, is no change. One that has come and stays is.
PASSING = re.compile(r"uid \d+: (slurmstepd: |sshd: (?!.*\[listener\]))")
# File systems of the node that are searched for files; / is searched through what the node changed in it.
SEARCHED = ("/run", "/tmp", "/dev", "/dev/shm", "/nvme")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One node, without process ids and times. Every field is a sorted tuple of lines."""

    node: str
    processes: tuple[str, ...]
    mounts: tuple[str, ...]
    ports: tuple[str, ...]
    loops: tuple[str, ...]
    files: tuple[str, ...]

    def diff(self, before: Snapshot) -> list[str]:
        """What is here and was not there (+), and what was there and is gone (-); [] when nothing changed."""
        found = []
        for field in fields(self):
            if field.name == "node":
                continue
            now, then = Counter(getattr(self, field.name)), Counter(getattr(before, field.name))
            found += [f"{self.node}: + {field.name}: {line}" for line in sorted((now - then).elements())]
            gone = [line for line in sorted((then - now).elements()) if not PASSING.match(line)]
            found += [f"{self.node}: - {field.name}: {line}" for line in gone]
        return found


def take(name: str, init: host.Process, uppers: dict[str, Path]) -> Snapshot:
    """Look at a node: `init` is its first process, `uppers` say where its changes to each overlay are."""
    mounts = _mounts(init)
    return Snapshot(
        name,
        tuple(sorted(_processes(init))),
        tuple(sorted(line for _, line in mounts)),
        tuple(sorted(_ports(init))),
        tuple(sorted(f"{loop.backing_file}" for loop in host.loops_on(devices(init)))),
        tuple(sorted(_files(init, uppers, {path for path, _ in mounts}))),
    )


def devices(init: host.Process) -> set[int]:
    """The devices of the node's own file systems, as st_dev: files on them belong to this node alone.

    Nothing that is also mounted on this machine itself is ever among them: a node that is only half
    there still has this machine's mounts.
    """
    found = {number for number, path in _devices_and_paths(init.pid) if path in ("/", *SEARCHED)}
    found.add(os.stat(f"/proc/{init.pid}/root/etc/hostname").st_dev)  # an overlay's files may show another
    return found - {number for number, _ in _devices_and_paths(os.getpid())}


def _devices_and_paths(pid: int) -> list[tuple[int, str]]:
    found = []
    for line in host.mount_table(pid):
        _, _, number, _, path = line.split()[:5]
        major, minor = number.split(":")
        found.append((os.makedev(int(major), int(minor)), path))
    return found


def _processes(init: host.Process) -> Iterator[str]:
    for process in host.processes_of(init):
        argv = process.cmdline()
        try:
            uid = os.stat(f"/proc/{process.pid}").st_uid
        except FileNotFoundError:
            continue
        line = " ".join(argv).encode(errors="backslashreplace").decode()
        for pattern, replacement in SAME_PROCESS:
            line = pattern.sub(replacement, line)
        if argv:
            yield f"uid {uid}: {line}"


def _mounts(init: host.Process) -> list[tuple[str, str]]:
    """Mount point, and the line that tells it: mount point, type, source, root within the source, options."""
    found = []
    for line in host.mount_table(init.pid):
        before, after = line.split(" - ")
        _, _, _, within, path, options = before.split()[:6]
        kind, source = after.split()[:2]
        found.append((path, f"{path} {kind} {source} {within} {options}"))
    return found


def _ports(init: host.Process) -> Iterator[str]:
    """Listening TCP, bound UDP and listening or abstract Unix sockets of the node's network namespace."""
    for protocol, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/{init.pid}/net/{protocol}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == state:
                address, _, port = columns[1].rpartition(":")
                yield f"{protocol} {address}:{int(port, 16)}"
    for line in Path(f"/proc/{init.pid}/net/unix").read_text(errors="backslashreplace").splitlines()[1:]:
        columns = line.split(maxsplit=7)
        if len(columns) == 8 and (columns[3] == "00010000" or columns[7].startswith("@")):
            yield f"unix {columns[7]}"


def _files(init: host.Process, uppers: dict[str, Path], mount_points: set[str]) -> Iterator[str]:
    for top, upper in uppers.items():
        yield from _walk(upper, top, mount_points, in_root=True)
    for top in SEARCHED:
        if top in mount_points:
            yield from _walk(Path(f"/proc/{init.pid}/root{top}"), top, mount_points)


def _walk(directory: Path, shown_as: str, mount_points: set[str], *, in_root: bool = False) -> Iterator[str]:
    """Every entry below `directory` with type, mode and owner; what else is mounted there is not entered.

    `in_root`: the directory belongs to the overlay's upper layer.
    """
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        path = os.path.join(shown_as, entry.name)
        if _as_mountinfo(path) in mount_points or any(pattern.fullmatch(path) for pattern in CHURN_FILES):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        facts = f"{stat.filemode(status.st_mode)} {status.st_uid}:{status.st_gid}"
        if not (in_root and _is_directory_below(path, status)):
            yield f"{path.encode(errors='surrogateescape').decode(errors='backslashreplace')} {facts}"
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), path, mount_points, in_root=in_root)


def _is_directory_below(path: str, status: os.stat_result) -> bool:
    """Whether this is just the lower layer's directory, copied because something below it was touched."""
    try:
        lower = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and (lower.st_mode, lower.st_uid, lower.st_gid) == (
        status.st_mode,
        status.st_uid,
        status.st_gid,
    )


def _as_mountinfo(path: str) -> str:
    """A path as /proc/PID/mountinfo writes it."""
    return "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in path)
