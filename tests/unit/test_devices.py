"""Whole devices: real loop devices, real file systems of ours and of others."""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import devices, mounts, storage, supervisor
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import NodeError, UserError
from beeond_ctl.lifecycle import sweep
from beeond_ctl.plan import Job, Plan, make_plan
from beeond_ctl.request import Request
from tests.unit.holding import ending, started
from tests.unit.root_directory import needs_root, root_directory
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = needs_root

SIZE = 400 << 20


@pytest.fixture
def base() -> Iterator[Path]:
    with root_directory() as path:
        yield path


@pytest.fixture
def disk(base: Path) -> Iterator[str]:
    """An empty block device."""
    with (base / "disk").open("wb") as file:
        file.truncate(SIZE)
    done = subprocess.run(
        ["losetup", "--find", "--show", base / "disk"], check=True, capture_output=True, text=True
    )
    device = done.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["umount", device], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["losetup", "--detach", device], check=True)


def make(disk: str, base: Path, job_id: int = 7) -> Path:
    point = base / "point"
    devices.make(disk, str(point), job_id, deadline_s=30)
    return point


def erase(disk: str, base: Path, method: str = "delete", job_id: int = 7, seconds: float = 60) -> str:
    deadline = time.monotonic() + seconds
    return devices.erase(disk, str(base / "point"), job_id, method, deadline=deadline)


def digest(base: Path) -> str:
    with (base / "disk").open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)


def partitions(disk: str) -> None:
    """A partition table as PCs have it, with one partition for Linux."""
    entry = struct.pack("<B3sB3sII", 0, b"", 0x83, b"", 2048, (SIZE >> 9) - 2048)
    with open(disk, "r+b") as file:
        file.write(bytes(446) + entry + bytes(48) + b"\x55\xaa")


