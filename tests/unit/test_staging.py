"""Whole transfers on this machine, by real processes: what is kept, what is refused, what is reported."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl.staging import begin, preview, spawn, wire
from beeond_ctl.staging import coordinator as coordinator_module
from beeond_ctl.staging.coordinator import Coordinator, _Work
from beeond_ctl.staging.job import Identity, Job
from beeond_ctl.staging.journal import Journal
from beeond_ctl.staging.local import copy_local
from beeond_ctl.staging.wire import MOST_PIECES, PIECE
from beeond_ctl.staging.worker import Copier
from tests.faults import trees
from tests.unit import copying
from tests.unit.copying import (
    assert_copied,
    by_both,
    coordinator,
    finish,
    holey,
    kill,
    next_work,
    opened_below,
    token_of,
)
from tests.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from beeond_ctl.staging.transfer import Summary

IS_ROOT = os.geteuid() == 0
USER = Identity(65534, 65534, (65534,))


def stage(
    source: Path | bytes,
    target: Path | bytes,
    *flags: str,
    area: Path,
    user: Identity | None = None,
    workers: int = 2,
) -> Summary:
    journal = area / "journal"
    journal.mkdir(mode=0o700, exist_ok=True)
    job = Job(os.fsencode(source), os.fsencode(target), flags)
    return copy_local(
        job, user, journal_dir=journal, workers=workers, stall_timeout_s=60, progress_every_s=0.02
    )


def give(path: Path, user: Identity) -> None:
    subprocess.run(["chown", "-hR", f"{user.uid}:{user.gid}", path], check=True)


def differences(source: Path, target: Path) -> str:
    command = ["rsync", "-aHAXn", "--checksum", "--itemize-changes", "--delete", f"{source}/", f"{target}/"]
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace").stdout


def only_cause(summary: Summary) -> str:
    assert len(summary.failures) == 1, summary.failures
    return next(iter(summary.failures))[0]


@by_both
@pytest.mark.parametrize("seed", range(5))
def test_a_copied_tree_is_the_same_by_two_judges(area: Path, seed: int) -> None:
    trees.build(bytes(area / "source"), seed, entries=80)
    summary = stage(area / "source", area / "target", area=area)
    assert summary.proved, summary.problems()
    assert trees.snapshot(bytes(area / "target")) == trees.snapshot(bytes(area / "source"))
    if shutil.which("rsync"):
        assert differences(area / "source", area / "target") == ""


@by_both
@pytest.mark.root
def test_a_user_gets_the_same_tree_through_root(area: Path) -> None:
    source, target = area / "source", area / "home" / "made" / "target"
    trees.build(bytes(source), 1, entries=80)
    acls = source / "acls"
    acls.mkdir()
    (acls / "file").write_text("x")
    for entry in ("u:33:rw", "d:u:33:rwx"):
        subprocess.run(["setfacl", "-m", entry, acls], check=True)
    subprocess.run(["setfacl", "-m", "g:44:r", acls / "file"], check=True)
    (area / "home").mkdir()
    give(source, USER)
    give(area / "home", USER)
    for path in source.rglob("*"):  # chown takes set-uid away
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o777 == 0o755:
            path.chmod(0o4755)
    os.utime(source, ns=(1, 1))
    summary = stage(source, target, area=area, user=USER)
    assert summary.proved, summary.problems()
    assert differences(source, target) == ""
    assert (area / "home" / "made").stat().st_uid == USER.uid
    assert (area / "home" / "made").stat().st_mode & 0o777 == (area / "home").stat().st_mode & 0o755


@by_both
@pytest.mark.root
def test_what_only_root_may_read_is_not_copied_and_all_else_is(area: Path) -> None:
    source, target = area / "source", area / "target"
    (source / "closed").mkdir(parents=True)
    (source / "closed" / "inside").write_text("secret")
    (source / "secret").write_text("secret")
    (source / "open").write_text("open")
    (source / "closed").chmod(0o700)
    (source / "secret").chmod(0o600)
    target.mkdir()
    give(target, USER)
    summary = stage(source, target, area=area, user=USER)
    assert not summary.proved
    assert summary.failed == 2
    assert only_cause(summary) == "denied"
    assert (target / "open").read_text() == "open"
    assert [path.name for path in target.rglob("*")] == ["open"]


@pytest.mark.root
@pytest.mark.parametrize("way", ["source is closed", "destination is closed", "link to a closed file"])
def test_a_user_is_refused_what_their_own_cp_could_not_do(area: Path, way: str) -> None:
    source, target = area / "source", area / "target"
    source.mkdir()
    (source / "file").write_text("secret")
    (area / "open").mkdir()
    give(area / "open", USER)
    if way == "destination is closed":
        target.mkdir()
    else:
        source.chmod(0o700)
        target = area / "open" / "target"
    if way == "link to a closed file":
        (area / "link").symlink_to(source / "file")
        source = area / "link"
    summary = stage(source, target, area=area, user=USER)
    assert not summary.proved
    assert summary.problems()
    assert "permission denied" in " ".join(summary.problems())
    assert not list(area.rglob("target/*"))


@pytest.mark.root
def test_a_file_that_its_new_owner_may_not_read_is_read_back_all_the_same(area: Path) -> None:
    (area / "source").mkdir()
    (area / "source" / "others-only").write_text("x")
    (area / "source" / "others-only").chmod(0o004)
    (area / "home").mkdir()
    give(area / "home", USER)
    summary = stage(area / "source", area / "home" / "target", area=area, user=USER)
    assert summary.proved, summary.problems()
    assert summary.verified == 1
    assert (area / "home" / "target" / "others-only").stat().st_mode & 0o777 == 0o004


def test_a_file_becomes_its_destination_or_goes_into_it(area: Path) -> None:
    (area / "file").write_text("x")
    (area / "there").mkdir()
    (area / "link").symlink_to(area / "file")
    for source, target, expected in (
        ("file", "new", "new"),
        ("file", "there", "there/file"),
        ("file", "fresh/", "fresh/file"),
        ("link", "there", "there/link"),
        ("file", "deep/er/name", "deep/er/name"),
    ):
        summary = stage(area / source, bytes(area) + b"/" + target.encode(), area=area)
        assert summary.proved, summary.problems()
        assert summary.copied == 1
        assert (area / expected).read_text() == "x"
        assert not (area / expected).is_symlink()


@pytest.mark.parametrize(
    ("target", "into"), [("nothing/../new", "new"), ("nothing/..", ""), ("no/thing/./../../new/", "new")]
)
def test_a_way_back_from_what_is_not_there_leads_where_mkdir_takes_it(
    area: Path, target: str, into: str
) -> None:
    (area / "source").mkdir(mode=0o711)
    (area / "source" / "file").write_text("x")
    summary = stage(area / "source", bytes(area) + b"/" + target.encode(), area=area)
    assert summary.proved, summary.problems()
    assert (area / into / "file").read_text() == "x"
    assert (area / into).stat().st_mode & 0o777 == (0o711 if into else 0o755)  # it was there before


def test_a_link_to_a_directory_is_followed_only_at_the_top(area: Path) -> None:
    (area / "real").mkdir()
    (area / "real" / "up").symlink_to("..")
    (area / "link").symlink_to("real")
    assert stage(area / "link", area / "target", area=area).proved
    assert os.readlink(area / "target" / "up") == ".."


def test_a_source_that_is_not_there_is_said_to_be_missing(area: Path) -> None:
    summary = stage(area / "nothing", area / "target", area=area)
    assert summary.missing
    assert not summary.proved
    assert not (area / "target").exists()


@pytest.mark.parametrize("source", ["nothing", "nothing/below", "link/nothing", "./nothing/"])
def test_nothing_of_a_source_is_there(area: Path, source: str) -> None:
    (area / "real").mkdir()
    (area / "link").symlink_to("real")
    job = Job(bytes(area) + b"/" + source.encode(), bytes(area / "target"))
    (area / "journal").mkdir()
    summary = copy_local(job, journal_dir=area / "journal")
    assert (summary.missing, summary.refused) == (True, "")
    found = preview.look(job)
    assert (found.missing, found.refused) == (True, "")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("dangling", "'dangling' is a symbolic link that leads nowhere"),
        ("dangling/", "'dangling' is a symbolic link that leads nowhere"),
        ("dangling/below", "'dangling' is a symbolic link that leads nowhere"),
        ("chain", "'chain' is a symbolic link that leads nowhere"),
        ("file/below", "'file' is not a directory"),
        ("file/", "'file' is not a directory"),
        ("to-file/below/that", "'to-file' is not a directory"),
    ],
)
def test_a_source_that_leads_nowhere_is_not_taken_for_one_that_was_never_made(
    area: Path, source: str, why: str
) -> None:
    """Of a stage-out nothing would be kept."""
    (area / "file").write_text("x")
    for link, target in (("dangling", "run1"), ("chain", "dangling"), ("to-file", "file")):
        (area / link).symlink_to(target)
    job = Job(bytes(area) + b"/" + source.encode(), bytes(area / "target"))
    (area / "journal").mkdir()
    summary = copy_local(job, journal_dir=area / "journal")
    assert (summary.missing, summary.proved) == (False, False)
    assert why in summary.refused
    found = preview.look(job)
    assert (found.missing, found.refused) == (False, summary.refused)
    assert not (area / "target").exists()


def test_a_directory_is_not_copied_into_itself(area: Path) -> None:
    (area / "source").mkdir()
    summary = stage(area / "source", area / "source" / "below" / "target", area=area)
    assert summary.refused
    assert list((area / "source").iterdir()) == []


def test_a_directory_is_not_copied_onto_a_file(area: Path) -> None:
    (area / "source").mkdir()
    (area / "target").write_text("kept")
    summary = stage(area / "source", area / "target", area=area)
    assert summary.refused == (
        f"{area}/target: is a file, and the source a directory; move it away, or name another place"
    )
    assert (area / "target").read_text() == "kept"


@pytest.mark.parametrize(
    "place", ["scratch", "scratch/saved", "scratch/not/there", "dangling/saved", "alias/saved"]
)
@pytest.mark.parametrize("single", [False, True])
def test_a_copy_that_would_go_with_its_source_is_refused(area: Path, place: str, single: bool) -> None:
    instance = area / "instance"
    (instance / "out").mkdir(parents=True)
    (instance / "out" / "file").write_text("the only one")
    (area / "scratch").symlink_to(instance)
    (area / "dangling").symlink_to(instance / "later")
    (area / "alias").symlink_to("scratch")
    before = trees.snapshot(bytes(instance))
    source = instance / "out" / "file" if single else instance / "out"
    (area / "journal").mkdir()
    # a file by this name could take the place of a link, and harm nothing; in it, as here, it would go
    target = bytes(area / place) + b"/" * single
    job = Job(bytes(source), target, outside=bytes(instance))
    summary = copy_local(job, journal_dir=area / "journal", workers=1)
    assert not summary.proved
    assert "which goes when the job has ended" in summary.refused
    assert trees.snapshot(bytes(instance)) == before


def test_a_file_takes_the_place_of_a_link_that_leads_to_its_source(area: Path) -> None:
    instance = area / "instance"
    instance.mkdir()
    (instance / "file").write_text("the only one")
    (area / "result").symlink_to(instance / "file")
    (area / "journal").mkdir()
    job = Job(bytes(instance / "file"), bytes(area / "result"), outside=bytes(instance))
    assert copy_local(job, journal_dir=area / "journal", workers=1).proved
    shutil.rmtree(instance)
    assert not (area / "result").is_symlink()
    assert (area / "result").read_text() == "the only one"


def test_a_link_in_the_destination_leads_nowhere(area: Path) -> None:
    (area / "source" / "dir").mkdir(parents=True)
    (area / "source" / "dir" / "file").write_text("new")
    (area / "elsewhere").mkdir()
    (area / "target").mkdir()
    (area / "target" / "dir").symlink_to(area / "elsewhere")
    summary = stage(area / "source", area / "target", area=area)
    assert not summary.proved
    assert {cause for cause, _ in summary.failures} == {"in-the-way"}
    assert list((area / "elsewhere").iterdir()) == []


@by_both
@pytest.mark.root
@pytest.mark.parametrize("content", ["small", "hard link", "link", "big"])
def test_what_is_neither_file_nor_link_is_replaced_by_nothing(area: Path, content: str) -> None:
    source, target = area / "source", area / "target"
    (source / "dir").mkdir(parents=True)
    (target / "dir").mkdir(parents=True)
    if content == "link":
        (source / "dir" / "one").symlink_to("x")
    else:
        (source / "dir" / "one").write_bytes(b"x" * ((3 << 20) if content == "big" else 1))
        if content == "big":
            os.truncate(source / "dir" / "one", 3 * PIECE)
    name = "one"
    if content == "hard link":
        name = "two"
        os.link(source / "dir" / "one", source / "dir" / "two")
    for device in (False, True):
        there = target / "dir" / name
        os.mknod(there, (stat.S_IFCHR if device else stat.S_IFIFO) | 0o600, os.makedev(1, 3) if device else 0)
        before = there.lstat()
        summary = stage(source, target, area=area)
        assert summary.failures["in-the-way", "destination"].examples == (f"dir/{name}",)
        assert there.lstat() == before
        assert trees.leftovers(bytes(target)) == []
        there.unlink()
    assert stage(source, target, area=area).proved


@by_both
def test_special_files_are_named_and_not_read(area: Path) -> None:
    (area / "source").mkdir()
    os.mkfifo(area / "source" / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(area / "source" / "socket"))
        (area / "source" / "file").write_text("x")
        summary = stage(area / "source", area / "target", area=area)
    assert summary.proved
    assert summary.special.count == 2
    assert set(summary.special.examples) == {"fifo", "socket"}
    assert [path.name for path in (area / "target").iterdir()] == ["file"]


@by_both
def test_what_is_already_at_the_destination_stays_unless_asked(area: Path) -> None:
    (area / "source" / "same").mkdir(parents=True)
    for name in ("other", "same/other", "gone/deep/file"):
        path = area / "target" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("old")
    (area / "outside").mkdir()
    (area / "outside" / "precious").write_text("x")
    (area / "target" / "gone" / "link").symlink_to(area / "outside")
    (area / "target" / "gone" / "deep").chmod(0o500)
    assert stage(area / "source", area / "target", area=area).proved
    assert (area / "target" / "gone" / "deep" / "file").exists()
    summary = stage(area / "source", area / "target", "delete", area=area)
    assert summary.proved, summary.problems()
    assert [path.name for path in (area / "target").rglob("*")] == ["same"]
    assert set(summary.deleted.examples) == {"other", "same/other", "gone"}
    assert (area / "outside" / "precious").exists()


def test_nothing_is_deleted_when_not_everything_was_copied(area: Path) -> None:
    (area / "source").mkdir()
    (area / "source" / "name").write_text("file")
    (area / "target" / "name").mkdir(parents=True)
    (area / "target" / "old").write_text("x")
    summary = stage(area / "source", area / "target", "delete", area=area)
    assert only_cause(summary) == "in-the-way"
    assert (area / "target" / "old").exists()


@by_both
def test_update_copies_only_what_differs(area: Path) -> None:
    trees.build(bytes(area / "source"), 3, entries=60)
    first = stage(area / "source", area / "target", "update", area=area)
    (area / "source" / "more").write_text("x")
    shutil.rmtree(area / "journal")
    second = stage(area / "source", area / "target", "update", area=area)
    assert first.proved
    assert second.proved
    assert (second.copied, second.skipped) == (1, first.copied)


@by_both
def test_what_is_proved_is_copied_again_only_when_either_side_changed(area: Path) -> None:
    (area / "source").mkdir()
    for name in ("same", "source-changed", "target-changed", "target-gone"):
        (area / "source" / name).write_text("first")
    assert stage(area / "source", area / "target", area=area).copied == 4
    when = (area / "source" / "source-changed").stat().st_mtime_ns
    (area / "source" / "source-changed").write_text("other")
    os.utime(area / "source" / "source-changed", ns=(when, when))
    (area / "target" / "target-changed").write_text("tampered")
    (area / "target" / "target-gone").unlink()
    summary = stage(area / "source", area / "target", area=area)
    assert summary.proved
    assert (summary.copied, summary.skipped) == (3, 1)
    assert (area / "target" / "source-changed").read_text() == "other"
    assert (area / "target" / "target-changed").read_text() == "first"


@by_both
def test_a_newer_file_at_the_destination_is_kept_beside_the_copy(area: Path) -> None:
    (area / "source").mkdir()
    (area / "target").mkdir()
    (area / "source" / "file").write_text("job's")
    os.utime(area / "source" / "file", ns=(10**18, 10**18))
    (area / "target" / "file").write_text("edited meanwhile")
    summary = stage(area / "source", area / "target", area=area)
    assert summary.proved
    assert summary.notes["newer"].examples == ("file",)
    assert (area / "target" / "file").read_text() == "job's"
    (kept,) = (area / "target").glob("file.newer-*")
    assert kept.read_text() == "edited meanwhile"


@by_both
@pytest.mark.parametrize("kind", ["symbolic link", "further name"])
def test_a_newer_file_is_kept_from_a_link_as_well(area: Path, kind: str) -> None:
    source, target = area / "source", area / "target"
    source.mkdir()
    target.mkdir()
    (source / "first").write_text("job's")
    os.utime(source / "first", ns=(10**18, 10**18))
    if kind == "symbolic link":
        (source / "link").symlink_to("first")
        os.utime(source / "link", ns=(10**18, 10**18), follow_symlinks=False)
    else:
        os.link(source / "first", source / "link")
    for name in ("first", "link"):
        (target / name).write_text(f"{name}, edited meanwhile")
    summary = stage(source, target, area=area)
    assert summary.proved, summary.problems()
    assert summary.notes["newer"].count == 2
    for name in ("first", "link"):
        (kept,) = target.glob(f"{name}.newer-*")
        assert kept.read_text() == f"{name}, edited meanwhile"
        kept.unlink()
    os.utime(target, ns=(1, 1))
    os.utime(source, ns=(1, 1))
    assert trees.snapshot(bytes(target)) == trees.snapshot(bytes(source))


@by_both
def test_a_newer_file_that_a_copier_kept_before_it_died_is_no_hindrance_and_none_is_lost(area: Path) -> None:
    source, target = area / "source", area / "target"
    source.mkdir()
    target.mkdir()
    for name in ("same", "other"):
        (source / name).write_text("job's")
        os.utime(source / name, ns=(10**18, 10**18))
        (target / name).write_text("edited meanwhile")
    (area / "journal").mkdir()
    transfer = coordinator(area, "n1")
    mark = f"newer-{token_of(area)}.{transfer._run}"
    os.link(target / "same", target / f"same.{mark}")  # killed between this and the rename
    (target / f"other.{mark}").write_text("edited before")
    summary = finish(transfer, "n1")
    assert summary.proved, summary.problems()
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        "same": "job's",
        f"same.{mark}": "edited meanwhile",
        "other": "job's",
        f"other.{mark}": "edited before",
        f"other.{mark}.1": "edited meanwhile",
    }


@by_both
def test_delete_spares_what_this_transfer_has_set_aside_as_newer(area: Path) -> None:
    (area / "source").mkdir()
    (area / "target").mkdir()
    for name in ("file", "other"):
        (area / "source" / name).write_text("job's")
        os.utime(area / "source" / name, ns=(10**18, 10**18))
    (area / "target" / "file").write_text("edited meanwhile")
    (area / "target" / "surplus").write_text("x")
    for _ in range(2):  # and when it is repeated
        summary = stage(area / "source", area / "target", "delete", area=area)
        assert summary.proved, summary.problems()
        (kept,) = (area / "target").glob("file.newer-*")
        assert kept.read_text() == "edited meanwhile"
        assert {path.name for path in (area / "target").iterdir()} == {"file", "other", kept.name}


@by_both
def test_a_small_file_that_changes_meanwhile_is_copied_whole_or_reported(area: Path) -> None:
    (area / "source").mkdir()
    names = [f"file{number}" for number in range(30)]
    contents = [bytes([letter]) * 30_000 for letter in b"ab"]
    for name in names:
        (area / "source" / name).write_bytes(contents[0])
    stop = threading.Event()

    def change() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            # Replaced, as editors do: a read in the middle of one write may have equal times before and after it.
            (area / "new").write_bytes(contents[number // 30 % 2])
            (area / "new").rename(area / "source" / names[number % 30])

    thread = threading.Thread(target=change)
    thread.start()
    try:
        summary = stage(area / "source", area / "target", area=area)
    finally:
        stop.set()
        thread.join()
    assert {cause for cause, _ in summary.failures} <= {"changed"}
    copied = list((area / "target").iterdir())
    assert len(copied) == summary.copied
    assert all(path.read_bytes() in contents for path in copied)


@by_both
def test_directories_without_write_permission_are_filled_and_filled_again(area: Path) -> None:
    inner = area / "source" / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").write_text("1")
    (area / "source" / "a" / "b").chmod(0o500)
    (area / "source" / "a").chmod(0o555)
    user = None
    if IS_ROOT:
        give(area / "source", USER)
        (area / "home").mkdir()
        give(area / "home", USER)
        user = USER
    target = area / "home" / "target"
    for _ in range(2):
        summary = stage(area / "source", target, area=area, user=user)
        assert summary.proved, summary.problems()
        assert [oct(path.stat().st_mode & 0o777) for path in (target / "a", target / "a" / "b")] == [
            "0o555",
            "0o500",
        ]
        shutil.rmtree(area / "journal")


@by_both
def test_paths_longer_than_path_max_are_copied(area: Path) -> None:
    (area / "source").mkdir()

    def descend(root: Path, *, make: bool) -> int:
        fd = os.open(root, os.O_RDONLY)
        for number in range(100):
            name = f"{number}-" + "d" * 200
            if make:
                os.mkdir(name, dir_fd=fd)
            below = os.open(name, os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
        return fd

    fd = descend(area / "source", make=True)
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=fd))
    os.close(fd)
    assert stage(area / "source", area / "target", area=area).proved
    fd = descend(area / "target", make=False)
    assert os.listdir(fd) == ["bottom"]
    os.close(fd)


@by_both
@pytest.mark.root
def test_a_full_destination_is_one_line_and_the_rest_is_copied(area: Path) -> None:
    trees.build(bytes(area / "source"), 5, entries=10)
    (area / "source" / "too-large").write_bytes(os.urandom(9 << 20))
    (area / "source" / "too-large-2").write_bytes(os.urandom(9 << 20))
    (area / "target").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", area / "target"], check=True)
    try:
        summary = stage(area / "source", area / "target", area=area)
        assert only_cause(summary) == "no-space"
        assert len(summary.problems()) == 1
        assert summary.failed == 2
        assert trees.leftovers(bytes(area / "target")) == []
        subprocess.run(["mount", "-o", "remount,size=64m", area / "target"], check=True)
        again = stage(area / "source", area / "target", area=area)
        assert again.proved
        assert (again.copied, again.skipped) == (2, summary.copied + summary.skipped)
    finally:
        subprocess.run(["umount", area / "target"], check=True)


@by_both
@pytest.mark.root
@pytest.mark.parametrize("size", [12 << 20, 3 * PIECE])
def test_what_found_no_room_beside_others_is_tried_again_alone(area: Path, size: int) -> None:
    """Either of two files fits, and nothing fits beside one that is half there: as `cp` would, one is copied."""
    (area / "source").mkdir()
    for name in ("one", "two"):
        with (area / "source" / name).open("wb") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(1 << 20))
    (area / "source" / "many").mkdir()
    for number in range(200):
        (area / "source" / "many" / f"{number:03}").write_bytes(os.urandom(4096))
        (area / "source" / "many" / f"link-{number:03}").symlink_to("x" * 200)
    (area / "target").mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size * 3 // 2}", "none", area / "target"], check=True
    )
    try:
        summary = stage(area / "source", area / "target", area=area)
        assert (summary.copied, summary.failed) == (401, 1)
        assert summary.failures["no-space", "destination"].count == 1
        assert trees.leftovers(bytes(area / "target")) == []
    finally:
        subprocess.run(["umount", area / "target"], check=True)


@pytest.mark.root
def test_a_file_of_more_pieces_than_can_be_kept_in_mind_is_told_and_the_rest_is_copied(area: Path) -> None:
    (area / "source").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", area / "source"], check=True)
    try:
        with (area / "source" / "huge").open("wb") as file:
            file.truncate(MOST_PIECES * PIECE + 1)
        (area / "source" / "small").write_text("x")
        summary = stage(area / "source", area / "target", area=area)
    finally:
        subprocess.run(["umount", area / "source"], check=True)
    assert (only_cause(summary), summary.failed) == ("too-large", 1)
    assert (area / "target" / "small").read_text() == "x"


# --- big files, and several nodes -------------------------------------------------------------------------


def big(path: Path, size: int = 200 << 20) -> None:
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        block = os.urandom(1 << 20)
        for number in range(size >> 20):
            file.write(number.to_bytes(8, "big") + block[8:])
        file.write(b"tail")


def test_a_big_file_is_copied_in_pieces_by_all_and_resumed_by_piece(area: Path) -> None:
    big(area / "source" / "big")
    transfer, copier = coordinator(area, "n1"), Copier(None)
    for _ in range(3):  # the directory, and two of four pieces
        transfer.report("n1", copier.run(next_work(transfer, "n1")["work"]))
    copier.close()
    kill(transfer)
    done = transfer.summary().bytes
    assert 0 < done < (200 << 20)
    summary = finish(coordinator(area, "n1", "n2"), "n1", "n2")
    assert summary.proved, summary.problems()
    assert summary.bytes == (200 << 20) + 4 - done
    assert trees.snapshot(bytes(area / "target")) == trees.snapshot(bytes(area / "source"))


def test_a_big_file_that_changes_between_its_pieces_starts_again(area: Path) -> None:
    big(area / "source" / "big")
    transfer, copier = coordinator(area, "n1"), Copier(None)
    for _ in range(3):
        transfer.report("n1", copier.run(next_work(transfer, "n1")["work"]))
    copier.close()
    with open(area / "source" / "big", "r+b") as file:
        file.write(b"changed")
    summary = finish(transfer, "n1")
    assert summary.proved, summary.problems()
    assert trees.snapshot(bytes(area / "target")) == trees.snapshot(bytes(area / "source"))


NOTHING = {"copied": 0, "skipped": 0, "bytes": 0, "notes": {}, "proofs": ""}
BROKEN = {**NOTHING, "failures": [["io-error", "destination", "big", "Input/output error"]]}


take_until = partial(copying.take_until, passing=("copy", "make", "piece", "drop"))


def fail(transfer: Coordinator, node: str, work: dict[str, Any]) -> None:
    """Say that `work` failed."""
    transfer.report(node, {"id": work["id"], "attempt": work["attempt"], **BROKEN})


def test_pieces_of_a_file_that_was_given_up_prove_nothing_of_the_one_begun_anew(
    area: Path, copier: Copier
) -> None:
    holey(area / "source" / "big")
    first = coordinator(area, "n1")
    fail(first, "n1", take_until(first, "n1", copier, "piece", 2))
    assert not finish(first, "n1").proved
    assert trees.leftovers(bytes(area / "target")) == []
    second = coordinator(area, "n1")
    take_until(second, "n1", copier, "piece", 1)
    kill(second)
    summary = finish(coordinator(area, "n1"), "n1")
    assert_copied(area, summary)
    assert summary.bytes == 2 * PIECE + 4096  # all but the piece that the second run proved


def test_a_lost_node_that_comes_late_cannot_bring_a_file_back_that_was_given_up(
    area: Path, copier: Copier
) -> None:
    holey(area / "source" / "big")
    first = coordinator(area, "n1", "n2")
    late = take_until(first, "n1", copier, "piece", 3)
    first.node_lost("n1")
    other = Copier(None)
    fail(first, "n2", take_until(first, "n2", other, "piece", 3))
    other.close()
    assert not finish(first, "n2").proved
    copier.run(late)
    left = trees.leftovers(bytes(area / "target"))
    assert_copied(area, finish(coordinator(area, "n1"), "n1"))
    assert left == []


def test_an_empty_file_that_a_lost_node_makes_late_is_not_taken_for_the_one_with_the_pieces(
    area: Path, copier: Copier
) -> None:
    holey(area / "source" / "big")
    first = coordinator(area, "n1", "n2")
    late = take_until(first, "n1", copier, "make")
    first.node_lost("n1")
    other = Copier(None)
    take_until(first, "n2", other, "piece", 2)
    kill(first)
    other.close()
    copier.run(late)
    assert len([name for name in trees.leftovers(bytes(area / "target")) if b".p" in name]) == 2
    summary = finish(coordinator(area, "n1"), "n1")
    assert_copied(area, summary)
    assert summary.bytes == PIECE + 4096


def test_pieces_of_a_file_that_has_changed_since_are_not_left_behind(area: Path, copier: Copier) -> None:
    holey(area / "source" / "big")
    first = coordinator(area, "n1")
    first.report("n1", copier.run(take_until(first, "n1", copier, "piece", 1)))
    kill(first)  # when nothing is out
    (area / "source" / "big").write_text("changed")
    assert_copied(area, finish(coordinator(area, "n1"), "n1"))


def test_the_work_of_a_lost_node_is_done_by_another(area: Path) -> None:
    trees.build(bytes(area / "source"), 7, entries=700)
    transfer, copier = coordinator(area, "n1", "n2"), Copier(None)
    taken = next_work(transfer, "n1")["work"]
    transfer.node_lost("n1")
    late = copier.run(taken)
    copier.close()
    transfer.report("n1", late)
    assert "wait" in transfer.take("n1")
    summary = finish(transfer, "n2")
    assert summary.proved, summary.problems()
    assert trees.snapshot(bytes(area / "target")) == trees.snapshot(bytes(area / "source"))


def test_a_node_that_sees_another_directory_copies_nothing(area: Path) -> None:
    trees.build(bytes(area / "source"), 8)
    transfer = coordinator(area, "n1", "n2")
    work = next_work(transfer, "n1")["work"]
    wait_for(lambda: transfer.progress().scanned, 20)  # the scanner sees it, too
    (area / "target").rename(area / "real")
    (area / "target").mkdir()
    copier = Copier(None)
    transfer.report("n1", copier.run(work))
    copier.close()
    assert "wait" in transfer.take("n1")
    (area / "target").rmdir()
    (area / "real").rename(area / "target")
    assert_copied(area, finish(transfer, "n2"))


def test_copiers_get_batches_of_different_directories_while_there_are_any(area: Path) -> None:
    (area / "source").mkdir(exist_ok=True)
    (area / "source" / "waits").touch()
    transfer = coordinator(area, "n1", "n2")
    while not transfer._scanned:
        transfer.wait(0.05)
    transfer._queue.clear()
    batches = [("copy", "a"), ("copy", "a"), ("copy", "b"), ("piece", "a"), ("copy", "a")]
    for number, (kind, where) in enumerate(batches):
        transfer._queue.append(_Work(number, kind, (), 1, where))
    assert [transfer.take(node)["work"]["id"] for node in ("n1", "n2", "n1", "n2")] == [0, 2, 3, 1]
    for number, node in ((0, "n1"), (1, "n2")):
        transfer.report(node, {"id": number, "attempt": 0, "died": "test"})
    assert [transfer.take(node)["work"]["id"] for node in ("n1", "n2", "n1")] == [1, 0, 4]
    transfer.close()


def test_without_any_node_left_the_transfer_ends_unproved(area: Path) -> None:
    trees.build(bytes(area / "source"), 9)
    transfer = coordinator(area, "n1")
    next_work(transfer, "n1")
    transfer.node_lost("n1")
    assert transfer.finished()
    assert not transfer.summary().proved
    transfer.close()


@pytest.mark.parametrize(
    "lie",
    [
        {},
        {"copied": 10**9},
        {"copied": -1},
        {"copied": "1"},
        {"failures": [["x"]]},
        {"failures": {}},
        {"notes": []},
        {"proofs": "a\nb"},
        {"digest": "../../etc"},
        {"again": [1, 2, "{"]},
        {"again": [1, 2, '{"dir": "", "temp": "", "entry": []}']},
        {"again": [1, 2, "null"]},
        {"grown": [[1, 2, "{"]]},
        {"grown": [[1, 2, '{"dir": "", "temp": "", "entry": {}}']]},
        {"grown": [[0, 2, '{"dir": "", "temp": ""}']]},
        {"grown": [[1, 2, '{"dir": "", "temp": "x"}']]},
        {"apart": [[1, 2, "[]"]]},
        {"apart": [[-1, 2, "[]", "[]"]]},
        {"apart": [[1, 2, [], "[]"]]},
        {"deleted": [1, [2]]},
        {"left": [1, "[]"]},
        {"left": [-1, "[]", "[]"]},
    ],
)
def test_a_copier_that_lies_cannot_make_a_transfer_proved_or_hurt_the_coordinator(
    area: Path, lie: dict[str, Any]
) -> None:
    trees.build(bytes(area / "source"), 10)
    with open(area / "source" / "big", "wb") as file:
        file.truncate(3 * PIECE)
    transfer = coordinator(area, "n1")
    deadline = time.monotonic() + 120
    while "work" in (answer := next_work(transfer, "n1")):
        assert time.monotonic() < deadline
        work = answer["work"]
        truth = {"id": work["id"], "attempt": work["attempt"]}
        honest = {"copied": 0, "skipped": 0, "bytes": 0, "failures": [], "notes": {}, "proofs": ""}
        transfer.report("n1", {**truth, **honest, **lie})
    assert not transfer.summary().proved
    transfer.close()


@pytest.mark.parametrize(
    "said",
    [
        'big\\t1\\t1\\t[""]\\t{"temp": []}',
        "have\\t1\\tAAAA",
        "have\\t2\\tAAAAAAAAAAAAAAAAAAAAAA==",
        'have\\t1\\tAAAAAAAAAAAAAAAAAAAAAA==\\nbig\\t1\\t1\\t[""]\\t{"temp": ""}',
        'have\\t1\\tAAAAAAAAAAAAAAAAAAAAAA==\\nbig\\t2\\t1\\t[""]\\t{"temp": "x"}',
        'big\\t1\\t1\\t[""]\\t[]',
        'big\\t1\\t1\\t[""]\\tnull',
        'big\\t1\\t1\\t[""]\\t{}',
        "refused\\t7",
        "failed\\tother\\tsource\\t{}",
        "batch",
        "kept\\t-1",
        "making\\nmaking",
        "ready\\t{}\\nmaking",
        "ready\\t{}\\nlook\\tx\\t0\\t[]\\t[]",
        "ready\\t{}\\n" + "look\\t1\\t0\\t[]\\t[]\\n" * 3,
        "look\\t1\\t0\\t[]\\t[]",
        "nonsense",
    ],
)
def test_a_scanner_that_talks_nonsense_fails_at_once_and_proves_nothing(
    area: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    def talk(program: str, *_: object, **__: object) -> subprocess.Popen[bytes]:
        text = f"import time; print('{said}', flush=True); time.sleep(600)"
        assert program == "scan"
        return subprocess.Popen(
            [sys.executable, "-c", text],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    monkeypatch.setattr(begin, "spawn", talk)
    transfer = coordinator(area, "n1")
    while "work" in (answer := next_work(transfer, "n1")):
        assert answer["work"]["kind"] in ("look", "clean")  # of what it may have left
        transfer.report(
            "n1", {"id": answer["work"]["id"], "attempt": answer["work"]["attempt"], "died": "so be it"}
        )
    assert answer == {"done": {"proved": False}}
    assert only_cause(transfer.summary()) == "lost"
    transfer.close()


def test_a_scanner_that_does_not_listen_costs_no_memory_and_holds_nobody_up(
    area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "_MOST_LOOKED", 3 << 20)

    def talk(*_: object, **__: object) -> subprocess.Popen[bytes]:
        lines = ["ready\t{}", *(f"look\t{number}\t0\t[]\t[]" for number in range(8))]
        text = f"import time; print(chr(10).join({lines!r}), flush=True); time.sleep(600)"
        return subprocess.Popen(
            [sys.executable, "-c", text],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    monkeypatch.setattr(begin, "spawn", talk)
    transfer = coordinator(area, "n1", "n2", "n3", "n4")
    for _ in range(8):
        work = next_work(transfer, "n1")["work"]
        nothing = {"copied": 0, "skipped": 0, "bytes": 0, "failures": [], "notes": {}, "proofs": ""}
        transfer.report(
            "n1", {"id": work["id"], "attempt": work["attempt"], **nothing, "looked": "x" * (1 << 20)}
        )
    assert transfer._looked_bytes <= 3 << 20
    transfer.cancel("enough")
    assert next_work(transfer, "n1") == {"done": {"proved": False}}
    transfer.close()


def test_a_transfer_that_cannot_start_holds_nothing_open(area: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(begin, "spawn", refuse)
    with pytest.raises(BlockingIOError) as kept:  # and what it was raised by is held as well
        coordinator(area, "n1")
    assert opened_below(area) == [], kept


def test_what_the_scanner_had_open_is_closed_when_the_transfer_has_ended(
    area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[int | None] = []

    def late(child: subprocess.Popen[bytes]) -> None:
        time.sleep(0.5)  # as one that is busy, and is not seen to be gone at once
        spawn.end(child)
        gone.append(child.returncode)

    monkeypatch.setattr(coordinator_module, "end", late)
    trees.build(bytes(area / "source"), 3)
    assert_copied(area, stage(area / "source", area / "target", area=area))
    assert len(gone) == 1


@pytest.mark.parametrize("durable", [False, True])
def test_a_journal_that_counts_until_the_next_boot_is_not_synced(
    area: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    (area / "source").mkdir()
    (area / "journal").mkdir()
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    job = Job(bytes(area / "source"), bytes(area / "target"), durable=durable)
    assert copy_local(job, journal_dir=area / "journal", workers=1).proved
    assert bool(synced) == durable


def test_a_copier_cannot_answer_for_another_work(area: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (area / "source").mkdir()
    (area / "source" / "file").write_text("x")
    transfer = coordinator(area, "n1")
    monkeypatch.setattr(Copier, "_ask", lambda *_: {"id": -1, "attempt": 7, "copied": []})
    for _ in range(2):  # and is not waited for until nothing has been copied for long
        transfer.report("n1", Copier(None).run(next_work(transfer, "n1")["work"]))
    assert only_cause(transfer.summary()) == "lost"
    transfer.close()


@pytest.mark.root
def test_other_processes_of_the_user_cannot_get_into_those_that_touch_files() -> None:
    child = spawn.spawn("copier", USER)
    look = ["python3", "-c", "import sys; open(f'/proc/{sys.argv[1]}/environ', 'rb').read()", str(child.pid)]
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        wire.send(child.stdin, "drop", "tag", "{}")
        assert child.stdout.readline()  # it has started
        looked = subprocess.run(
            look, user=USER.uid, group=USER.gid, extra_groups=[], capture_output=True, check=False
        )
        assert b"PermissionError" in looked.stderr
    finally:
        spawn.end(child)


def test_a_single_file_with_delete_leaves_its_neighbours_alone(area: Path) -> None:
    (area / "source").mkdir()
    (area / "source" / "file").write_text("x")
    (area / "target").mkdir(mode=0o751)
    (area / "target" / "neighbour").write_text("x")
    summary = stage(area / "source" / "file", area / "target", "delete", area=area)
    assert summary.proved, summary.problems()
    assert sorted(path.name for path in (area / "target").iterdir()) == ["file", "neighbour"]
    assert (area / "target").stat().st_mode & 0o777 == 0o751


@by_both
def test_a_default_acl_at_the_destination_gives_nobody_access_to_the_copy(area: Path) -> None:
    if not shutil.which("setfacl"):
        pytest.skip("needs setfacl")
    (area / "source" / "dir").mkdir(parents=True)
    (area / "source" / "dir" / "file").write_text("x")
    (area / "source" / "dir" / "file").chmod(0o640)
    (area / "target").mkdir()
    subprocess.run(["setfacl", "-d", "-m", "u:33:rwx", area / "target"], check=True)
    summary = stage(area / "source", area / "target", area=area)
    assert summary.proved, summary.problems()
    for name in ("dir", "dir/file"):
        copy, original = area / "target" / name, area / "source" / name
        assert [each for each in os.listxattr(copy) if "acl" in each] == []
        assert copy.stat().st_mode == original.stat().st_mode


@by_both
@pytest.mark.root
def test_a_time_that_the_destination_cannot_hold_is_as_near_as_it_can(area: Path) -> None:
    """What is in pieces, small and large; and it is the same in the next run."""
    times = {"small": 2**34, "early": -(2**33), "large": 2**34, "pieces": 2**34}
    (area / "source").mkdir()
    for name, size in (("small", 1), ("early", 1), ("large", 2 << 20), ("pieces", 3 * PIECE)):
        (area / "source" / name).write_bytes(b"x")
        os.truncate(area / "source" / name, size)
        os.utime(area / "source" / name, (1, times[name]))
    with open(area / "disk", "wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", area / "disk"], check=True)
    (area / "target").mkdir()
    subprocess.run(["mount", "-o", "loop", area / "disk", area / "target"], check=True)
    try:
        for flags in ((), ("update",)):
            summary = stage(area / "source", area / "target/there", *flags, area=area)
            assert summary.proved, summary.problems()
            assert summary.copied == (0 if flags else len(times))
            shutil.rmtree(area / "journal")
        kept = {name: int((area / "target/there" / name).stat().st_mtime) for name in times}
        assert kept == {name: 15_032_385_535 if at > 0 else -(2**31) for name, at in times.items()}
    finally:
        subprocess.run(["umount", area / "target"], check=True)


def test_a_directory_that_was_there_keeps_no_attribute_that_the_source_has_not(area: Path) -> None:
    if not shutil.which("setfacl"):
        pytest.skip("needs setfacl")
    for name in ("source", "target"):
        for each in ("plain", "default"):
            (area / name / each).mkdir(parents=True)
    for name, acl in (
        ("target/plain", "u:33:rwx,g::---"),
        ("target/default", "u:33:rwx"),
        ("source/default", "d:u:34:rx"),
    ):
        subprocess.run(["setfacl", "-m", acl, area / name], check=True)
    os.setxattr(area / "target/plain", "user.old", b"1")
    os.setxattr(area / "source/plain", "user.new", b"1")
    (area / "source/plain").chmod(0o750)
    summary = stage(area / "source", area / "target", area=area)
    assert summary.proved, summary.problems()
    assert differences(area / "source", area / "target") == ""
    assert os.listxattr(area / "target/plain") == ["user.new"]
    assert os.listxattr(area / "target/default") == ["system.posix_acl_default"]


@pytest.mark.parametrize("how", ["changed", "no room"])
def test_a_file_whose_piece_is_lost_after_another_one_settled_it_is_neither_forgotten_nor_proved(
    area: Path, copier: Copier, how: str
) -> None:
    holey(area / "source" / "big")
    first = coordinator(area, "n1", "n2")
    work = take_until(first, "n1", copier, "piece", 0)
    assert next_work(first, "n2")["work"]["kind"] == "piece"
    if how == "changed":
        os.utime(area / "source" / "big", ns=(1, 10**18))
        first.report("n1", copier.run(work))
    else:
        fail(first, "n1", work)
    first.node_lost("n2")
    summary = finish(first, "n1")
    if how == "changed":
        assert_copied(area, summary)
        assert summary.copied == 1
    else:
        assert (summary.proved, summary.failed) == (False, 1)


@pytest.mark.parametrize("kind", ["links", "dirs"])
def test_what_was_put_aside_and_cannot_be_read_again_has_failed(
    area: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (area / "source" / "dir").mkdir(parents=True)
    (area / "source" / "one").write_text("x")
    os.link(area / "source" / "one", area / "source" / "two")
    transfer = coordinator(area, "n1")
    read = transfer._spool.get

    def broken(at: int, length: int) -> tuple[str, str]:
        if any(where[:2] == (at, length) for where in transfer._later[kind]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(at, length)

    monkeypatch.setattr(transfer._spool, "get", broken)
    summary = finish(transfer, "n1")
    assert not summary.proved
    assert only_cause(summary) == "io-error"
    assert_copied(area, finish(coordinator(area, "n1"), "n1"))


@pytest.mark.parametrize(("cause", "copied"), [("io-error", 0), ("no-space", 1)])
def test_a_file_that_changed_and_then_fails_is_neither_forgotten_nor_proved(
    area: Path, copier: Copier, cause: str, copied: int
) -> None:
    holey(area / "source" / "big")
    first = coordinator(area, "n1", "n2")
    work = take_until(first, "n1", copier, "piece", 0)
    other = next_work(first, "n2")["work"]
    os.utime(area / "source" / "big", ns=(1, 10**18))
    first.report("n1", copier.run(work))
    failure = {**BROKEN, "failures": [[cause, "destination", "big", "-"]]}
    first.report("n2", {"id": other["id"], "attempt": other["attempt"], **failure})
    first.node_lost("n2")
    summary = finish(first, "n1")
    assert (summary.proved, summary.copied, summary.failed) == (bool(copied), copied, 1 - copied)
    if copied:
        assert_copied(area, summary)
    assert trees.leftovers(bytes(area / "target")) == []


@pytest.mark.root
def test_a_full_destination_is_not_filled_again_for_each_file(area: Path) -> None:
    (area / "source").mkdir()
    for number in range(6):
        with (area / "source" / f"big{number}").open("wb") as file:
            file.truncate((3 + (number > 2)) * PIECE)
            for piece in range(3):
                file.seek(piece * PIECE)
                file.write(os.urandom(4 << 20))
    (area / "target").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30m", "none", area / "target"], check=True)
    try:
        summary = stage(area / "source", area / "target", area=area)
    finally:
        subprocess.run(["umount", area / "target"], check=True)
    assert (summary.copied, summary.failed, only_cause(summary)) == (2, 4, "no-space")
    # At most: what is there, what had no room beside others, and two that had none alone.
    assert summary.bytes <= (2 + 6 + 2) * 4 * PIECE


def test_a_journal_that_cannot_be_ended_is_a_note_and_holds_no_device(
    area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Journal.append

    def full(journal: Journal, *items: tuple[str, str]) -> None:
        if any(kind in {"done", "closed"} for kind, _ in items):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(journal, *items)

    (area / "source").mkdir()
    (area / "source" / "file").write_text("x")
    monkeypatch.setattr(Journal, "append", full)
    summary = stage(area / "source", area / "target", area=area)
    assert summary.proved
    assert opened_below(area / "journal") == []
