"""Whole block devices: a file system made for one job, mounted for it, and erased when it is over.

Knows nothing of what is in the file system. A device is written to only if it carries nothing at all, or what this
module made. What it made is known by label and UUID, which both follow from the job's id, and while it is being erased
by a header of its own in the first sector:

    nothing --make--> file system of job N --erase--> header of job N, rest being erased --> nothing

The header is written before the first byte is erased and removed after the last, so a crash in between is no clean
device. While it is there, whatever else is found on the device comes from the job, whose files can look like anything:
it is removed before the header is. `make` checks twice: mkfs.xfs(8) itself refuses a device that carries anything (it
is never told `-f`).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
import struct
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from beeond_ctl import mounts
from beeond_ctl.backends import Command
from beeond_ctl.errors import NodeError
from beeond_ctl.supervisor import run

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAGIC: Final = b"beeond-ctl erases\0"
_HEADER: Final = 4096
_SYSTEM_PATH: Final = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
_OPTIONS: Final = "nodev,nosuid,noatime,nouuid"  # the devices of a job have one identity
_STEP: Final = 1 << 30
"""Bytes zeroed at a time: between two the deadline is looked at."""
_ENDS: Final = 16 << 20
"""Bytes zeroed at both ends, whatever the method: it is there that tools look for file systems, RAID and the like."""
_ROUNDS: Final = 8
"""Times that wipefs(8) is run: what it takes away may have hidden something else."""
_HELD_S: Final = 10.0
"""Seconds that who still uses a device has to let go of it."""
_LOOK_S: Final = 0.5
"""Seconds that the kernel has to let go of it, before it is looked who uses it, and between two such looks."""

State = Literal["whole", "unfinished", "erasing"]


class ForeignError(NodeError):
    """The device carries, or is used for, what is not ours: it must not be touched."""


class OccupiedError(NodeError):
    """The device carries the file system of another job."""


@dataclass(frozen=True, slots=True)
class Content:
    """What of ours a device carries."""

    job_id: int
    state: State
    """`unfinished`: mkfs did not end, so nothing was ever stored. `erasing`: no longer whole."""


def content(device: str) -> Content | None:
    """What of ours is on `device`; None where there is nothing at all.

    Raises NodeError when it is no device or cannot be read, ForeignError when it is not ours to touch.
    """
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NodeError(f"{device} cannot be opened: {error.strerror}; see storage.devices") from None
    try:
        if not stat.S_ISBLK(os.fstat(descriptor).st_mode):
            raise NodeError(f"{device} is not a block device; see storage.devices")
        first = os.pread(descriptor, _HEADER, 0)
    except OSError as error:
        raise NodeError(f"{device} cannot be read: {error.strerror}; look at the device (dmesg)") from None
    finally:
        os.close(descriptor)
    found = _ours(first)
    if found is None:
        _refuse_foreign(device)
    return found


def _ours(first: bytes) -> Content | None:
    if first.startswith(_MAGIC):
        (job_id,) = struct.unpack_from("=Q", first, len(_MAGIC))
        return Content(job_id, "erasing")
    # struct xfs_dsb (xfs_format.h): magic at 0, UUID at 32, label at 108, sb_inprogress at 126
    label = first[108:120].rstrip(b"\0").decode("ascii", "replace")
    match = re.fullmatch(r"bo([1-9][0-9]{0,9})", label)
    if first[:4] != b"XFSB" or match is None:
        return None
    job_id = int(match[1])
    if first[32:48] != _uuid(job_id):
        return None
    return Content(job_id, "unfinished" if first[126] else "whole")


def _uuid(job_id: int) -> bytes:
    """128 bits that nobody else has reason to write."""
    return hashlib.blake2b(str(job_id).encode(), digest_size=16, person=b"beeond device").digest()


def _refuse_foreign(device: str) -> None:
    """See that `device` carries nothing, and that nobody uses it. Raises ForeignError."""
    name = Path("/sys/dev/block", _numbers(device))
    if any(name.glob("*/partition")):
        raise ForeignError(f"{device} has partitions; it is left alone: name another in storage.devices")
    if any((name / "holders").iterdir()):
        raise ForeignError(f"{device} is part of another device (lsblk); it is left alone")
    if what := _found_on(device):
        raise ForeignError(
            f"{device} carries {what} that is not ours; it is left alone: see `wipefs {device}` and storage.devices"
        )
    deadline = time.monotonic() + _LOOK_S
    while True:
        try:
            os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))  # EBUSY: mounted, swap, or held
            break
        except OSError as error:
            # A process that another thread has just forked has for a moment what we had open ourselves.
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise ForeignError(f"{device} is in use ({error.strerror}); it is left alone") from None
        time.sleep(0.01)


def _found_on(device: str) -> str:
    """What blkid(8) finds on `device`: file systems, swap, RAID and LVM members, partition tables. Empty if nothing."""
    done = _run("/usr/sbin/blkid", "-p", "-o", "export", device)
    if done.returncode == 2:
        return ""
    kind = re.search(r"^(?:PT)?TYPE=(.*)$", done.stdout, re.MULTILINE)
    return kind[1] if kind else "something"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of util-linux that reads or writes a device, to its end."""
    return subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False,
        env={"PATH": ":".join(_SYSTEM_PATH), "LC_ALL": "C"},
    )  # fmt: skip


