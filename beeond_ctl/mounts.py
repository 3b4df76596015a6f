"""The node's mounts: looking at the mount table, bind mounts, mount points, and unmounting what is in use.

Knows nothing of instances. Nothing here touches the inside of a mount whose server may be dead: the mount table
tells what is mounted, programs and processes of our own with a deadline do the rest, and holders are found by mount id.
"""

from __future__ import annotations

import os
import pwd
import re
import select
import signal
import stat
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from beeond_ctl import libc
from beeond_ctl.aside import tried
from beeond_ctl.errors import NodeError

if TYPE_CHECKING:
    from collections.abc import Iterator

_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
_TERM_S: Final = 2.0
"""Seconds a process that holds a mount has to end by itself."""
_UNSEEN_S: Final = 0.5
"""Seconds until the next try where a mount is busy and no holder is seen: one may wait for a file, and end just now."""


@dataclass(frozen=True, slots=True)
class MountInfo:
    """One line of the mount table (proc(5), mountinfo). `root` is what of the file system is mounted."""

    mount_id: int
    device: str
    root: str
    point: str
    fstype: str
    source: str


# --- looking ----------------------------------------------------------------------------------------------


def table(pid: int | str = "self") -> list[MountInfo]:
    """All mounts as process `pid` has them, in the order they were made. Raises OSError when the process is gone."""
    found = []
    for line in (
        Path(f"/proc/{pid}/mountinfo").read_bytes().split(b"\n")[:-1]
    ):  # a path may have a bare \\r in it
        left, _, right = line.partition(b" - ")
        fields, more = left.split(b" "), right.split(b" ")
        found.append(
            MountInfo(
                int(fields[0]),
                fields[2].decode(),
                _text(fields[3]),
                _text(fields[4]),
                _text(more[0]),
                _text(more[1]),
            )
        )
    return found


def _text(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field))


def mount_at(path: str) -> MountInfo | None:
    """What is mounted at `path` (on top, where there are several)."""
    return next((mount for mount in reversed(table()) if mount.point == path), None)


def below(path: str) -> list[MountInfo]:
    """What is mounted at or below `path`, in the order it was mounted."""
    return [
        mount for mount in table() if mount.point == path or mount.point.startswith(f"{path.rstrip('/')}/")
    ]


# --- mounting ---------------------------------------------------------------------------------------------


def check_directory(path: str) -> None:
    """See that `path` and all directories above it are root's, and that nobody else may write them.

    Otherwise a user could put a link where root is about to work. Raises NodeError naming the one at fault, and
    FileNotFoundError.
    """
    for part in (*reversed(Path(path).parents), Path(path)):
        status = part.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise NodeError(f"{part} is a symbolic link; name the directory itself in the configuration")
        if not stat.S_ISDIR(status.st_mode):
            raise NodeError(f"{part} is not a directory")
        if status.st_uid != 0:
            raise NodeError(f"{part} belongs to uid {status.st_uid}; run `chown root {part}`")
        if status.st_mode & 0o022:
            raise NodeError(f"{part} may be written by others than root; run `chmod go-w {part}`")


def make_point(path: str) -> None:
    """Make the mount point `path`, of mode 0 while nothing is mounted, and the directories above it.

    Raises NodeError when something is mounted there, or a directory above is not root's alone.
    """
    if mount_at(path) is not None:
        raise NodeError(f"{path}: something is mounted there; run `beeond-ctl sweep`, or `umount {path}`")
    try:
        for part in reversed(Path(path).parents):
            with suppress(FileExistsError):
                part.mkdir(mode=0o755)
        check_directory(str(Path(path).parent))
        with suppress(FileExistsError):
            os.mkdir(path, 0)
        check_directory(path)
    except OSError as error:
        raise NodeError(f"{path}: mount point cannot be made: {error}") from None


