"""Targets on a node: preparing, detaching and attaching, wiping, and the records on the devices that survive a reboot.

Knows nothing of file systems' services and of mounts that users see. Each target of an instance has a home directory,
root's alone, on its device:

    BASE/job-ID/instance.json    whose it is and what is owed: written first, removed last
    BASE/job-ID/data             the file system's own data (kind directory)
    BASE/job-ID/image            a file system of its own (kind image), mounted at RUN/target-N
    BASE/job-ID/metadata         a metadata server's file system (first target only), mounted at RUN/metadata
    BASE/job-ID/wiping           what is left to be removed, once wiping has begun
    BASE/metadata-*              what metadata images are copied from: made once per node, no job's

BASE is a directory of the site's, or (kind device) where the file system that a device has for the job is mounted, see
`beeond_ctl.devices`.

`RUN/instance` and the records carry the same random id, so that what an earlier run of a job left on a device is never
taken for this run's: it may be data that its owner still waits for.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import stat
import struct
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl import libc, mounts
from beeond_ctl.backends import Command, File, get
from beeond_ctl.errors import NodeError, UserError
from beeond_ctl.plan import MIN_IMAGE, TEMPLATES, Job, metadata_template
from beeond_ctl.request import encode
from beeond_ctl.supervisor import run
from beeond_ctl.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from beeond_ctl import devices
    from beeond_ctl.config import SiteConfig
    from beeond_ctl.plan import Metadata, Plan, Target

PHASES: Final = ("preparing", "live", "retained", "wiping")
"""preparing: not all of the node's targets were made yet, so nothing has run."""
_VERSION: Final = 1
_RECORD: Final = "instance.json"
_TRASH: Final = "wiping"
_UNFINISHED: Final = f".{_RECORD}.new"
"""A record that is being written; before the first one there is nothing else."""
_RESERVE: Final = "reserve"
_RESERVED: Final = 64 << 20
"""Bytes kept back, of a small device a hundredth: what tear-down writes on a device that the job has filled."""
_SHARE: Final = 0.9
"""Of the free space, what an image takes where nobody says how much."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a target says of itself, whatever happens to the rest of the node."""

    instance: str
    job: Job
    nodes: tuple[str, ...]
    node: str
    backend: str
    request: str
    """As `request.encode` made it."""
    block: int
    phase: str
    created: float
    """Seconds since the epoch."""
    config: dict[str, Any]
    """The site's configuration when the instance was made: a later edit must not lead to other targets."""
    home: str
    """Where the record lies; not part of what is written."""
    names: dict[str, Any] = field(default_factory=dict)
    """What only Slurm knows of the job, and only while it remembers it, if the request's paths need it."""
    attempt: str = ""
    """As in `state.State`."""
    rebooted: bool = False
    """As in `state.State`."""
    index: int | None = None
    """Which of the node's targets this is: names of devices may change places with a reboot."""

    @property
    def job_id(self) -> int:
        """The job's id."""
        return self.job.job_id


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof that a target was wiped: what was removed, how, and that nothing of it was found afterwards."""

    home: str
    method: str
    files: int
    """Names removed, directories included."""
    bytes: int
    """Space given back, as the file system counts it."""
    seconds: float
    verified: str
    """What was looked at afterwards."""
    finished_at: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _no_step(_text: str) -> None:
    pass


# --- preparing --------------------------------------------------------------------------------------------


def prepare(plan: Plan, node: str, *, step: Callable[[str], None] = _no_step) -> None:
    """Make all targets of this node. `step` hears of each change before it is made, from several threads.

    Raises NodeError when a device is unfit or holds something of this job already, and UserError when the user asks
    for more than there is. `wipe` undoes it from any point.
    """
    step(f"name the instance in {plan.run_dir}")
    instance = name_instance(plan)
    if node not in plan.servers:
        return
    _each(plan.targets, lambda target: _make_file_system(plan, target, step))
    for target in plan.targets:
        _check(plan, node, target)
    _each(plan.targets, lambda target: _make(plan, node, target, instance, step))
    # A record that says so proves that all targets have one: a home that is missing then is so with its device.
    _each(plan.targets, lambda target: _enter(target, "live", step))


def name_instance(plan: Plan) -> str:
    """Give the instance its random id, once. To be done before anything that `wipe` could have to undo."""
    os.makedirs(plan.run_dir, mode=0o700, exist_ok=True)
    path = f"{plan.run_dir}/instance"
    with suppress(FileNotFoundError):
        return Path(path).read_text()
    instance = secrets.token_hex(16)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(instance)
    return instance


def _make_file_system(plan: Plan, target: Target, step: Callable[[str], None]) -> None:
    if target.device is None:
        return
    from beeond_ctl import devices

    job_id = plan.job.job_id
    step(f"make a file system on {target.device}")
    try:
        devices.make(target.device, target.base, job_id, deadline_s=plan.config.deadlines.start)
    except devices.OccupiedError as error:
        if (found := devices.content(target.device)) is not None and found.job_id == job_id:
            raise _left(plan, target) from None
        raise UserError(f"{error}; use --exclusive, for jobs cannot share a whole device") from None


def _left(plan: Plan, target: Target) -> NodeError:
    return NodeError(
        f"{target.home} is left from an earlier run; run `beeond-ctl recover {plan.job.job_id}` if it is retained, "
        "`beeond-ctl sweep` otherwise"
    )


def _check(plan: Plan, node: str, target: Target) -> None:
    check_base(target.base)
    if os.path.lexists(target.home):
        raise _left(plan, target)
    metadata = _metadata_on(plan, node, target)
    taken = metadata.size if metadata is not None else 0
    free, wanted = _free(target.base) - _to_reserve(target.base), plan.target_capacity
    if taken > free:
        raise _no_room(plan, target, f"{target.base} has no room for {format_size(taken)} of metadata")
    if target.image:  # both are reserved
        free -= taken
    if wanted is not None and wanted > free:
        beside = f" beside {format_size(taken)} for metadata" if taken and target.image else ""
        text = f"{target.base} has {format_size(free)} free{beside} and {format_size(wanted)} are wanted on each target"
        if plan.request.capacity is not None:
            raise UserError(
                f"--beeond: capacity={format_size(plan.request.capacity)} is too much: {text}; ask for less"
            )
        raise _no_room(plan, target, text)
    if target.image and wanted is None and free * _SHARE < MIN_IMAGE:
        raise _no_room(plan, target, f"{target.base} has only {format_size(free)} free")
    if plan.config.storage.wipe == "discard":
        _trim(target.base, probe=True)


def _no_room(plan: Plan, target: Target, text: str) -> UserError | NodeError:
    """Room that other jobs have on a shared node is nobody's fault; room that is gone otherwise is the node's."""
    others = [
        home for home in _homes(plan.config) if home.startswith(f"{target.base}/") and home != target.home
    ]
    if others:
        return UserError(
            f"{text}, for other jobs on the node have the rest; "
            "all jobs there have to ask for a share with --beeond=capacity=SIZE, or use --exclusive"
        )
    return NodeError(f"{text}; see what fills it, or lower storage.capacity or beegfs.meta_size")


def check_base(base: str) -> None:
    """See that `base` is fit to hold targets: there, root's, and nobody else's to write. Raises NodeError."""
    try:
        mounts.check_directory(base)
    except OSError as error:
        raise NodeError(f"{base}: {error.strerror}; is the device mounted? See storage.paths") from None


def _free(base: str) -> int:
    room = os.statvfs(base)
    return room.f_bavail * room.f_frsize


def _make(plan: Plan, node: str, target: Target, instance: str, step: Callable[[str], None]) -> None:
    try:
        step(f"make {target.home}")
        os.mkdir(target.home, 0o700)
        step(f"write the record in {target.home}")
        _write_record(
            Record(
                instance=instance, job=plan.job, nodes=plan.own_nodes, node=node, backend=plan.backend,
                request=encode(plan.request), block=plan.block, created=time.time(),
                phase="preparing" if len(plan.targets) > 1 else "live",  # one has no other that could be missing
                config=plan.config.model_dump(mode="json"), home=target.home, index=target.index,
            )
        )  # fmt: skip
        _reserve(target.home)
        if (metadata := _metadata_on(plan, node, target)) is not None:
            _make_metadata(plan, metadata, step)
        if target.image is not None:
            _make_image(plan, target.image, _point(target), step)
            _reserve(_point(target))
        step(f"make {target.data}")
        os.mkdir(target.data, 0o755)
    except OSError as error:
        if error.errno == errno.ENOSPC:  # other jobs make theirs at the same time
            raise _no_room(plan, target, f"{target.base} has become full") from None
        raise NodeError(f"{target.home} cannot be made: {error}; look at the device (dmesg)") from None


def _metadata_on(plan: Plan, node: str, target: Target) -> Metadata | None:
    """The metadata server's file system that is beside `target` on `node`."""
    return plan.metadata if target.index == 0 and node in plan.meta_nodes else None