def _numbers(device: str) -> str:
    number = os.stat(device).st_rdev
    return f"{os.major(number)}:{os.minor(number)}"


# --- making -----------------------------------------------------------------------------------------------


def make(device: str, point: str, job_id: int, *, deadline_s: float) -> None:
    """Make a file system for the job on an empty `device` and mount it at `point`.

    Raises OccupiedError when another job has the device, NodeError when it cannot be had.
    """
    with _locked(device, deadline_s):
        found = content(device)
        if found is not None:
            raise OccupiedError(f"{device} holds the file system of job {found.job_id}")
        uuid = _uuid(job_id).hex()
        text = "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))
        # Inodes of 512 bytes hold the extended attributes of BeeGFS and GlusterFS (mkfs.xfs(8)).
        words = ("mkfs.xfs", "-q", "-K", "-i", "size=512", "-L", f"bo{job_id}", "-m", f"uuid={text}", device)
        run(Command(words), search_path=_SYSTEM_PATH, deadline_s=deadline_s)
        _mount(device, point, deadline_s)


def attach(device: str, point: str, *, deadline_s: float) -> Content | None:
    """Mount what is ours on `device` at `point`, if it is whole and not mounted yet; tell what there is.

    Raises NodeError, also for a device that is not ours.
    """
    with _locked(device, deadline_s):
        found = content_if_any(device, point)
        if found is not None and found.state == "whole" and mounts.mount_at(point) is None:
            _mount(device, point, deadline_s)
        return found


def content_if_any(device: str, point: str) -> Content | None:
    """As `content`, but what is mounted at `point` has to be this device. Raises NodeError."""
    mounted = mounts.mount_at(point)
    if mounted is not None and mounted.device != _numbers(device):
        raise NodeError(f"{point}: {mounted.source} is mounted there and not {device}; unmount it")
    return content(device)


def _mount(device: str, point: str, deadline_s: float) -> None:
    os.makedirs(os.path.dirname(point), mode=0o700, exist_ok=True)
    mounts.make_point(point)
    mounts.mount("-t", "xfs", "-o", _OPTIONS, device, point, deadline_s=deadline_s)


