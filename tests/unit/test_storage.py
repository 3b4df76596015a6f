"""Preparing, retaining and wiping targets on real directories, images, loop devices and XFS."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import mounts, storage
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import NodeError, UserError
from beeond_ctl.plan import Job, Plan, make_plan
from beeond_ctl.request import Request
from tests.testbed.host import mount_table
from tests.unit.holding import ending, started
from tests.unit.root_directory import needs_root, root_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = needs_root


@pytest.fixture
def base() -> Iterator[Path]:
    with root_directory() as path:
        (path / "nvme0").mkdir()
        (path / "nvme1").mkdir()
        yield path
        for device in devices_of(path):
            subprocess.run(["umount", device], check=False, stderr=subprocess.DEVNULL)
            subprocess.run(["losetup", "--detach", device], check=True)


def devices_of(base: Path) -> list[str]:
    """The block devices that stand for the node's own."""
    found = sorted((file, Path("/dev", path.parts[3])) for path, file in backing_files(base))
    return [str(device) for file, device in found if file.startswith(f"{base}/disk")]


def make_devices(base: Path) -> list[str]:
    for name in ("disk0", "disk1"):
        with (base / name).open("wb") as file:
            file.truncate(700 << 20)
        subprocess.run(["losetup", "--find", base / name], check=True)
    return devices_of(base)


def config(base: Path, kind: str = "directory", **more: Any) -> SiteConfig:
    where = {"paths": [f"{base}/nvme0", f"{base}/nvme1"]}
    if kind == "device":
        where = {"devices": devices_of(base) or make_devices(base)}
    return SiteConfig.model_validate({
        "storage": {"kind": kind, **where, **more},
        "paths": {"run": f"{base}/run"},
    })  # fmt: skip


def plan(
    base: Path,
    kind: str = "directory",
    *,
    restart: int = 0,
    capacity: int | None = None,
    wipe: str = "delete",
    site_capacity: str = "512MiB",
) -> Plan:
    site = config(base, kind, wipe=wipe, capacity=site_capacity)
    return make_plan(site, Request(capacity=capacity), Job(7, 1000, 1000, "alice", restart), ("n1", "n2"))


def left(base: Path) -> list[str]:
    """What is left of an instance: directories, and devices that carry anything."""
    carrying = [
        device for device in devices_of(base)
        if subprocess.run(["blkid", "-p", device], check=False, capture_output=True).returncode != 2
    ]  # fmt: skip
    return sorted(os.listdir(base / "nvme0") + os.listdir(base / "nvme1") + carrying)


def loops(base: Path) -> set[str]:
    """The loop devices on files below `base`."""
    return {str(path) for path, _ in backing_files(base)}


def backing_files(base: Path) -> Iterator[tuple[Path, str]]:
    """What tells of the loop devices on files below `base`; others, on files of any name, come and go meanwhile."""
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            if (file := path.read_text(errors="surrogateescape")).startswith(f"{base}/"):
                yield path, file


KINDS = pytest.mark.parametrize("kind", ["directory", "image", "device"])


@KINDS
def test_prepared_targets_are_empty_and_roots_alone(base: Path, kind: str) -> None:
    made = plan(base, kind)
    storage.prepare(made, "n1")
    for target in made.targets:
        assert os.listdir(target.data) == []
        assert os.stat(target.home).st_mode & 0o777 == 0o700
        os.setxattr(target.data, "user.x", b"1")
        os.setxattr(target.data, "trusted.x", b"1")
    storage.wipe(made, "delete", deadline_s=60)
    assert left(base) == []


def test_an_image_limits_what_a_job_can_take(base: Path) -> None:
    made = plan(base, "image", capacity=4 * 512 << 20)
    storage.prepare(made, "n1")
    room = os.statvfs(made.targets[0].data)
    assert room.f_blocks * room.f_frsize < 512 << 20
    assert os.stat(made.targets[0].image or "").st_blocks * 512 >= 512 << 20  # reserved, not only promised
    found = mounts.mount_at(str(Path(made.targets[0].data).parent))
    assert found is not None
    assert found.fstype == "xfs"
    storage.wipe(made, "delete", deadline_s=60)


