"""The node's mounts: looking at the mount table, bind mounts, mount points, and unmounting what is in use.

Knows nothing of instances. Nothing here touches the inside of a mount whose server may be dead: the mount table
tells what is mounted, programs and processes of our own with a deadline do the rest, and holders are found by mount id.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import select
import signal
import stat
import struct
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from beeond_ctl import libc
from beeond_ctl.aside import aside, tried
from beeond_ctl.errors import NodeError

if TYPE_CHECKING:
    from collections.abc import Callable

_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
_TERM_S: Final = 2.0
"""Seconds a process that holds a mount has to end by itself."""
_UNSEEN_S: Final = 0.5
"""Seconds until the next try where a mount is busy and nobody is ended: one may wait for a file, and end just now."""
_TRIES: Final = 4
"""Times that unmounting is tried where somebody holds the mount."""
_NOBODY_S: Final = 10.0
"""Seconds of tries where nobody is seen to hold it. The kernel may: it closes the files of a process that has ended,
and of a loop device that has been let go, in its own time, which is long where disks are slow."""
_LOOK_S: Final = 10.0
"""Seconds that a look at what all processes have open may take: some of it may be on a file system that hangs."""
_REMOVE_S: Final = 30.0
"""Seconds that removing a mount point may take."""
_NAMES: Final = 8
"""Processes that are named in one message."""
_ORDINARY: Final = 1000
"""The first uid of ordinary users (login.defs(5), UID_MIN)."""
_NOBODY: Final = 65534


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
    """Remove an empty mount point; where there is none, nothing. Raises NodeError.

    That takes what is mounted there in other mount namespaces off (rmdir(2)): a last unmounting, which may hang.
    """
    if os.path.lexists(path):
        wrong = tried(lambda: os.rmdir(path), within_s=_REMOVE_S)
        if wrong and os.path.lexists(path):
            raise NodeError(f"{path}: mount point cannot be removed: {wrong}")


def bind(source: str, point: str, *, deadline_s: float = 30) -> None:
    """Mount the directory `source` at `point`, without devices and set-user-ID. Raises NodeError."""
    mount("--bind", "-o", "nodev,nosuid", source, point, deadline_s=deadline_s)


def mount(*words: str, deadline_s: float = 30) -> None:
    """Run mount(8) with `words`. Raises NodeError."""
    code, text = _run(["mount", "-n", *words], deadline_s)
    if code != 0:
        raise NodeError(f"mount {' '.join(words[-2:])} failed: {text}")


# --- unmounting -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Seen:
    """Processes that held a mount, named with pid and user: those that were ended, and those that are not the job's."""

    ended: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"; held by {_some(self.ended)}" if self.ended else ""
        return text + (f"; held by {_some(self.others)}, not the job's" if self.others else "")


def _some(names: list[str]) -> str:
    """The first of `names`: nobody reads a thousand, and Slurm takes no reason of any length."""
    return ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")


def unmount(point: str, *, deadline_s: float, uid: int | None = None) -> list[str]:
    """Unmount everything at and below `point`, and what is mounted there meanwhile; a no-op where nothing is.

    Processes of user `uid` that hold one of these mounts, in whatever mount namespace, are ended; they are returned,
    named with pid and user. Without `uid` it is those of all ordinary users. Nobody else's are: a user can hand a
    descriptor to any process. If it cannot be unmounted within about `deadline_s` seconds, it is detached lazily, its
    mount point removed, and NodeError raised.
    """
    seen = _Seen()
    deadline = time.monotonic() + max(1.0, deadline_s)
    while mounted := below(point):
        if wrong := _unmount(mounted[-1], deadline, uid, seen):
            _detach(mounted[-1], mounted)
            raise _stuck(mounted[-1], wrong)
    return seen.ended


def uncover(point: str, *, deadline_s: float, uid: int | None = None) -> list[str]:
    """Unmount what was mounted on and below the first mount at `point`, and say what that was.

    As `unmount` in all else, but that no mount point is removed: they are the user's. Raises NodeError.
    """
    found: list[str] = []
    deadline = time.monotonic() + max(1.0, deadline_s)
    while len(mounted := below(point)) > 1:
        found.append(f"{mounted[-1].source} on {mounted[-1].point}")
        if wrong := _unmount(mounted[-1], deadline, uid, _Seen()):
            _take_off(mounted[-1], _MNT_DETACH, 10)
            raise _stuck(mounted[-1], wrong)
    return found