def remove_point(path: str) -> None:
    """Remove an empty mount point; where there is none, nothing. Raises NodeError."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise NodeError(f"{path}: mount point cannot be removed: {error}") from None


def bind(source: str, point: str, *, deadline_s: float = 30) -> None:
    """Mount the directory `source` at `point`, without devices and set-user-ID. Raises NodeError."""
    mount("--bind", "-o", "nodev,nosuid", source, point, deadline_s=deadline_s)


def mount(*words: str, deadline_s: float = 30) -> None:
    """Run mount(8) with `words`. Raises NodeError."""
    code, text = _run(["mount", "-n", *words], deadline_s)
    if code != 0:
        raise NodeError(f"mount {' '.join(words[-2:])} failed: {text}")


# --- unmounting -------------------------------------------------------------------------------------------


def unmount(point: str, *, deadline_s: float) -> list[str]:
    """Unmount everything at and below `point`; a no-op where nothing is.

    Processes that hold one of these mounts are ended; they are returned, named with pid and user. If it cannot be
    unmounted within about `deadline_s` seconds, it is detached lazily and NodeError raised.
    """
    ended: list[str] = []
    deadline = time.monotonic() + deadline_s
    while mounted := below(point):
        _unmount(mounted[-1], deadline, ended)
    return ended


def uncover(point: str, *, deadline_s: float) -> list[str]:
    """Unmount what was mounted on and below the first mount at `point`, and say what that was.

    As `unmount` in all else. Raises NodeError.
    """
    found: list[str] = []
    deadline = time.monotonic() + deadline_s
    while len(mounted := below(point)) > 1:
        found.append(f"{mounted[-1].source} on {mounted[-1].point}")
        _unmount(mounted[-1], deadline, [])
    return found


def _unmount(mounted: MountInfo, deadline: float, ended: list[str]) -> None:
    text = ""
    # The second try comes after the holders got SIGTERM and the third after SIGKILL. The fourth cuts off requests
    # that a dead server will never answer, whose callers cannot be killed before (umount2(2), MNT_FORCE).
    for flags, number in (
        (0, signal.SIGTERM),
        (0, signal.SIGKILL),
        (_MNT_FORCE, signal.SIGKILL),
        (_MNT_FORCE, None),
    ):
        text = _take_off(mounted, flags, max(1.0, (deadline - time.monotonic()) / 2))
        if not _point_of(mounted):
            return
        if number is not None and not _end_holders(mounted, number, ended):
            time.sleep(min(_UNSEEN_S, max(0.0, deadline - time.monotonic())))
    _take_off(mounted, _MNT_DETACH, 10)
    held = f"; held by {', '.join(ended)}" if ended else ""
    raise NodeError(
        f"{mounted.point} could not be unmounted ({text}{held}) and was detached; reboot the node if it stays in use"
    )


_MNT_FORCE, _MNT_DETACH, _UMOUNT_NOFOLLOW = 1, 2, 8  # umount2(2)


def _point_of(mounted: MountInfo) -> str:
    """Where `mounted` is by now: directories above it may be renamed. Empty where it is nowhere."""
    return next((mount.point for mount in table() if mount.mount_id == mounted.mount_id), "")


def _take_off(mounted: MountInfo, flags: int, within_s: float) -> str:
    """Try to unmount `mounted`; what went wrong."""
    point = _point_of(mounted)
    return tried(lambda: _umount(point, flags), within_s=within_s) if point else ""


def _umount(point: str, flags: int) -> None:
    """umount2(2) by way of no link: a user who owns a directory above `point` could make it one. Raises OSError.

    Leaves its process in another directory.
    """
    *above, name = point.strip("/").split("/")
    directory = os.open("/", os.O_PATH | os.O_DIRECTORY)
    for part in above:
        directory = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    os.fchdir(directory)
    libc.call("umount2", os.fsencode(name), flags | _UMOUNT_NOFOLLOW)


@dataclass(frozen=True, slots=True)
class _Holder:
    pid: int
    descriptor: int


def _end_holders(mounted: MountInfo, number: signal.Signals, ended: list[str]) -> bool:
    """Signal the processes that hold `mounted`, and give them a moment to go. Whether there are any."""
    holders = list(_holders(mounted))
    try:
        poll = select.poll()
        for holder in holders:
            name = _named(holder.pid)
            if name not in ended:
                ended.append(name)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(holder.descriptor, number)
                signal.pidfd_send_signal(holder.descriptor, signal.SIGCONT)
            poll.register(holder.descriptor, select.POLLIN)
        deadline, waiting = time.monotonic() + _TERM_S, len(holders)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                poll.unregister(descriptor)
                waiting -= 1
    finally:
        for holder in holders:
            os.close(holder.descriptor)
    return bool(holders)


def _named(pid: int) -> str:
    try:
        comm = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return f"pid {pid}"
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = f"uid {uid}"
    return f"{comm} (pid {pid}, {user})"


def holders(point: str) -> list[str]:
    """The processes that hold what is mounted at `point`, named with pid and user."""
    mounted = mount_at(point)
    names = []
    for holder in _holders(mounted) if mounted else ():
        names.append(_named(holder.pid))
        os.close(holder.descriptor)
    return names


def _holders(mounted: MountInfo) -> Iterator[_Holder]:
    """Processes with an open file, directory, program or mapping in `mounted`, with a pidfd that the caller closes.

    A mount has another id in each mount namespace, and the one there keeps ours busy; they are the same by device and
    root. By that, another mount of the same device is not taken for this one.
    """
    ids: dict[str, set[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in {1, os.getpid()}:
            continue
        with suppress(OSError):
            pid = int(entry)
            descriptor = os.pidfd_open(pid)
            try:
                space = os.readlink(f"/proc/{pid}/ns/mnt")
                if space not in ids:
                    ids[space] = {
                        mount.mount_id
                        for mount in table(pid)
                        if (mount.device, mount.root) == (mounted.device, mounted.root)
                    }
                held = bool(ids[space]) and _holds(pid, ids[space], mounted.device)
            except (OSError, ValueError, IndexError):  # what cannot be read of a stranger's is no holder
                held = False
            if held:
                yield _Holder(pid, descriptor)
            else:
                os.close(descriptor)


def _holds(pid: int, ids: set[int], device: str) -> bool:
    base = f"/proc/{pid}"
    if any(_mount_id_of_link(f"{base}/{name}") in ids for name in ("cwd", "root", "exe")):
        return True
    with suppress(OSError):
        for name in os.listdir(f"{base}/fdinfo"):
            with suppress(OSError):
                if _mount_id(Path(f"{base}/fdinfo/{name}").read_bytes()) in ids:
                    return True
    return _maps(pid, ids, device)


def _maps(pid: int, ids: set[int], device: str) -> bool:
    major, minor = (int(part) for part in device.split(":"))
    mark = f"{major:02x}:{minor:02x}".encode()  # as /proc/PID/maps prints it
    with suppress(OSError):
        if Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"D":
            return False  # its memory map may be locked for as long as it hangs
        for line in Path(f"/proc/{pid}/maps").read_bytes().split(b"\n")[:-1]:
            fields = line.split(None, 5)
            if fields[3] == mark and _mount_id_of_link(f"/proc/{pid}/map_files/{_range(fields[0])}") in ids:
                return True
    return False


def _range(text: bytes) -> str:
    return "-".join(f"{int(part, 16):x}" for part in text.split(b"-"))


def _mount_id_of_link(path: str) -> int | None:
    """The mount that a link of /proc/PID leads to; O_PATH does not touch the file system behind it."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _mount_id(Path(f"/proc/self/fdinfo/{descriptor}").read_bytes())
    finally:
        os.close(descriptor)


def _mount_id(fdinfo: bytes) -> int | None:
    match = re.search(rb"^mnt_id:\s*(\d+)", fdinfo, re.MULTILINE)
    return int(match[1]) if match else None


def _run(words: list[str], deadline_s: float) -> tuple[int, str]:
    """Run a program of util-linux; exit code and what it said, on one line. It may hang for ever, we do not."""
    child = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/",
        env={"PATH": _PATH, "LANG": "C"},
    )  # fmt: skip
    try:
        output, _ = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.returncode = -9  # it may never end: nobody waits for it
        return -9, f"no answer after {deadline_s:.0f} s"
    return child.returncode, " ".join(output.decode(errors="replace").split())