def _enter(target: Target, phase: str, step: Callable[[str], None]) -> None:
    """Write `phase` into a target's record, if it has one that says something else. Raises NodeError."""
    record = _read_record(target.home)
    if record is None and phase == "live":  # it would go on saying that nothing has run
        raise NodeError(f"{target.home}: the record cannot be read again; look at the device (dmesg)")
    if record is None or record.phase == phase:
        return
    step(f"write in {target.home}: {phase}")
    try:
        _write_record(replace(record, phase=phase))
    except OSError as error:
        raise NodeError(f"{target.home}: the record cannot be written: {error}") from None


def _to_reserve(path: str) -> int:
    return max(1 << 20, min(_RESERVED, _free(path) // 100))


def _reserve(directory: str) -> None:
    """Take the room that tear-down needs when the job has filled all: for records, a journal, directories to probe."""
    path = f"{directory}/{_RESERVE}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _to_reserve(directory))
    finally:
        os.close(descriptor)


def _give_room(directory: str) -> bool:
    """Free what `_reserve` took; whether there was anything. Truncated first: XFS frees what is unlinked later."""
    path = f"{directory}/{_RESERVE}"
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)
        os.unlink(path)
        return True
    return False


def _point(target: Target) -> str:
    """Where the file system in a target's image is mounted."""
    return str(Path(target.data).parent)


def _make_image(plan: Plan, image: str, point: str, step: Callable[[str], None]) -> None:
    size = plan.target_capacity or int(_free(str(Path(image).parent)) * _SHARE)
    step(f"make {image}")
    descriptor = os.open(image, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # Reserved, not only sparse: an image that outgrows its device loses data where ENOSPC would only annoy.
        os.posix_fallocate(descriptor, 0, size >> 20 << 20)
    finally:
        os.close(descriptor)
    step(f"make a file system in {image}")
    # Inodes of 512 bytes hold the extended attributes of BeeGFS and GlusterFS (mkfs.xfs(8)).
    mkfs = ("mkfs.xfs", "-q", "-f", "-K", "-i", "size=512", image)
    run(Command(mkfs), search_path=_SYSTEM_PATH, deadline_s=plan.config.deadlines.start)
    step(f"mount {image}")
    _attach(image, point, plan.config.deadlines.start)


def _make_metadata(plan: Plan, metadata: Metadata, step: Callable[[str], None]) -> None:
    """Copy and mount a metadata server's file system. What it is copied from is made if it is not there."""
    base = plan.targets[0].base
    if metadata.size > (free := _free(base)):
        text = f"{base} has {format_size(free)} free and metadata takes {format_size(metadata.size)}"
        raise _no_room(plan, plan.targets[0], text)
    make_template(plan.config, step=step)
    step(f"make {metadata.image}")
    source = os.open(metadata.template, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        image = os.open(
            metadata.image, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            _clone(source, image)
            os.posix_fallocate(image, 0, os.fstat(source).st_size)  # reserved, as every image
        finally:
            os.close(image)
    finally:
        os.close(source)
    step(f"mount {metadata.image}")
    _attach(metadata.image, metadata.data, plan.config.deadlines.start)


_FICLONE: Final = 0x40049409  # linux/fs.h


def _clone(source: int, copy: int) -> None:
    """Give the empty file `copy` the content of `source`: shared blocks where the file system can, else the data."""
    try:
        fcntl.ioctl(copy, _FICLONE, source)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.EXDEV}:
            raise
    else:
        return
    size = os.fstat(source).st_size
    os.ftruncate(copy, size)
    for start, end in _data(source, size):
        position = start
        while position < end:
            position += _copy_part(source, copy, position, end - position)


def _copy_part(source: int, copy: int, position: int, size: int) -> int:
    """Copy some of the `size` bytes at `position`; how many it were."""
    try:
        return os.copy_file_range(source, copy, size, position, position)
    except OSError as error:
        if error.errno != errno.EXDEV:  # on a device of the job's own the copy is in another file system
            raise
    return os.pwrite(copy, os.pread(source, min(size, 1 << 20), position), position)


def make_template(config: SiteConfig, *, step: Callable[[str], None] = _no_step) -> None:
    """Make what metadata images are copied from, if it is not there: on an idle node, so that no job waits for it.

    mkfs.xfs(8) writes the directories itself, from a list: nothing is mounted, and a crash leaves files that the next
    call overwrites. Raises NodeError.
    """
    template = metadata_template(config)
    if os.path.lexists(template):
        return
    directory = str(Path(template).parent)
    if directory == TEMPLATES:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    check_base(directory)
    base = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(base, fcntl.LOCK_EX)  # two jobs may begin at once
        if os.path.lexists(template):
            return
        step(f"make {template}")
        new, layout = f"{template}.new", f"{template}.layout"
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, config.beegfs.meta_size >> 20 << 20)
            # Sectors of 4 KiB: a loop device on a copy that shares blocks has no smaller ones.
            mkfs = ("mkfs.xfs", "-q", "-f", "-K", "-s", "size=4096", "-i", "size=512", "-p", layout, new)
            command = Command(mkfs, files=(File(layout, get("beegfs").skeleton()),))
            run(command, search_path=_SYSTEM_PATH, deadline_s=config.deadlines.start)
            os.unlink(layout)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(new, template)
        os.fsync(base)
    except OSError as error:
        raise NodeError(f"{template} cannot be made: {error}") from None
    finally:
        os.close(base)


_SYSTEM_PATH: Final = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")


# --- images -----------------------------------------------------------------------------------------------

_LOOP_CTL_GET_FREE: Final = 0x4C82  # linux/loop.h
_LOOP_CONFIGURE: Final = 0x4C0A
_LOOP_CLR_FD: Final = 0x4C01
_LOOP_GET_STATUS64: Final = 0x4C05
_LO_AUTOCLEAR_DIRECT_IO: Final = 4 | 16


def attach(plan: Plan, *, deadline_s: float) -> None:
    """Make the data of a detached instance accessible again; a no-op where it is. Raises NodeError."""
    _reach(plan, deadline_s)
    node = ""
    for target in plan.targets:
        record = _read_record(target.home)
        if record is None:
            raise NodeError(
                f"{target.home} is not there or has no readable record; nothing can be recovered from it"
            )
        _check_instance(plan, record)
        if record.index not in (None, target.index):
            raise NodeError(
                f"{target.home} holds target {record.index} of the job, and target {target.index} should be there: the "
                "devices have changed places; give them the names or mounts that they had"
            )
        if record.phase == "wiping":
            raise NodeError(
                f"{target.home} is being wiped and no longer whole; give it up with recover --discard"
            )
        if target.image is None and not os.path.isdir(target.data):
            raise NodeError(f"{target.data} is missing; what was kept is not whole")
        node = record.node
    for image, point in _images(plan):
        if plan.metadata is not None and image == plan.metadata.image and node not in plan.meta_nodes:
            continue
        if not os.path.lexists(image):
            raise NodeError(f"{image} is missing; what was kept is not whole")
        if mounts.mount_at(point) is None:
            # Who kept it from being detached may still write; two file systems on one image would ruin each other.
            _free_loops(image, plan.job.uid, time.monotonic() + deadline_s)
            _attach(image, point, deadline_s)


def _reach(plan: Plan, deadline_s: float, lost: Sequence[str] = ()) -> list[str]:
    """Mount the job's file systems on whole devices; returns where they were not mounted yet. Raises NodeError."""
    reached = []
    for target in plan.targets:
        if target.device is not None and target.home not in lost:
            from beeond_ctl import devices

            if _own(plan, target.device) is not None:
                if mounts.mount_at(target.base) is None:
                    reached.append(target.base)
                devices.attach(target.device, target.base, deadline_s=deadline_s)
    return reached


def _own(plan: Plan, device: str) -> devices.Content | None:
    """What the job has on `device`. Raises NodeError when that cannot be known."""
    from beeond_ctl import devices

    try:
        found = devices.content(device)
    except devices.ForeignError:
        return None
    return found if found is not None and found.job_id == plan.job.job_id else None


def _images(plan: Plan) -> list[tuple[str, str]]:
    """The images that this node may have, and where each is mounted."""
    found = [(target.image, _point(target)) for target in plan.targets if target.image is not None]
    if plan.metadata is not None:
        found.append((plan.metadata.image, plan.metadata.data))
    return found


def detach(plan: Plan, *, deadline_s: float) -> None:
    """Unmount images and free their loop devices, keeping the data; a no-op where nothing is mounted.

    Raises NodeError.
    """
    deadline = time.monotonic() + deadline_s
    for image, point in _images(plan):
        mounts.unmount(point, deadline_s=deadline_s, uid=plan.job.uid)
        # Any user's mount namespace may have a copy of the mount; without its point no namespace has it (rmdir(2)).
        mounts.remove_point(point)
        _free_loops(image, plan.job.uid, deadline)


_LOOK_S: Final = 0.5
"""Seconds that a loop device is given to go by itself, before it is looked who has it, and between two such looks."""
_HELD_S: Final = 10.0
"""Seconds that is waited for a process that is not ours to end."""


def _free_loops(image: str, uid: int, deadline: float) -> None:
    """Wait until no loop device has `image`; processes of user `uid` that keep one are ended. Raises NodeError."""
    look_at, pause, users = time.monotonic() + _LOOK_S, 0.002, list[str]()
    while found := _loops(image):  # the kernel frees a loop device a little after its last use
        now = time.monotonic()
        if users and now > deadline:
            raise NodeError(
                f"{image} is still used by {', '.join(found)}, held by {', '.join(users)}; end that, or reboot the node"
            )
        if now > deadline:
            raise NodeError(f"{image} is still used by {', '.join(found)}; see losetup(8)")
        if now > look_at:
            held, users = bool(users), [user for device in found for user in _loop_users(image, device, uid)]
            if users and not held:
                deadline = min(deadline, time.monotonic() + _HELD_S)
            look_at = time.monotonic() + _LOOK_S
        time.sleep(pause)
        pause = min(pause * 2, 0.05)


def _loop_users(image: str, device: str, uid: int) -> list[str]:
    """Who uses the file system in `image` by the loop device `device`; processes of user `uid` are ended."""
    try:
        number = os.stat(device).st_rdev
    except FileNotFoundError:
        return []
    name = f"{os.major(number)}:{os.minor(number)}"
    return mounts.end_users(name, uid=uid, sure=lambda: device in _loops(image))


_IMAGE_OPTIONS: Final = "nodev,nosuid,noatime,nouuid"  # a copy has the identity of what it was copied from


def _attach(image: str, point: str, deadline_s: float) -> None:
    os.makedirs(point, mode=0o700, exist_ok=True)
    with _loop(image) as device:
        mounts.mount("-t", "xfs", "-o", _IMAGE_OPTIONS, device, point, deadline_s=deadline_s)


@contextmanager
def _loop(image: str) -> Iterator[str]:
    """A loop device on `image` that goes when the last user does: after a crash, and after unmounting (loop(4))."""
    backing = os.open(image, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        device, descriptor = _configure_loop(backing, image)
    finally:
        os.close(backing)
    try:
        yield device
    finally:
        os.close(descriptor)


def _configure_loop(backing: int, image: str) -> tuple[str, int]:
    # struct loop_config: fd, block_size, struct loop_info64 with its flags and file name, reserved
    name = os.fsencode(image)[:63]
    info = struct.pack("=40x III I 64s 64x 32x 16x", 0, 0, 0, _LO_AUTOCLEAR_DIRECT_IO, name)
    config = struct.pack("=II", backing, 0) + info + bytes(64)
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NodeError(f"no loop devices here: {error}; load the kernel module loop") from None
    try:
        for _ in range(64):  # somebody else may be quicker to take a free one
            device = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(descriptor, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(descriptor)
                if error.errno != errno.EBUSY:
                    raise
            else:
                return device, descriptor
    except OSError as error:
        raise NodeError(f"{image}: no loop device to be had: {error}") from None
    finally:
        os.close(control)
    raise NodeError(f"{image}: no free loop device; others take them as soon as they are free")


def _loops(image: str) -> list[str]:
    home, inode = str(Path(image).parent), None
    with suppress(FileNotFoundError):  # it may be removed, and a device still on it
        inode = os.lstat(image).st_ino
    return [device for device, file in _all_loops() if file == image and _on(home, device, inode)]


def _all_loops() -> Iterator[tuple[str, str]]:
    """Loop devices, each with the file it is on."""
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            file = path.read_text(errors="surrogateescape").rstrip("\n").removesuffix(" (deleted)")
            yield f"/dev/{path.parts[3]}", file


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop device on an image of ours."""

    device: str
    image: str
    job_id: int


def loops(config: SiteConfig) -> list[Loop]:
    """The loop devices on images below this node's storage.paths."""
    found = []
    for device, file in _all_loops():
        for base in config.storage.paths:
            match = re.fullmatch(re.escape(base) + r"/job-([0-9]+)/(image|metadata)", file)
            if match and _on(base, device):
                found.append(Loop(device, file, int(match[1])))
    return sorted(found, key=lambda loop: (loop.job_id, loop.device))


def _on(base: str, device: str, inode: int | None = None) -> bool:
    """Whether the file of a loop device, with that inode number, lies in the file system at `base`: containers have
    paths of their own."""
    # struct loop_info64: lo_device and lo_inode, those of the file, come first (linux/loop.h)
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            info = fcntl.ioctl(descriptor, _LOOP_GET_STATUS64, bytes(232))
        finally:
            os.close(descriptor)
        number, its_inode = struct.unpack_from("=2Q", info)
        if inode not in (None, its_inode):
            return False
        # encoded as huge_encode_dev or new_encode_dev has it: compare what both agree on
        wanted = os.stat(base).st_dev
        return (number & 0xFF, number >> 8 & 0xFFF) == (os.minor(wanted) & 0xFF, os.major(wanted) & 0xFFF)
    except OSError:
        return False


def free_loop(loop: Loop) -> None:
    """Let go of a loop device; one that is in use goes with its last user (loop(4)). Raises OSError.

    One that is on another file by now, since it was free in between, is left alone.
    """
    descriptor = os.open(loop.device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if loop.device in _loops(loop.image):
            fcntl.ioctl(descriptor, _LOOP_CLR_FD)
    finally:
        os.close(descriptor)


# --- records ----------------------------------------------------------------------------------------------


def _write_record(record: Record) -> None:
    """Replace the record in one step that survives a power failure. Raises OSError."""
    try:
        _replace_record(record)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT} or not _give_room(record.home):
            raise
        _replace_record(record)


def _replace_record(record: Record) -> None:
    data = {"version": _VERSION, **asdict(record)}
    del data["home"]
    path, temporary = f"{record.home}/{_RECORD}", f"{record.home}/{_UNFINISHED}"
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with os.fdopen(descriptor, "w") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(descriptor)
    os.rename(temporary, path)
    _sync_directory(record.home)


def _read_record(home: str) -> Record | None:
    """The record in `home`; None where there is none that can be read."""
    try:
        data = json.loads(Path(home, _RECORD).read_text())
        if data.pop("version") != _VERSION:
            return None
        data["job"] = Job(**data["job"])
        data["nodes"] = tuple(data["nodes"])
        return Record(**data, home=home)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(plan: Plan) -> None:
    """Write out to the devices what is in memory of the instance's data. May hang as they do. Raises OSError."""
    missing = absent(plan)  # to be told by who needs them
    for target in plan.targets:
        if target.home in missing:
            continue
        descriptor = os.open(target.home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            libc.call("syncfs", descriptor)
        finally:
            os.close(descriptor)


def set_names(plan: Plan, names: dict[str, Any]) -> None:
    """Write `names` into the records of the instance. Raises NodeError."""
    _change(plan, names=names)


def make_room(plan: Plan) -> None:
    """Free what was kept from the job: to start services, to probe and to stage out take some. Raises NodeError."""
    for target in plan.targets:
        for directory in {target.home, _point(target)}:
            try:
                _give_room(directory)
            except OSError as error:
                raise NodeError(f"{directory}/{_RESERVE} cannot be removed: {error}") from None


def set_attempt(plan: Plan, attempt: str) -> None:
    """Write which stage-out begins into the records of the instance. Raises NodeError."""
    _change(plan, attempt=attempt)


def set_phase(plan: Plan, phase: str, *, rebooted: bool = False) -> None:
    """Write `phase`, one of PHASES, and `rebooted` into the records of the instance. Raises NodeError."""
    _change(plan, phase=phase, rebooted=rebooted)


def _change(plan: Plan, **changes: Any) -> None:  # noqa: ANN401 - fields of a record
    """Replace fields in the records of the instance that are not yet so. Raises NodeError."""
    for target in plan.targets:
        record = _read_record(target.home)
        if record is not None and record != replace(record, **changes):
            _check_instance(plan, record)
            if record.phase == "wiping":
                raise NodeError(
                    f"{target.home} is being wiped and no longer whole; give it up with recover --discard"
                )
            try:
                _write_record(replace(record, **changes))
            except OSError as error:
                raise NodeError(f"{target.home}: the record cannot be written: {error}") from None


def _check_instance(plan: Plan, record: Record) -> None:
    """See that `record` is of this run. Where the run directory names no instance (after a reboot) it is."""
    with suppress(FileNotFoundError):
        if Path(plan.run_dir, "instance").read_text() != record.instance:
            raise NodeError(
                f"{record.home} holds an earlier run of job {record.job.job_id} ({record.phase}) and is left alone; "
                f"run `beeond-ctl recover {record.job.job_id}`"
            )
    if record.job.restart != plan.job.restart:
        raise NodeError(
            f"{record.home} holds run {record.job.run_id} of the job and not {plan.job.run_id}; it is left alone"
        )


def read_records(config: SiteConfig) -> list[Record]:
    """The records of all instances on this node's devices, by job and then device."""
    found = [_read_record(home) for home in _homes(config)]
    return sorted((record for record in found if record), key=lambda record: (record.job_id, record.home))


def changed_at(records: Iterable[Record]) -> float | None:
    """When the youngest of `records` was last written, in seconds since the epoch: when what is kept was stopped."""
    times = []
    for record in records:
        with suppress(OSError):
            written = os.stat(f"{record.home}/{_RECORD}", follow_symlinks=False).st_mtime
            times.append(
                max(written, record.created)
            )  # the clock may have been wrong, as it is early after boot
    return max(times, default=None)


def absent(plan: Plan) -> list[str]:
    """The homes of this node's targets that are not there, or whose device is not or does not answer."""
    return [target.home for target in plan.targets if not _is_there(plan, target)]


def _is_there(plan: Plan, target: Target) -> bool:
    if target.device is None:
        return os.path.lexists(target.home)
    with suppress(NodeError):
        return _own(plan, target.device) is not None
    return False


def strays(config: SiteConfig) -> list[str]:
    """Homes without a readable record: an empty one is left by a crash in the first moment of `prepare`."""
    return [home for home in _homes(config) if _read_record(home) is None]


def _homes(config: SiteConfig) -> Iterator[str]:
    for device, base in zip_longest(config.storage.devices, config.bases):
        if device is not None:
            yield from _home_on(config, device, base)
            continue
        with suppress(OSError):
            for name in sorted(os.listdir(base)):
                if re.fullmatch(r"job-[0-9]+", name):
                    yield f"{base}/{name}"


def _home_on(config: SiteConfig, device: str, base: str) -> Iterator[str]:
    """The home of the job that has `device`, which is mounted for it: what is in it is known in no other way."""
    from beeond_ctl import devices

    with suppress(NodeError):  # `check` and the next job tell what is wrong with it
        found = devices.attach(device, base, deadline_s=config.deadlines.start)
        if found is not None:
            yield f"{base}/job-{found.job_id}"


def stray_is_empty(config: SiteConfig, home: str) -> bool:
    """Whether nothing is lost with the stray `home`. Raises OSError and NodeError when that cannot be seen."""
    for device, base in _devices_of(config, home):
        from beeond_ctl import devices

        found = devices.content(device)
        if found is None or found.state != "whole":
            return True  # never finished, or no longer whole: erasing it had begun
        if mounts.mount_at(base) is None:
            return False
        with suppress(FileNotFoundError):
            return not _left_in(home)
        return not os.listdir(base)
    return not _left_in(home)


def _left_in(home: str) -> list[str]:
    """The names in `home`, but for a record that was not finished: it is written before all else."""
    return [name for name in os.listdir(home) if name != _UNFINISHED]


def remove_stray(config: SiteConfig, home: str, *, deadline_s: float) -> None:
    """Remove an empty stray. Raises OSError and NodeError."""
    with suppress(FileNotFoundError):
        os.unlink(f"{home}/{_UNFINISHED}")
    with suppress(FileNotFoundError):
        os.rmdir(home)
    for device, base in _devices_of(config, home):
        from beeond_ctl import devices

        deadline = time.monotonic() + deadline_s
        devices.erase(device, base, int(home.rpartition("-")[2]), config.storage.wipe, deadline=deadline)


def _devices_of(config: SiteConfig, home: str) -> list[tuple[str, str]]:
    """The whole device that `home` is on, and where it is mounted, if it is on one."""
    pairs = zip(config.storage.devices, config.bases, strict=False)
    return [(device, base) for device, base in pairs if home.startswith(f"{base}/")]


# --- wiping -----------------------------------------------------------------------------------------------


def wipe(
    plan: Plan,
    method: str,
    *,
    deadline_s: float,
    leave: bool = False,
    lost: Sequence[str] = (),
    step: Callable[[str], None] = _no_step,
) -> list[Receipt]:
    """Remove the instance's data from all targets of this node, and prove that it is gone.

    All records say so before anything is removed: a crash cannot leave one that tells of data next to nothing.
    `method` is one of storage.wipe's: delete unlinks; discard unlinks and then has the device's file system tell the
    device what is free (FITRIM, ioctl_fitrim); zero overwrites what is allocated, syncs, reads a sample back, unlinks.
    Safe to repeat, from any point at which `prepare` or `wipe` ended. Targets that hold nothing get no receipt.
    `leave`: a home that is another run's is not of this instance, and is left as it is. `lost`: homes that are given up
    with devices that are not there.
    Raises NodeError: something is mounted in the home, a file is immutable, the home is another run's, the device
    cannot discard, or `deadline_s` seconds have passed.
    """
    deadline = time.monotonic() + deadline_s
    reached = _reach(plan, deadline_s, lost)
    targets = []
    for target in plan.targets:
        if target.home in lost:
            continue
        if (record := _read_record(target.home)) is not None:
            try:
                _check_instance(plan, record)
            except NodeError:
                if not leave:
                    raise
                if target.base in reached:
                    mounts.unmount(target.base, deadline_s=deadline_s, uid=plan.job.uid)
                    mounts.remove_point(target.base)
                continue
        targets.append(target)
    step("detach images")
    detach(plan, deadline_s=deadline_s)
    _each(targets, lambda target: _announce(plan, target, step))
    receipts: list[Receipt] = []
    _each(targets, lambda target: receipts.extend(_wipe(plan, target, method, deadline, step)))
    return sorted(receipts, key=lambda receipt: receipt.home)


def _announce(plan: Plan, target: Target, step: Callable[[str], None]) -> None:
    """See that a target may be wiped, and write into its record that it is being wiped. Raises NodeError."""
    home = target.home
    if target.device is not None:
        found = _own(plan, target.device)
        if found is None or found.state != "whole":
            return
    try:
        status = os.lstat(home)  # an error of the device is not for nothing
    except FileNotFoundError:
        return
    except OSError as error:
        raise NodeError(f"{home} cannot be wiped: {error}") from None
    check_base(target.base)
    _refuse_mounts(home)
    if status.st_uid != 0:
        raise NodeError(f"{home} does not belong to root, so it is not ours; it is left alone")
    _enter(target, "wiping", step)


def _wipe(
    plan: Plan, target: Target, method: str, deadline: float, step: Callable[[str], None]
) -> list[Receipt]:
    try:
        if target.device is not None:
            return _erase(plan, target, target.device, method, deadline, step)
        return [_wipe_home(target, method, deadline, step)] if os.path.lexists(target.home) else []
    except OSError as error:
        raise NodeError(f"{target.home} cannot be wiped: {error}") from None


def _wipe_home(target: Target, method: str, deadline: float, step: Callable[[str], None]) -> Receipt:
    began, home = time.monotonic(), target.home
    descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        record = _read_record(home)
        names = [name for name in os.listdir(descriptor) if name not in {_RECORD, _UNFINISHED, _RESERVE}]
        if record is None and names:
            raise NodeError(f"{home} has data and no readable record; look at it, then remove it by hand")
        _give_room(home)
        step(f"remove what is in {home}")
        sweeper = _Sweeper(descriptor, home, method, deadline)
        if names:
            sweeper.run(names)
        verified = sweeper.verified
        if method == "discard":
            step(f"discard on {target.base}")
            os.fsync(descriptor)  # what was freed can be discarded once the journal says so
            _trim(target.base)
            verified += "; discarded"
        step(f"remove the record in {home}")
        for name in (_UNFINISHED, _RECORD):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    step(f"remove {home}")
    os.rmdir(home)
    _sync_directory(target.base)
    if os.path.lexists(home):
        raise NodeError(f"{home} is there again; something on this node makes it")
    return Receipt(
        home, method, sweeper.files, sweeper.bytes, time.monotonic() - began, verified, time.time()
    )


def _erase(
    plan: Plan, target: Target, device: str, method: str, deadline: float, step: Callable[[str], None]
) -> list[Receipt]:
    """Wipe a target that has a device of its own: all at once, whatever is in it."""
    from beeond_ctl import devices

    began, home = time.monotonic(), target.home
    found = _own(plan, device)
    if found is None:
        return []
    files = size = 0
    if found.state == "whole":
        record = _read_record(home)
        with suppress(FileNotFoundError):
            if record is None and _left_in(home):
                raise NodeError(f"{home} has data and no readable record; look at it, then remove it by hand")
        room = os.statvfs(target.base)
        files, size = room.f_files - room.f_ffree, (room.f_blocks - room.f_bfree) * room.f_frsize
    step(f"erase {device}")
    verified = devices.erase(
        device, target.base, plan.job.job_id, method, deadline=deadline, uid=plan.job.uid
    )
    return [Receipt(home, method, files, size, time.monotonic() - began, verified, time.time())]


def _refuse_mounts(home: str) -> None:
    if inside := mounts.below(home):
        raise NodeError(
            f"{inside[0].point}: {inside[0].source} is mounted there, so {home} is left alone; unmount it"
        )


_DEEP: Final = 32
"""Levels of directories that are open at once."""


class _Sweeper:
    """Removes a tree, counting. One thread: on one device more were measured to be slower, as rm(1) is.

    A directory that is deep down is first moved up into one flat directory, and removed from there. So no path is
    deep however deep the tree, nothing is reached through a link, and after a crash the flat directory is simply
    what is left.
    """

    def __init__(self, home: int, path: str, method: str, deadline: float) -> None:
        self._home, self._path, self._method, self._deadline = home, path, method, deadline
        self._device = os.fstat(home).st_dev
        self._trash = -1
        self._moved = 0
        self.files = 0
        self.bytes = 0
        self.sampled = 0

    @property
    def verified(self) -> str:
        """What was looked at afterwards."""
        text = f"{self._path} and all in it are gone"
        return f"{text}; {self.sampled} blocks read back as zeros" if self._method == "zero" else text

    def run(self, names: list[str]) -> None:
        """Remove `names` in the home. Raises NodeError and OSError."""
        with suppress(FileExistsError):
            os.mkdir(_TRASH, 0o700, dir_fd=self._home)
        self._trash = self._open(_TRASH, self._home)
        try:
            left = os.listdir(self._trash)
            self._moved = 1 + max((int(name) for name in left if name.isdigit()), default=0)
            for name in names:
                if name != _TRASH:
                    self._remove(name, self._home, 0)
            while left := os.listdir(self._trash):
                for name in left:
                    self._remove(name, self._trash, 0)
        finally:
            os.close(self._trash)
        os.rmdir(_TRASH, dir_fd=self._home)

    def _remove(self, name: str, parent: int, depth: int) -> None:
        """Remove the file or directory `name`, or move the directory up to be removed later."""
        if time.monotonic() > self._deadline:
            raise NodeError(
                f"{self._path}: wiping was not done in time; it goes on where it stopped when run again"
            )
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if status.st_dev != self._device:
            raise NodeError(f"{self._path}: something is mounted at {name!r} in it; unmount it")
        try:
            if stat.S_ISDIR(status.st_mode):
                self._remove_directory(name, parent, depth)
                return
            size = 0
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                size = status.st_blocks * 512
                if self._method == "zero":
                    self._zero(name, parent)
                elif self._method == "discard":
                    self._truncate(name, parent)
            os.unlink(name, dir_fd=parent)
        except PermissionError:
            raise NodeError(
                f"{self._path}: {name!r} in it is immutable or append-only; run chattr(1) -i -a on it"
            ) from None
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise NodeError(f"{self._path}: something is mounted at {name!r} in it; unmount it") from None
            raise
        self.files += 1
        self.bytes += size

    def _remove_directory(self, name: str, parent: int, depth: int) -> None:
        if depth == _DEEP:
            os.rename(name, str(self._moved), src_dir_fd=parent, dst_dir_fd=self._trash)
            self._moved += 1
            return
        descriptor = self._open(name, parent)
        try:
            while True:
                with os.scandir(descriptor) as entries:
                    for entry in entries:
                        self._remove(entry.name, descriptor, depth + 1)
                try:
                    os.rmdir(name, dir_fd=parent)
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY:  # scandir may miss what is moved or made meanwhile
                        raise
                else:
                    break
        finally:
            os.close(descriptor)
        self.files += 1

    def _zero(self, name: str, parent: int) -> None:
        """Overwrite what is allocated to a file, and look at both ends of each part afterwards."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=parent)
        try:
            size = os.fstat(descriptor).st_size
            parts = list(_data(descriptor, size))
            zeros = bytes(1 << 20)
            for start, end in parts:
                for offset in range(start, end, len(zeros)):
                    _write_all(descriptor, zeros[: min(len(zeros), end - offset)], offset)
                    if time.monotonic() > self._deadline:
                        raise NodeError(f"{self._path}: overwriting was not done in time; run it again")
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            for start, end in parts:
                for offset in {start, max(start, end - 4096)}:
                    if any(os.pread(descriptor, min(4096, end - offset), offset)):
                        raise NodeError(
                            f"{self._path}: {name!r} still has its data after it was overwritten; replace the device"
                        )
                    self.sampled += 1
        finally:
            os.close(descriptor)

    @staticmethod
    def _truncate(name: str, parent: int) -> None:
        """Free a file's blocks now: XFS frees those of an unlinked file some time later, too late to be discarded."""
        descriptor = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    @staticmethod
    def _open(name: str, parent: int) -> int:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


def _data(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that hold data, as pairs of offsets (lseek(2), SEEK_DATA)."""
    position = 0
    while position < size:
        try:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        position = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, position


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


_FITRIM: Final = 0xC0185879  # linux/fs.h


def _trim(base: str, *, probe: bool = False) -> None:
    """Tell the device below `base` what is free; `probe` only sees whether it can be told. Raises NodeError."""
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _FITRIM, struct.pack("=QQQ", 0, 0 if probe else 2**64 - 1, 0))
    except OSError as error:
        if not (probe and error.errno == errno.EINVAL):  # a length of zero is refused by who can do it
            raise NodeError(
                f"{base} cannot discard ({error.strerror}); set storage.wipe to delete or zero"
            ) from None
    finally:
        os.close(descriptor)


def _each(targets: Iterable[Target], work: Callable[[Target], object]) -> None:
    """Do `work` for all targets at once; raises what one that failed raised, when all have ended."""
    failures: list[BaseException] = []

    def guarded(target: Target) -> None:
        try:
            work(target)
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