def _stuck(mounted: MountInfo, wrong: str) -> NodeError:
    return NodeError(
        f"{mounted.point} could not be unmounted ({wrong}) and was detached; end what holds it, or reboot the node if "
        "it stays in use"
    )


def _unmount(mounted: MountInfo, deadline: float, uid: int | None, seen: _Seen) -> str:
    """Unmount `mounted` here, and end the user's processes that hold it here or elsewhere; what went wrong."""
    if time.monotonic() > deadline:  # whoever mounts as fast as we unmount would keep us for ever
        return "out of time: there is too much, or it is mounted again and again"
    text, before = "", {mount.mount_id for mount in below(mounted.point)}
    until = min(deadline, time.monotonic() + _NOBODY_S)
    # The second try comes after the holders got SIGTERM and the third after SIGKILL. From then on requests are cut off
    # that a dead server will never answer, whose callers cannot be killed before (umount2(2), MNT_FORCE).
    tries = chain([(0, signal.SIGTERM), (0, signal.SIGKILL)], repeat((_MNT_FORCE, signal.SIGKILL)))
    for number, (flags, sign) in enumerate(tries, 1):
        text = _take_off(mounted, flags, max(1.0, (deadline - time.monotonic()) / 2))
        if not _point_of(mounted):
            # A namespace with private propagation (unshare(1)) still has it, and who uses it there keeps it busy.
            if _end_holders(_holders(mounted, gone=True), signal.SIGTERM, uid, seen):
                _end_holders(_holders(mounted, gone=True), signal.SIGKILL, uid, seen)
            return ""
        if {mount.mount_id for mount in below(mounted.point)} - before:
            return ""  # that is what keeps it busy, and the next to be unmounted
        holders = _holders(mounted)
        if number >= _TRIES and (holders or time.monotonic() >= until):
            _close(holders)
            break
        if not _end_holders(holders, sign, uid, seen):
            time.sleep(min(_UNSEEN_S, max(0.0, deadline - time.monotonic())))
    return f"{text}{seen}"


_MNT_FORCE, _MNT_DETACH, _UMOUNT_NOFOLLOW = 1, 2, 8  # umount2(2)
_CLONE_NEWNS: Final = 1 << 17  # unshare(2)
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18  # mount(2)


def _point_of(mounted: MountInfo) -> str:
    """Where `mounted` is by now: directories above it may be renamed. Empty where it is nowhere."""
    return next((mount.point for mount in table() if mount.mount_id == mounted.mount_id), "")


def _take_off(mounted: MountInfo, flags: int, within_s: float) -> str:
    """Try to unmount `mounted`; what went wrong."""
    point = _point_of(mounted)
    return tried(lambda: _umount(point, flags), within_s=within_s) if point else ""


def _umount(point: str, flags: int) -> None:
    """umount2(2) by way of no link: a user who owns a directory above `point` could make it one. Raises OSError.

    Leaves its process in the root directory, with nothing open: it may end a while after it has answered, and what is
    unmounted next is what it has passed through.
    """
    *above, name = point.strip("/").split("/")
    directory = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        for part in above:
            within = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = within
        os.fchdir(directory)
        libc.call("umount2", os.fsencode(name), flags | _UMOUNT_NOFOLLOW)
    finally:
        os.close(directory)
        os.chdir("/")


def _detach(stuck: MountInfo, mounted: list[MountInfo]) -> None:
    """Detach the lowest of `mounted` that `stuck` is on or below, and with it all that is on it."""
    under = [mount.point for mount in mounted if f"{stuck.point}/".startswith(f"{mount.point}/")]
    if tried(lambda: _remove_mounted(min(under, key=len)), within_s=10):
        _take_off(stuck, _MNT_DETACH, 10)