def test_the_record_on_the_device_tells_all_that_recovery_needs(base: Path) -> None:
    made = plan(base, restart=3)
    storage.prepare(made, "n2")
    first, second = storage.read_records(made.config)
    assert (first.job, first.nodes, first.node, first.backend) == (made.job, ("n1", "n2"), "n2", "glusterfs")
    assert first.phase == "live"
    assert first.instance == second.instance
    storage.set_phase(made, "retained")
    assert [record.phase for record in storage.read_records(made.config)] == ["retained", "retained"]
    storage.wipe(made, "delete", deadline_s=60)
    assert storage.read_records(made.config) == []


@KINDS
def test_retained_data_survives_a_reboot(base: Path, kind: str) -> None:
    made = plan(base, kind)
    before = loops(base)
    storage.prepare(made, "n1")
    for target in made.targets:
        Path(target.data, "result").write_text("precious")
    storage.detach(made, deadline_s=20)
    storage.set_phase(made, "retained")
    assert loops(base) == before
    subprocess.run(["rm", "-r", made.run_dir], check=True)  # /run is empty after a reboot
    os.makedirs(made.run_dir)
    storage.attach(made, deadline_s=20)
    storage.attach(made, deadline_s=20)
    assert [Path(target.data, "result").read_text() for target in made.targets] == ["precious"] * 2
    storage.wipe(made, "delete", deadline_s=60)
    assert left(base) == []
    assert loops(base) == before


NAMESPACE = ["unshare", "-Urm", "sh", "-c"]
"""What any user may have: a mount namespace with copies of all mounts, which go on when the node's are gone."""


@pytest.mark.parametrize("kind", ["image", "device"])
def test_a_strangers_mount_namespace_keeps_nothing_from_being_kept_or_wiped(base: Path, kind: str) -> None:
    made = plan(base, kind)
    storage.prepare(made, "n1")
    Path(made.targets[1].data, "results").write_text("weeks")
    with ending(started([*NAMESPACE, "echo 1; exec sleep 600"], 65534)) as stranger:
        assert any(f" {base}/run" in line for line in mount_table(stranger.pid))
        storage.detach(made, deadline_s=20)
        storage.set_phase(made, "retained")
        storage.attach(made, deadline_s=20)
        assert Path(made.targets[1].data, "results").read_text() == "weeks"
    with ending(started([*NAMESPACE, "echo 1; exec sleep 600"], 65534)) as stranger:
        storage.wipe(made, "delete", deadline_s=20)
        assert left(base) == []
        assert kind == "device" or loops(base) == set()
        assert stranger.poll() is None


def held(base: Path, made: Plan, uid: int, how: str) -> subprocess.Popen[bytes]:
    """Whoever uses the first target's file system, by way of a mount that users see, as backend local has it."""
    seen, data = base / "seen", made.targets[0].data
    for path in (seen, base / "second"):
        path.mkdir()
        path.chmod(0o777)
    Path(data, "file").write_text("x")
    mounts.bind(data, str(seen))
    child = started([*NAMESPACE, f"{USE[how].format(base=base)}; echo 1; exec sleep 600"], uid)
    subprocess.run(["umount", seen], check=True)
    seen.rmdir()
    return child


USE = {
    "file": "exec 3<{base}/seen/file",
    "directory": "cd {base}/seen",
    "mount": "mount --bind {base}/seen {base}/second",
}


@pytest.mark.parametrize("how", USE)
def test_who_of_the_user_still_uses_an_image_in_another_namespace_is_ended(base: Path, how: str) -> None:
    made = plan(base, "image")
    storage.prepare(made, "n1")
    with ending(held(base, made, 1000, how)) as child:
        storage.detach(made, deadline_s=20)
        assert child.wait(60) == -15
        assert loops(base) == set()
    storage.wipe(made, "delete", deadline_s=20)
    assert left(base) == []