@contextmanager
def _locked(device: str, wait_s: float) -> Iterator[None]:
    """Hold `device` against other processes of ours. Raises NodeError after `wait_s` seconds.

    The lock on the device itself also keeps udev from looking at it meanwhile (systemd's BLOCK_DEVICE_LOCKING).
    """
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NodeError(f"{device} cannot be opened: {error.strerror}; see storage.devices") from None
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NodeError(
                        f"{device}: somebody else has been at work on it for {wait_s:g} s"
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


# --- erasing ----------------------------------------------------------------------------------------------

_BLKGETSIZE64: Final = 0x80081272  # linux/fs.h
_BLKDISCARD: Final = 0x1277
_BLKZEROOUT: Final = 0x127F


def erase(
    device: str, point: str, job_id: int, method: str, *, deadline: float, uid: int | None = None
) -> str:
    """Unmount and erase what the job has on `device`; returns what was seen afterwards. Goes on after a crash.

    `method` is one of storage.wipe's: `delete` overwrites both ends of the device, `discard` has it free all its
    blocks, `zero` has it overwritten and read back in places. Processes of user `uid` that use it are ended, as by
    `mounts.unmount`. Raises NodeError, when it is not the job's, when it fails, and when it is not done by `deadline`
    (time.monotonic).
    """
    with _locked(device, max(0.0, deadline - time.monotonic())):
        found = content_if_any(device, point)
        if found is None:
            return f"{device} carries nothing"
        if found.job_id != job_id:
            raise OccupiedError(f"{device} holds the file system of job {found.job_id}")
        mounts.unmount(point, deadline_s=max(1.0, deadline - time.monotonic()), uid=uid)
        mounts.remove_point(point)  # from other mount namespaces, too (rmdir(2))
        with suppress(OSError):
            os.rmdir(os.path.dirname(point))  # where no other device is mounted
        try:
            verified = _erase(device, job_id, method, deadline, uid)
        except OSError as error:
            raise NodeError(
                f"{device} cannot be erased: {error.strerror}; look at the device (dmesg)"
            ) from None
        if content(device) is not None:
            raise NodeError(f"{device} still carries a file system after it was erased; replace the device")
        return verified


def _erase(device: str, job_id: int, method: str, deadline: float, uid: int | None) -> str:
    descriptor = _open_alone(device, uid)
    try:
        size = struct.unpack("=Q", fcntl.ioctl(descriptor, _BLKGETSIZE64, bytes(8)))[0]
        begun = os.pread(descriptor, _HEADER, 0)
        done = struct.unpack_from("=QQ", begun, len(_MAGIC))[1] if begun.startswith(_MAGIC) else _HEADER
        _write_header(descriptor, job_id, done)
        _clear_ends(descriptor, size)  # first: what looks like a RAID member may be put together (udev(7))
        verified = f"{device} carries no file system"
        if method == "discard":
            fcntl.ioctl(descriptor, _BLKDISCARD, struct.pack("=QQ", _HEADER, size - _HEADER))
            _clear_ends(descriptor, size)  # what was discarded may read as anything
            verified += "; discarded"
        elif method == "zero":
            for start in range(done, size, _STEP):
                length = min(_STEP, size - start)
                fcntl.ioctl(descriptor, _BLKZEROOUT, struct.pack("=QQ", start, length))
                _write_header(descriptor, job_id, start + length)
                if time.monotonic() > deadline:
                    raise NodeError(
                        f"{device}: overwriting was not done in time; it goes on where it stopped when run again"
                    )
            verified += f"; {_sample(descriptor, device, size)} blocks read back as zeros"
        os.fsync(descriptor)
        _remove_found(device)
        fcntl.ioctl(descriptor, _BLKZEROOUT, struct.pack("=QQ", 0, _HEADER))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return verified


def _open_alone(device: str, uid: int | None) -> int:
    """Open `device` so that nobody else has it: who has mounted it elsewhere would go on writing.

    Processes of user `uid` that use it are ended. Raises OSError, and NodeError when others do not let go of it.
    """
    look_at = time.monotonic() + _LOOK_S
    deadline = time.monotonic() + _HELD_S
    users: list[str] = []
    while True:
        try:
            return os.open(device, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        if time.monotonic() > deadline:
            held = Path("/sys/dev/block", _numbers(device), "holders")
            users += [f"/dev/{path.name}" for path in held.iterdir()]
            raise NodeError(
                f"{device} cannot be erased while it is in use ({', '.join(users) or 'by nobody who can be seen'}); "
                "end that, or reboot the node"
            )
        if time.monotonic() > look_at:
            users = mounts.end_users(_numbers(device), uid=uid)
            look_at = time.monotonic() + _LOOK_S
        time.sleep(0.02)


def _clear_ends(descriptor: int, size: int) -> None:
    """Zero the first and the last bytes, but for the header."""
    for start, end in ((_HEADER, min(_ENDS, size)), (max(_HEADER, size - _ENDS), size)):
        fcntl.ioctl(descriptor, _BLKZEROOUT, struct.pack("=QQ", start, end - start))
    os.fsync(descriptor)


def _remove_found(device: str) -> None:
    """Remove what tools would still take for somebody's on `device`, which carries our header. Raises NodeError.

    It can only come from the job. Without this the device would pass for a foreign one as soon as the header is gone.
    """
    for _ in range(_ROUNDS):
        if not _found_on(device):
            return
        # Forced, as we have the device open for nobody else.
        done = _run("/usr/sbin/wipefs", "--all", "--force", "--quiet", device)
    if what := _found_on(device):
        raise NodeError(
            f"{device}: wipefs(8) does not remove what it takes for {what} ({done.stderr.strip()}); replace the device"
        )


def _write_header(descriptor: int, job_id: int, done: int) -> None:
    """Say that the job's data is being erased, and is zeros up to `done` (a byte offset)."""
    os.pwrite(descriptor, (_MAGIC + struct.pack("=QQ", job_id, done)).ljust(_HEADER, b"\0"), 0)
    os.fsync(descriptor)


def _sample(descriptor: int, device: str, size: int) -> int:
    """Read 4 KiB at the beginning of each 64th of the device, and at its end; the number of places."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    offsets = {max(_HEADER, size * part // 64 // _HEADER * _HEADER) for part in range(64)} | {size - _HEADER}
    for offset in offsets:
        if any(os.pread(descriptor, _HEADER, offset)):
            raise NodeError(f"{device} still has its data after it was overwritten; replace the device")
    return len(offsets)