FOREIGN = {
    "ext4": lambda disk: run("mkfs.ext4", "-q", disk),
    "xfs": lambda disk: run("mkfs.xfs", "-q", disk),
    "xfs with a label like ours": lambda disk: run("mkfs.xfs", "-q", "-L", "bo7", disk),
    "swap": lambda disk: run("mkswap", disk),
    "partitions": partitions,
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_device_that_carries_anything_else_is_never_touched(base: Path, disk: str, what: str) -> None:
    FOREIGN[what](disk)
    run("sync", base / "disk")
    before = digest(base)
    with pytest.raises(devices.ForeignError, match="left alone"):
        make(disk, base)
    with pytest.raises(devices.ForeignError, match="left alone"):
        erase(disk, base)
    with pytest.raises(devices.ForeignError, match="left alone"):
        devices.attach(disk, str(base / "point"), deadline_s=10)
    run("blockdev", "--flushbufs", disk)
    assert digest(base) == before


HOLD_BRIEFLY = """
import os, sys, time
os.open(sys.argv[1], os.O_RDONLY | os.O_EXCL)
print(1, flush=True)
sys.stdin.read()
time.sleep(0.2)
"""


def test_a_device_in_use_is_not_touched_though_it_carries_nothing(base: Path, disk: str) -> None:
    held = os.open(disk, os.O_RDONLY | os.O_EXCL)  # as the kernel does for RAID, LVM and swap
    try:
        with pytest.raises(devices.ForeignError, match="in use"):
            make(disk, base)
    finally:
        os.close(held)
    assert devices.content(disk) is None


def test_a_device_that_is_let_go_of_in_a_moment_is_not_in_use(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_LOOK_S", 60)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_BRIEFLY, disk], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin
    assert holder.stdout
    assert holder.stdout.readline() == b"1\n"
    holder.stdin.close()
    assert devices.content(disk) is None
    assert holder.wait(60) == 0


def test_what_is_no_block_device_is_refused(base: Path) -> None:
    (base / "file").write_bytes(b"")
    for path, reason in ((base / "file", "not a block device"), (base / "none", "cannot be opened")):
        with pytest.raises(NodeError, match=reason):
            devices.content(str(path))


def test_a_device_has_one_job_at_a_time(base: Path, disk: str) -> None:
    point = make(disk, base)
    (point / "file").write_text("mine")
    with pytest.raises(devices.OccupiedError, match="job 7"):
        make(disk, base, job_id=8)
    with pytest.raises(devices.OccupiedError, match="job 7"):
        erase(disk, base, job_id=8)
    assert (point / "file").read_text() == "mine"
    erase(disk, base)
    assert devices.content(disk) is None
    assert not point.exists()
    make(disk, base, job_id=8)


@pytest.mark.parametrize("method", ["delete", "discard", "zero"])
def test_an_erased_device_carries_nothing_of_the_job(base: Path, disk: str, method: str) -> None:
    point = make(disk, base)
    (point / "file").write_bytes(b"secret of a job." * (1 << 20))
    erase(disk, base, method)
    assert devices.content(disk) is None
    if method != "delete":
        run("blockdev", "--flushbufs", disk)
        assert not any((base / "disk").read_bytes())
    assert erase(disk, base, method) == f"{disk} carries nothing"


def luks(offset: int) -> bytes:
    """A second header of LUKS2, as it lies at `offset` (LUKS2 On-Disk Format, 2.1)."""
    header = bytearray(4096)
    struct.pack_into(">6sHQ", header, 0, b"SKUL\xba\xbe", 2, 16384)
    struct.pack_into(">Q", header, 256, offset)
    return bytes(header)


def raid_1_0(offset: int) -> bytes:
    """A superblock of Linux' RAID, version 1.0 (md(4))."""
    block = bytearray(4096)
    struct.pack_into("<II", block, 0, 0xA92B4EFC, 1)
    struct.pack_into("<Q", block, 144, offset >> 9)
    return bytes(block)


MiB = 1 << 20
LOOKALIKES = {
    "VMFS_volume_member": (1 * MiB, b"\x0d\xd0\x01\xc0"),
    "crypto_LUKS at 1 MiB": (1 * MiB, luks(1 * MiB)),
    "crypto_LUKS at 2 MiB": (2 * MiB, luks(2 * MiB)),
    "crypto_LUKS at 4 MiB": (4 * MiB, luks(4 * MiB)),
    "promise_fasttrack_raid_member": (SIZE - (128 << 10), b"Promise Technology, Inc."),
    "linux_raid_member, 0.90": (SIZE - (64 << 10), struct.pack("<III", 0xA92B4EFC, 0, 90)),
    "linux_raid_member, 1.0": (SIZE - (8 << 10), raid_1_0(SIZE - (8 << 10))),
}
"""What blkid(8) takes a device for that has these bytes there."""


def fill(point: Path, block: bytes) -> None:
    with (point / "file").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(block.ljust(4096, b"\0") * 256)


def found_on(disk: str) -> str:
    run("blockdev", "--flushbufs", disk)
    return subprocess.run(["wipefs", disk], check=True, capture_output=True, text=True).stdout


def plant(disk: str, *names: str) -> None:
    """Put the bytes where a file's could be, while the file system is not mounted."""
    with open(disk, "r+b") as file:
        for offset, data in (LOOKALIKES[name] for name in names):
            file.seek(offset)
            file.write(data)


@pytest.mark.parametrize("method", ["delete", "discard", "zero"])
@pytest.mark.parametrize("what", ["VMFS_volume_member", "crypto_LUKS at 2 MiB", "crypto_LUKS at 4 MiB"])
def test_a_job_cannot_have_its_device_taken_for_somebody_elses(
    base: Path, disk: str, what: str, method: str
) -> None:
    offset, block = LOOKALIKES[what]
    point = make(disk, base)
    fill(point, block)
    run("sync", "--file-system", point)
    with open(disk, "rb") as file:
        run("blockdev", "--flushbufs", disk)
        file.seek(offset)
        assert file.read(len(block)) == block  # there, by chance of what the file system does
    erase(disk, base, method)
    assert devices.content(disk) is None
    assert found_on(disk) == ""
    make(disk, base, job_id=8)


@pytest.mark.parametrize("what", LOOKALIKES)
def test_nothing_is_left_of_what_looks_like_another_system(base: Path, disk: str, what: str) -> None:
    run("umount", make(disk, base))
    plant(disk, what)
    assert what.split()[0].rstrip(",") in found_on(disk)
    assert devices.content(disk) == devices.Content(7, "whole")
    erase(disk, base)
    assert devices.content(disk) is None
    assert found_on(disk) == ""


def test_what_looks_like_another_system_elsewhere_is_removed_too(
    base: Path, disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_ENDS", 32 << 10)
    run("umount", make(disk, base))
    plant(disk, "VMFS_volume_member", "crypto_LUKS at 4 MiB", "linux_raid_member, 0.90")
    erase(disk, base)
    assert devices.content(disk) is None
    assert found_on(disk) == ""


class Killed(BaseException):
    pass


@pytest.mark.parametrize("method", ["delete", "discard", "zero"])
def test_an_erasure_that_is_killed_anywhere_leaves_no_foreign_device(
    base: Path, disk: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_ENDS", 96 << 10)  # so that there is something to find, and to remove
    calls = [0]

    def killed_at(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                raise Killed
            return function(*arguments)

        return counted

    for number in range(1, 100):
        run("umount", make(disk, base))
        plant(disk, *LOOKALIKES)
        calls[0] = 0
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "ioctl", killed_at(number, fcntl.ioctl))
            patch.setattr(devices, "_write_header", killed_at(number, devices._write_header))
            patch.setattr(devices, "_run", killed_at(number, devices._run))
            patch.setattr(os, "fsync", killed_at(number, os.fsync))
            try:
                erase(disk, base, method)
            except Killed:
                pass
            else:
                break
        found = devices.content(disk)  # foreign to nobody, wherever it was
        assert found is None or found.job_id == 7
        erase(disk, base, method)
        assert devices.content(disk) is None
        assert found_on(disk) == ""
    else:
        pytest.fail("not every call was reached")
    assert number > 8


def hold_detached(base: Path, disk: str, uid: int) -> subprocess.Popen[bytes]:
    """A process of user `uid` with a file open on the device, by a mount that is in no namespace any more."""
    point, seen = make(disk, base), base / "seen"
    (point / "file").write_text("x")
    seen.mkdir()
    mounts.bind(str(point), str(seen))
    child = started(["sh", "-c", f"exec 3<{seen}/file; echo 1; exec sleep 600"], uid)
    wait_for(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n", 10)
    run("umount", "--lazy", seen)
    return child


def test_a_file_that_the_user_still_has_open_holds_up_no_erasure(base: Path, disk: str) -> None:
    child = hold_detached(base, disk, 2001)
    with ending(child):
        deadline = time.monotonic() + 60
        devices.erase(disk, str(base / "point"), 7, "delete", deadline=deadline, uid=2001)
        assert child.wait(60) == -15
        assert devices.content(disk) is None


def test_who_else_uses_the_device_is_named_and_lives(
    base: Path, disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_HELD_S", 2)
    child = hold_detached(base, disk, 0)
    with ending(child):
        with pytest.raises(NodeError, match=rf"in use \(sleep \(pid {child.pid}, root\), not the job's\)"):
            erase(disk, base)
        assert child.poll() is None
        assert devices.content(disk) == devices.Content(7, "whole")
    erase(disk, base)
    assert devices.content(disk) is None


def test_erasing_goes_on_where_it_was_cut_off(base: Path, disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = make(disk, base)
    (point / "file").write_bytes(b"secret of a job." * (1 << 20))
    monkeypatch.setattr(devices, "_STEP", 64 << 20)
    rounds = 0
    while True:
        rounds += 1
        try:
            erase(disk, base, "zero", seconds=0)
        except NodeError as error:
            assert "goes on where it stopped" in str(error)  # noqa: PT017
            assert devices.content(disk) == devices.Content(7, "erasing")
            with pytest.raises(devices.OccupiedError):
                make(disk, base, job_id=8)
        else:
            break
    assert rounds == SIZE // (64 << 20) + 2  # a round each, and one to see that all is done
    assert not any((base / "disk").read_bytes())


def test_a_file_system_that_was_never_finished_is_erased_unmounted(base: Path, disk: str) -> None:
    point = make(disk, base)
    run("umount", point)
    with open(disk, "r+b") as file:
        file.seek(126)  # sb_inprogress
        file.write(b"\1")
    run("blockdev", "--flushbufs", disk)
    assert devices.content(disk) == devices.Content(7, "unfinished")
    devices.attach(disk, str(point), deadline_s=10)
    assert mounts.mount_at(str(point)) is None
    erase(disk, base)
    assert devices.content(disk) is None


# --- as targets ---------------------------------------------------------------------------------------------


def plan(base: Path, disk: str, job_id: int = 7) -> Plan:
    site = SiteConfig.model_validate(
        {
            "storage": {"kind": "device", "devices": [disk]},
            "paths": {"run": f"{base}/run", "log": f"{base}/log"},
            "mount": {"root": f"{base}/mnt"},
            "slurm": {"path": [str(base)]},
        }
    )
    return make_plan(site, Request(), Job(job_id, 1000, 1000, "alice", 0), ("n1", "n2"))


def test_a_foreign_device_is_the_nodes_fault_and_rolling_back_leaves_it_alone(base: Path, disk: str) -> None:
    run("mkfs.ext4", "-q", disk)
    made = plan(base, disk)
    with pytest.raises(devices.ForeignError, match="ext4"):
        storage.prepare(made, "n1")
    assert storage.wipe(made, "delete", deadline_s=20) == []
    assert storage.read_records(made.config) == []
    (base / "look").mkdir()
    run("mount", "-o", "ro", disk, base / "look")


def test_a_device_that_another_job_has_is_nobodys_fault(base: Path, disk: str) -> None:
    first, second = plan(base, disk), plan(base, disk, 8)
    storage.prepare(first, "n1")
    Path(first.targets[0].data, "result").write_text("precious")
    with pytest.raises(UserError, match="--exclusive"):
        storage.prepare(second, "n1")
    assert storage.wipe(second, "delete", deadline_s=20) == []
    assert Path(first.targets[0].data, "result").read_text() == "precious"
    (receipt,) = storage.wipe(first, "delete", deadline_s=20)
    assert receipt.files > 0


@pytest.mark.parametrize("stage", ["before its record", "while it was erased"])
def test_a_device_without_a_record_is_found_after_a_reboot_and_erased(
    base: Path, disk: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(base, disk)
    target = made.targets[0]
    devices.make(disk, target.base, 7, deadline_s=30)
    if stage == "while it was erased":
        with pytest.raises(NodeError):
            devices.erase(disk, target.base, 7, "zero", deadline=0)
    else:
        run("umount", target.base)
    run("rm", "-r", f"{base}/run")
    assert storage.read_records(made.config) == []
    assert swept(made, monkeypatch) == [(target.home, "removed")]
    assert devices.content(disk) is None
    assert swept(made, monkeypatch) == []


def test_a_device_that_cannot_be_read_is_not_taken_for_an_empty_one(
    base: Path, disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(base, disk)
    storage.prepare(made, "n1")
    Path(made.targets[0].data, "result").write_text("precious")
    storage.set_phase(made, "retained")
    run("rm", "-r", made.run_dir)
    run("xfs_io", "-x", "-c", "shutdown", made.targets[0].base)  # as XFS does when its device fails
    assert swept(made, monkeypatch) == [(made.targets[0].home, "stuck")]
    run("umount", made.targets[0].base)
    (record,) = storage.read_records(made.config)
    assert record.phase == "retained"
    assert Path(made.targets[0].data, "result").exists()


def swept(made: Plan, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    monkeypatch.setattr(supervisor, "marked", dict)  # this machine may have instances of other tests
    return [(item.what, item.verdict) for item in sweep.sweep(made.config)]