@pytest.mark.parametrize("how", USE)
def test_who_else_uses_an_image_in_another_namespace_is_named_and_lives(
    base: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_HELD_S", 2)
    made = plan(base, "image")
    storage.prepare(made, "n1")
    with ending(held(base, made, 65534, how)) as child:
        with pytest.raises(
            NodeError, match=rf"/image is still used by /dev/loop.*pid {child.pid}, .*not the job's"
        ):
            storage.wipe(made, "delete", deadline_s=60)
        with pytest.raises(NodeError, match="/image is still used by"):  # mounted twice it would be lost
            storage.attach(made, deadline_s=1)
        assert child.poll() is None
    storage.wipe(made, "delete", deadline_s=20)
    assert left(base) == []


def test_roll_back_never_wipes_what_an_earlier_run_left(base: Path) -> None:
    earlier = plan(base)
    storage.prepare(earlier, "n1")
    Path(earlier.targets[0].data, "result").write_text("precious")
    storage.set_phase(earlier, "retained")
    subprocess.run(["rm", "-r", earlier.run_dir], check=True)
    for restart in (0, 1):  # job ids may begin anew, and a requeued job keeps its own
        later = plan(base, restart=restart)
        with pytest.raises(NodeError, match=r"is left from an earlier run; run `beeond-ctl recover 7`"):
            storage.prepare(later, "n1")
        for undo in (
            lambda later=later: storage.wipe(later, "delete", deadline_s=60),
            lambda later=later: storage.set_phase(later, "wiping"),
            lambda later=later: storage.attach(later, deadline_s=10),
        ):
            with pytest.raises(NodeError, match="left alone"):
                undo()
        subprocess.run(["rm", "-r", later.run_dir], check=True)
    assert Path(earlier.targets[0].data, "result").read_text() == "precious"
    assert storage.read_records(earlier.config)[0].phase == "retained"
    storage.wipe(earlier, "delete", deadline_s=60)
    assert left(base) == []


class Killed(BaseException):
    """As if the process were killed here."""


def kill_at(number: int) -> Callable[[str], None]:
    seen: list[str] = []

    def step(text: str) -> None:
        seen.append(text)
        if len(seen) > number:
            raise Killed

    return step


@KINDS
def test_wiping_completes_wherever_preparing_or_wiping_was_killed(base: Path, kind: str) -> None:
    made = plan(base, kind)
    before = loops(base)
    number, done = 0, False
    while not done:
        try:
            storage.prepare(made, "n1", step=kill_at(number))
            done = True
        except Killed:
            pass
        storage.wipe(made, "delete", deadline_s=60)
        assert left(base) == []
        assert loops(base) == before
        number += 1
    assert number > 6
    number, done = 0, False
    while not done:
        storage.prepare(made, "n1")
        Path(made.targets[0].data, "d/e").mkdir(parents=True)
        try:
            storage.wipe(made, "delete", deadline_s=60, step=kill_at(number))
            done = True
        except Killed:
            pass
        storage.wipe(made, "delete", deadline_s=60)
        assert left(base) == []
        assert loops(base) == before
        number += 1
    assert number > 4


def test_wiping_again_is_nothing(base: Path) -> None:
    made = plan(base)
    storage.prepare(made, "n1")
    assert len(storage.wipe(made, "delete", deadline_s=60)) == 2
    assert storage.wipe(made, "delete", deadline_s=60) == []


def test_a_receipt_counts_what_was_removed(base: Path) -> None:
    made = plan(base)
    storage.prepare(made, "n1")
    data = Path(made.targets[0].data)
    (data / "d").mkdir()
    (data / "d/f").write_bytes(b"x" * 100_000)
    os.link(data / "d/f", data / "again")
    receipt = storage.wipe(made, "delete", deadline_s=60)[0].as_dict()
    assert json.loads(json.dumps(receipt)) == receipt
    assert receipt["files"] == 4  # data, d, f and its link
    assert 100_000 <= receipt["bytes"] < 200_000
    assert made.targets[0].home in receipt["verified"]


def test_what_users_make_is_wiped_and_nothing_outside_is_touched(base: Path) -> None:
    made = plan(base)
    storage.prepare(made, "n1")
    outside = base / "outside"
    (outside / "d").mkdir(parents=True)
    (outside / "d/f").write_text("mine")
    data = os.fsencode(made.targets[0].data)
    os.symlink(outside, os.path.join(data, b"link"))
    os.symlink(outside / "d", os.path.join(data, b"link2"))
    os.mkdir(os.path.join(data, b"no rights"), 0)
    os.mkfifo(os.path.join(data, b"fifo"))
    for name in (b"new\nline", b"\xff", b"-rf", b"wiping", b"instance.json", b"1"):
        os.mkdir(os.path.join(data, name))
        Path(os.fsdecode(os.path.join(data, name, b"x"))).write_text("x")
    storage.wipe(made, "zero", deadline_s=60)
    assert left(base) == []
    assert (outside / "d/f").read_text() == "mine"


def test_a_tree_deeper_than_any_path_may_be_is_wiped(base: Path) -> None:
    made = plan(base)
    storage.prepare(made, "n1")
    here = os.open(made.targets[0].data, os.O_RDONLY)
    for _ in range(3000):  # 3000 times 11 bytes: far above PATH_MAX, and Python's recursion limit
        os.mkdir("directory!", dir_fd=here)
        below = os.open("directory!", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert storage.wipe(made, "delete", deadline_s=60)[0].files == 3001
    assert left(base) == []


def test_many_files_are_wiped_soon(base: Path) -> None:
    made = plan(base)
    storage.prepare(made, "n1")
    for directory in range(20):
        path = f"{made.targets[0].data}/{directory}"
        os.mkdir(path)
        for number in range(1000):
            os.mknod(f"{path}/{number}")
    receipt = storage.wipe(made, "delete", deadline_s=60)[0]
    assert receipt.files == 20_021
    assert receipt.seconds < 60


FS_IOC_SETFLAGS, FS_IMMUTABLE_FL = 0x40086602, 0x10


def immutable(path: Path, flag: int) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, FS_IOC_SETFLAGS, struct.pack("=l", flag))
    except OSError as error:
        if error.errno in {errno.EOPNOTSUPP, errno.ENOTTY, errno.EPERM}:
            pytest.skip("no immutable files here")
        raise
    finally:
        os.close(descriptor)


def test_an_immutable_file_is_named_and_wiping_goes_on_afterwards(base: Path) -> None:
    made = plan(base)
    storage.prepare(made, "n1")
    path = Path(made.targets[0].data, "stone")
    path.write_text("x")
    immutable(path, FS_IMMUTABLE_FL)
    try:
        with pytest.raises(NodeError, match=r"'stone' in it is immutable .* chattr"):
            storage.wipe(made, "delete", deadline_s=60)
        assert storage.read_records(made.config)[0].phase == "wiping"
    finally:
        immutable(path, 0)
    storage.wipe(made, "delete", deadline_s=60)
    assert left(base) == []


@pytest.mark.parametrize("how", ["tmpfs", "bind"])
def test_nothing_is_wiped_while_something_is_mounted_inside(base: Path, how: str) -> None:
    made = plan(base)
    storage.prepare(made, "n1")
    (base / "nvme1/other").mkdir()
    inside = Path(made.targets[0].data, "inside")
    inside.mkdir()
    Path(made.targets[0].data, "first").write_text("x")
    if how == "bind":
        mounts.bind(str(base / "nvme1/other"), str(inside))
    else:
        mounts.mount("-t", "tmpfs", "tmpfs", str(inside))
    (inside / "file").write_text("not ours")
    with pytest.raises(NodeError, match="mounted there"):
        storage.wipe(made, "delete", deadline_s=60)
    assert (inside / "file").read_text() == "not ours"
    mounts.unmount(str(inside), deadline_s=10)
    storage.wipe(made, "delete", deadline_s=60)
    assert left(base) == ["other"]


def test_zero_overwrites_what_was_written_before_it_is_unlinked(base: Path) -> None:
    secret = b"TOP-SECRET-" + os.urandom(8).hex().encode()
    device = base / "device"
    with open(device, "wb") as file:
        file.truncate(400 << 20)
    subprocess.run(["mkfs.xfs", "-q", str(device)], check=True)
    mounts.mount("-o", "loop", str(device), f"{base}/nvme0")
    made = plan(base, wipe="zero", capacity=1 << 20)
    storage.prepare(made, "n1")
    with open(Path(made.targets[0].data, "f"), "wb") as file:
        file.write(secret * 300_000)
        file.seek(64 << 20)
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    assert secret in device.read_bytes()
    receipt = storage.wipe(made, "zero", deadline_s=60)[0]
    assert "blocks read back as zeros" in receipt.verified
    mounts.unmount(f"{base}/nvme0", deadline_s=10)
    assert secret not in device.read_bytes()


def test_a_device_that_cannot_discard_is_told_before_anything_is_made(base: Path) -> None:
    mounts.mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", f"{base}/nvme1")
    made = plan(base, wipe="discard", capacity=1 << 20)
    with pytest.raises(NodeError, match=r"nvme1 cannot discard .* set storage.wipe to delete or zero"):
        storage.prepare(made, "n1")
    assert left(base) == []


def test_discard_gives_the_space_back_to_the_device(base: Path) -> None:
    for number in (0, 1):
        with open(base / f"device{number}", "wb") as file:
            file.truncate(400 << 20)
        subprocess.run(["mkfs.xfs", "-q", str(base / f"device{number}")], check=True)
        mounts.mount("-o", "loop", str(base / f"device{number}"), f"{base}/nvme{number}")
    made = plan(base, wipe="discard", capacity=1 << 20)
    storage.prepare(made, "n1")
    Path(made.targets[0].data, "f").write_bytes(os.urandom(50 << 20))
    os.sync()
    used = (base / "device0").stat().st_blocks * 512
    storage.wipe(made, "discard", deadline_s=60)
    assert (base / "device0").stat().st_blocks * 512 < used - (40 << 20)


def test_an_unfit_base_is_named_with_what_to_do(base: Path) -> None:
    (base / "nvme1").chmod(0o777)
    with pytest.raises(NodeError, match="nvme1 may be written by others than root; run `chmod go-w"):
        storage.prepare(plan(base), "n1")
    (base / "nvme1").rmdir()
    with pytest.raises(NodeError, match=r"nvme1: No such file or directory; is the device mounted\?"):
        storage.prepare(plan(base), "n1")
    (base / "nvme1").symlink_to(base / "nvme0")
    with pytest.raises(NodeError, match="symbolic link"):
        storage.prepare(plan(base), "n1")
    assert os.listdir(base / "nvme0") == []


def test_too_large_a_wish_is_the_users_mistake_and_the_sites_is_the_nodes(base: Path) -> None:
    with pytest.raises(UserError, match="capacity=4PiB is too much"):
        storage.prepare(plan(base, capacity=4 << 50), "n1")
    with pytest.raises(NodeError, match=r"lower storage\.capacity"):
        storage.prepare(plan(base, site_capacity="1PiB"), "n1")


@pytest.mark.parametrize("kind", ["directory", "image"])
def test_metadata_beside_a_target_takes_room_that_nobody_else_can_have(base: Path, kind: str) -> None:
    device = base / "nvme0"

    def asked(capacity: int | None) -> Plan:
        site = SiteConfig.model_validate({
            "storage": {"kind": kind, "paths": [str(device)]}, "paths": {"run": f"{base}/run"},
            "backend": {"allowed": ["beegfs"], "default": "beegfs"}, "beegfs": {"meta_size": "600MiB"},
        })  # fmt: skip
        return make_plan(site, Request(capacity=capacity), Job(7, 1000, 1000, "alice"), ("n1", "n2"))

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200m,mode=755", "none", device], check=True)
    try:
        if kind == "image":
            with pytest.raises(
                UserError, match=r"capacity=1.*GiB is too much: .* beside 600MiB for metadata"
            ):
                storage.prepare(asked(2 * 819 << 20), "n1")
        (device / "full").write_bytes(bytes(700 << 20))
        with pytest.raises(NodeError, match=r"no room for 600MiB of metadata; .* beegfs\.meta_size"):
            storage.prepare(asked(None), "n1")
        (device / "beeond-ctl").mkdir(mode=0o700, exist_ok=True)
        storage.wipe(asked(None), "delete", deadline_s=60)
        (Path(asked(None).targets[0].home).parent / "job-8").mkdir()
        with pytest.raises(UserError, match="other jobs on the node have the rest"):
            storage.prepare(asked(None), "n1")
    finally:
        subprocess.run(["umount", device], check=True)


def test_data_without_a_record_is_nobodys_to_wipe(base: Path) -> None:
    made = plan(base)
    storage.prepare(made, "n1")
    os.unlink(f"{made.targets[0].home}/instance.json")
    assert storage.strays(made.config) == [made.targets[0].home]
    with pytest.raises(NodeError, match="no readable record"):
        storage.wipe(made, "delete", deadline_s=60)
    assert os.path.isdir(made.targets[0].data)


def test_wiping_that_takes_too_long_is_told_and_goes_on_later(base: Path) -> None:
    made = plan(base)
    storage.prepare(made, "n1")
    with pytest.raises(NodeError, match="not done in time"):
        storage.wipe(made, "delete", deadline_s=0)
    storage.wipe(made, "delete", deadline_s=60)
    assert left(base) == []


def forget(made: Plan) -> None:
    """What a reboot does to the run directory."""
    Path(made.run_dir, "instance").unlink()


def test_targets_that_have_changed_places_are_not_taken_for_one_another(base: Path) -> None:
    made = plan(base)
    storage.prepare(made, "n1")
    storage.set_phase(made, "retained")
    forget(made)
    for a, b in (("nvme0", "spare"), ("nvme1", "nvme0"), ("spare", "nvme1")):
        (base / a).rename(base / b)
    with pytest.raises(NodeError, match="changed places"):
        storage.attach(made, deadline_s=60)
    for a, b in (("nvme0", "spare"), ("nvme1", "nvme0"), ("spare", "nvme1")):
        (base / a).rename(base / b)
    storage.attach(made, deadline_s=60)


@contextmanager
def small(base: Path, mkfs: str) -> Iterator[None]:
    """A small file system of its own at nvme0."""
    with (base / "small").open("wb") as file:
        file.truncate(320 << 20)
    subprocess.run([*mkfs.split(), base / "small"], check=True, capture_output=True)
    subprocess.run(["mount", "-o", "loop", base / "small", base / "nvme0"], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", base / "nvme0"], check=True)


def fill(directory: Path) -> None:
    for size in (1 << 20, 1 << 12, 1):
        with suppress(OSError), (directory / f"of{size}").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(size))
    with pytest.raises(OSError, match="No space"):
        (directory / "more").write_bytes(b"x")


@pytest.mark.parametrize("mkfs", ["mkfs.xfs -q", "mkfs.ext4 -q -m 0"])
@pytest.mark.parametrize("staged", [True, False])
def test_a_device_that_the_job_has_filled_is_staged_out_kept_and_wiped_as_any(
    base: Path, mkfs: str, *, staged: bool
) -> None:
    with small(base, mkfs):
        (base / "nvme0/lost+found").rmdir() if "ext4" in mkfs else None
        made = plan(base, site_capacity="100MiB")
        storage.prepare(made, "n1")
        fill(Path(made.targets[0].data))
        if staged:
            storage.make_room(made)
            storage.set_attempt(made, "a1")
            Path(made.targets[0].home, "journal").write_bytes(bytes(1 << 20))
            storage.set_phase(made, "retained")
            storage.set_attempt(made, "a2")
            assert [record.attempt for record in storage.read_records(made.config)] == ["a2", "a2"]
        storage.wipe(made, "delete", deadline_s=60)
        assert left(base) == []


@pytest.mark.parametrize("kind", ["image", "device"])
def test_a_file_system_that_the_job_has_filled_has_room_to_be_probed(base: Path, kind: str) -> None:
    made = plan(base, kind, site_capacity="320MiB")
    storage.prepare(made, "n1")
    data = Path(made.targets[1].data)
    fill(data)
    with suppress(OSError):
        for number in range(100):  # there may be inodes left
            (data / f"before{number}").mkdir()
    assert not (data / "before99").exists()
    storage.make_room(made)
    storage.make_room(made)
    for number in range(100):
        (data / f"after{number}").mkdir()
    storage.detach(made, deadline_s=60)
    storage.wipe(made, "delete", deadline_s=60)
    assert left(base) == []


@pytest.mark.parametrize("kind", ["directory", "image", "device"])
def test_kept_data_of_an_earlier_run_is_left_by_one_that_finds_it(base: Path, kind: str) -> None:
    first = plan(base, kind)
    storage.prepare(first, "n1")
    Path(first.targets[1].data, "results").write_text("weeks")
    storage.detach(first, deadline_s=60)
    storage.set_phase(first, "retained")
    forget(first)
    second = plan(base, kind, restart=1)
    with pytest.raises(NodeError, match="left from an earlier run"):
        storage.prepare(second, "n1")
    with pytest.raises(NodeError, match="holds an earlier run"):
        storage.wipe(second, "delete", deadline_s=60)
    for target in first.targets if kind == "device" else ():  # as after a reboot
        mounts.unmount(target.base, deadline_s=20)
    assert storage.wipe(second, "delete", deadline_s=60, leave=True) == []
    assert kind != "device" or [target.base for target in first.targets if mounts.mount_at(target.base)] == []
    forget(second)
    storage.attach(first, deadline_s=60)
    assert Path(first.targets[1].data, "results").read_text() == "weeks"
    storage.wipe(first, "delete", deadline_s=60)
    assert left(base) == []


@pytest.mark.parametrize("kind", ["directory", "device"])
def test_a_record_that_was_never_finished_keeps_nothing(base: Path, kind: str) -> None:
    made = plan(base, kind)

    def stop(text: str) -> None:
        if text.startswith("write the record"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.prepare(made, "n1", step=stop)
    homes = storage.strays(made.config)
    assert homes
    for home in homes:
        Path(home, ".instance.json.new").write_text("{")
        assert storage.stray_is_empty(made.config, home)
        storage.remove_stray(made.config, home, deadline_s=60)
    storage.wipe(made, "delete", deadline_s=60)
    assert left(base) == []