def _remove_mounted(point: str) -> None:
    """Remove the mount point `point` though something is mounted there, which detaches it. Raises OSError.

    By umount2(2) only the topmost mount can be named, and somebody may be quicker to mount the next one. But from a
    namespace of our own, where nothing is mounted, it can be removed, and that detaches it in all others (rmdir(2)).
    Leaves its process there.
    """
    libc.call("unshare", _CLONE_NEWNS)
    libc.call("mount", b"none", b"/", b"none", _MS_REC | _MS_PRIVATE, b"")
    directory = os.open(os.path.dirname(point), os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    libc.call("umount2", b"/", _MNT_DETACH)
    os.rmdir(os.path.basename(point), dir_fd=directory)


# --- who holds what ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Holder:
    pid: int
    descriptor: int


def _end_holders(holders: list[_Holder], number: signal.Signals, uid: int | None, seen: _Seen) -> bool:
    """Signal those of `holders` that are the user's, and give them a moment to go. Whether there are any."""
    try:
        poll, waiting = select.poll(), 0
        for holder in holders:
            name, theirs = _named(holder.pid), _is_users(holder.pid, uid)
            names = seen.ended if theirs else seen.others
            if name not in names:
                names.append(name)
            if theirs:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(holder.descriptor, number)
                    signal.pidfd_send_signal(holder.descriptor, signal.SIGCONT)
                poll.register(holder.descriptor, select.POLLIN)
                waiting += 1
        found, deadline = waiting > 0, time.monotonic() + _TERM_S
        while waiting and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                poll.unregister(descriptor)
                waiting -= 1
    finally:
        _close(holders)
    return found


def _close(holders: list[_Holder]) -> None:
    for holder in holders:
        os.close(holder.descriptor)


def _is_users(pid: int, uid: int | None) -> bool:
    """Whether process `pid` is user `uid`'s, or in a container of theirs; without `uid`, any ordinary user's."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False
    match = re.search(rb"^Uid:\t(\d+)\t(\d+)", status, re.MULTILINE)
    ids = {int(match[1]), int(match[2])} if match else {0}  # real and effective
    if uid is None:
        return min(ids) >= _ORDINARY and _NOBODY not in ids
    return 0 not in {uid, *ids} and (ids == {uid} or _contained(pid, uid))


def _contained(pid: int, uid: int) -> bool:
    """Whether process `pid` is in a user namespace that user `uid` made, whatever its own id is there."""
    with suppress(OSError):
        space = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        while True:
            try:
                (owner,) = struct.unpack("=I", fcntl.ioctl(space, _NS_GET_OWNER_UID, bytes(4)))
                if owner == uid:
                    return True
                above = fcntl.ioctl(space, _NS_GET_PARENT)  # EPERM where there is none
            finally:
                os.close(space)
            space = above
    return False


_NS_GET_PARENT, _NS_GET_OWNER_UID = 0xB702, 0xB704  # ioctl_ns(2)


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
    found = _holders(mounted) if mounted else []
    _close(found)
    return [_named(holder.pid) for holder in found]


def end_users(device: str, *, uid: int | None, sure: Callable[[], bool] = lambda: True) -> list[str]:
    """End the processes of user `uid` that still use the file system on `device`; returns who was found using it.

    `device` is "major:minor", a block device that is nobody's but the job's. Users are those that have something open
    on it, also by a mount that is gone, and those in mount namespaces that have it mounted. As in `unmount` nobody
    else's processes are ended, and they are named as not the job's. `sure`, asked before anybody is signalled, says
    whether `device` is still what it was. Where it is mounted here, that is all that is told.
    """
    if points := [mount.point for mount in table() if mount.device == device]:
        return [f"the mount at {points[0]}"]
    seen = _Seen()
    for number in (signal.SIGTERM, signal.SIGKILL):
        found = _users(device)
        if not sure():
            _close(found)
            return []
        if not _end_holders(found, number, uid, seen):
            break
    return [*seen.ended, *(f"{name}, not the job's" for name in seen.others)][:_NAMES]


def _holders(mounted: MountInfo, *, gone: bool = False) -> list[_Holder]:
    """Processes with an open file, directory, program or mapping in `mounted`, with a pidfd that the caller closes.

    A mount has another id in each mount namespace, and the one there keeps ours busy; they are the same by device,
    root, type and source. By that, another mount of the same device is not taken for this one. If it is `gone` here,
    only processes in namespaces that still have it are looked at.
    """

    def same(mount: MountInfo) -> bool:
        return replace(mount, mount_id=mounted.mount_id, point=mounted.point) == mounted

    processes = _processes()
    inside = {""}
    here = {mount.mount_id for mount in table() if same(mount)}
    ids = here & {mounted.mount_id}
    if here == ids:  # mounted elsewhere here, too, it cannot be told from that in other namespaces
        tables = _tables(processes, f" {mounted.device} ".encode())
        ids |= {mount.mount_id for mounts in tables.values() for mount in mounts if same(mount)}
        inside = {view for view, mounts in tables.items() if any(map(same, mounts))}
    # Ids are unique over all namespaces, and a descriptor may have come from another one.
    pids = [pid for pid, view in processes if not gone or view in inside]
    return _held(pids, lambda pid: _holds(pid, ids, mounted.device)) if ids else []


def _held(pids: list[int], holds: Callable[[int], bool]) -> list[_Holder]:
    """Those of the processes `pids` that hold, each with a pidfd that was opened before it was looked at."""
    found = []
    for pid in pids:
        with suppress(OSError):
            descriptor = os.pidfd_open(pid)
            try:
                held = holds(pid)
            except (OSError, ValueError, IndexError):  # what cannot be read of a stranger's is no holder
                held = False
            if held:
                found.append(_Holder(pid, descriptor))
            else:
                os.close(descriptor)
    return found


def _processes() -> list[tuple[int, str]]:
    """All processes but this one and the first, each with what it sees of mounts: its namespace, and its root."""
    own, found = os.readlink("/proc/self/ns/mnt"), []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in {1, os.getpid()}:
            with suppress(OSError):
                space = os.readlink(f"/proc/{entry}/ns/mnt")
                # Of our own we see all; the table of who has another root may lack some.
                view = "" if space == own else f"{space} {os.readlink(f'/proc/{entry}/root')}"
                found.append((int(entry), view))
    return found


def _tables(processes: list[tuple[int, str]], mark: bytes = b"") -> dict[str, list[MountInfo]]:
    """What other mount namespaces have mounted, by view, where `mark` is in their tables."""
    found: dict[str, list[MountInfo]] = {"": []}
    for pid, view in processes:
        if view not in found:
            with suppress(OSError, ValueError, IndexError):
                found[view] = table(pid) if mark in Path(f"/proc/{pid}/mountinfo").read_bytes() else []
    return found


def _users(device: str) -> list[_Holder]:
    """Processes that use the file system on `device`, which is not mounted here, each with a pidfd."""
    processes = _processes()
    tables = _tables(processes)
    inside = {view for view, mounts in tables.items() if any(mount.device == device for mount in mounts)}
    known = {
        mount.mount_id for mounts in (table(), *tables.values()) for mount in mounts if mount.device != device
    }
    started: dict[int, bytes] = {}
    for pid, _ in processes:
        with suppress(OSError):
            started[pid] = _started(pid)

    def look() -> bytes:
        return b"".join(b"%d\n" % pid for pid in started if _opened_on(pid, device, known))

    # What a process has open by a mount that is gone may be on a file system that hangs.
    using = {int(pid) for pid in aside(look, within_s=_LOOK_S).split()}
    using |= {pid for pid, view in processes if view in inside and pid in started}
    return _held(sorted(using), lambda pid: _started(pid) == started[pid])


def _started(pid: int) -> bytes:
    """When process `pid` was started (proc(5), stat, field 22)."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]


def _opened_on(pid: int, device: str, known: set[int]) -> bool:
    """Whether process `pid` has anything open on `device`. Mounts that are `known` are on others."""
    major, minor = (int(part) for part in device.split(":"))
    with suppress(OSError):
        for name in ("cwd", "root", "exe", *(f"fd/{name}" for name in os.listdir(f"/proc/{pid}/fd"))):
            link = f"/proc/{pid}/{name}"
            with suppress(OSError):
                if _mount_id_of_link(link) not in known and os.stat(link).st_dev == os.makedev(major, minor):
                    return True
    return _maps(pid, None, device)


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


def _maps(pid: int, ids: set[int] | None, device: str) -> bool:
    """Whether process `pid` has mapped a file of `device`; if `ids` are given, by one of these mounts."""
    major, minor = (int(part) for part in device.split(":"))
    mark = f"{major:02x}:{minor:02x}".encode()  # as /proc/PID/maps prints it
    with suppress(OSError):
        if Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"D":
            return False  # its memory map may be locked for as long as it hangs
        for line in Path(f"/proc/{pid}/maps").read_bytes().split(b"\n")[:-1]:
            fields = line.split(None, 5)
            if fields[3] == mark and (
                ids is None or _mount_id_of_link(f"/proc/{pid}/map_files/{_range(fields[0])}") in ids
            ):
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
