"""Whole devices: real loop devices, real file systems of ours and of others."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from beeond_ctl import devices, mounts, storage, supervisor
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import NodeError, UserError
from beeond_ctl.lifecycle import sweep
from beeond_ctl.plan import Job, Plan, make_plan
from beeond_ctl.request import Request
from tests.unit.root_directory import needs_root, root_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def test_a_device_in_use_is_not_touched_though_it_carries_nothing(base: Path, disk: str) -> None:
    held = os.open(disk, os.O_RDONLY | os.O_EXCL)  # as the kernel does for RAID, LVM and swap
    try:
        with pytest.raises(devices.ForeignError, match="in use"):
            make(disk, base)
    finally:
        os.close(held)
    assert devices.content(disk) is None


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
