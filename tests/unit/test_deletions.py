"""What `delete` removes, and what it must leave: whole transfers by real processes on real file systems."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl.cli import preview as cli
from beeond_ctl.cli import stage as typed
from beeond_ctl.errors import UsageError
from beeond_ctl.lifecycle.stage import Stage
from beeond_ctl.request import Transfer
from beeond_ctl.staging import copier, preview, wire
from beeond_ctl.staging.begin import Begun, header_of
from beeond_ctl.staging.coordinator import Coordinator
from beeond_ctl.staging.job import Identity, Job
from beeond_ctl.staging.journal import Journal
from beeond_ctl.staging.spread import SILENCE_S
from beeond_ctl.staging.surplus import Doomed
from beeond_ctl.staging.transfer import Fold
from beeond_ctl.staging.worker import serve
from tests.faults import through_fs, trees
from tests.unit.copying import worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from beeond_ctl.staging.transfer import Summary

USER = Identity(65534, 65534, (65534,))


def fill(top: Path, *names: str) -> None:
    for name in names:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def names(top: Path) -> set[str]:
    """The files and links below, and directories with nothing in them."""
    return {
        os.path.relpath(os.path.join(path, name), top)
        for path, dirs, files in os.walk(top)
        for name in [*files, *(each for each in dirs if not os.listdir(os.path.join(path, each)))]
    }


def stage(
    job: Job, area: Path, *, user: Identity | None = None, before: Callable[[], object] | None = None
) -> Summary:
    """Copy by one copier; `before` is called when all is copied, and nothing deleted yet."""
    journal = area / "journal"
    journal.mkdir(mode=0o700, exist_ok=True)
    coordinator = Coordinator(job, Begun(job, user, journal, 1), ["here"])
    hooks = [before] if before else []

    def take() -> dict[str, Any]:
        answer = coordinator.take("here")
        if answer.get("work", {}).get("kind") == "delete" and hooks:
            hooks.pop()()
        return answer

    try:
        serve(
            take, lambda result: coordinator.report("here", result), user, threading.Event(),
            processes=1, pause=coordinator.wait,
        )  # fmt: skip
        return coordinator.summary()
    finally:
        coordinator.close()


def deleting(source: Path, target: Path, **more: Any) -> Job:
    return Job(os.fsencode(source), os.fsencode(target), ("delete",), **more)


def mount(*command: str | Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")
    subprocess.run(["mount", *command], check=True, capture_output=True)


# --- the source itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["name", "link", "mount"])
def test_a_source_within_its_destination_is_refused_and_both_stay(area: Path, way: str) -> None:
    fill(area / "proj", "results/d0/f", "results/g", "d0/old", "other")
    target = area / "proj"
    if way == "link":
        target = area / "link"
        target.symlink_to("proj")
    elif way == "mount":
        target = area / "mount"
        target.mkdir()
        mount("--bind", area / "proj", target)
    before = names(area / "proj")
    job = deleting(area / "proj/results", target)
    found = preview.look(job)
    summary = stage(job, area)
    assert "delete would delete the source" in summary.refused
    assert summary.refused.endswith("take the flag away, or name another place")
    assert found.refused == summary.refused
    assert found.delete == 0
    assert not summary.proved
    assert names(area / "proj") == before
    assert stage(job._replace(flags=()), area).proved


@pytest.mark.root
def test_a_source_that_a_mount_leads_to_is_not_entered(area: Path) -> None:
    fill(area / "store", "job/results/sub/f", "job/results/g")
    fill(area / "target", "old")
    (area / "target/surplus/seen").mkdir(parents=True)
    mount("--bind", area / "store/job", area / "target/surplus/seen")
    summary = stage(deleting(area / "store/job/results", area / "target"), area)
    assert not summary.proved
    assert names(area / "store") == {"job/results/sub/f", "job/results/g"}


def test_a_source_that_comes_to_lie_in_what_goes_is_not_entered(area: Path) -> None:
    fill(area / "store", "source/sub/f", "source/g")
    fill(area / "target", "sub/old")

    def move() -> None:
        (area / "store").rename(area / "target/store")
        (area / "store").symlink_to("target/store")

    summary = stage(deleting(area / "store/source", area / "target"), area, before=move)
    assert summary.problems() == [
        "1 entry ('store/source') not deleted: it is the source, or has it in it at the destination"
    ]
    assert names(area / "target/store") == {"source/sub/f", "source/g"}


@pytest.mark.root
def test_a_destination_that_is_the_source_by_another_way_is_left_alone(area: Path) -> None:
    """`DST/x` leads to the source's parent, and the source has an `x` with its own name in it."""
    fill(area / "store", "results/x/results/f", "results/g")
    (area / "target/x").mkdir(parents=True)
    mount("--bind", area / "store", area / "target/x")
    summary = stage(deleting(area / "store/results", area / "target"), area)
    assert not summary.proved
    assert {"results/x/results/f", "results/g"} <= names(area / "store")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("here/f", "here/f"), ("here/f", "here/../here//f"), ("here/f", "here/"), ("here/f", "link/f"),
        ("link/f", "here"), ("to-f", "here/f"), ("here/f", "hard"),
        ("here", "here"), ("here", "here/sub/.."), ("here", "link"), ("link", "here"), ("link", "link/"),
    ],
)  # fmt: skip
def test_what_would_be_copied_onto_itself_is_refused_and_stays(area: Path, source: str, target: str) -> None:
    fill(area / "here", "f", "sub/g")
    (area / "link").symlink_to("here")
    (area / "to-f").symlink_to("here/f")
    (area / "hard").hardlink_to(area / "here/f")
    before = trees.snapshot(bytes(area / "here"))
    inode = (area / "here/f").stat().st_ino
    job = Job(os.fsencode(f"{area}/{source}"), os.fsencode(f"{area}/{target}"))
    found = preview.look(job)
    summary = stage(job, area)
    why = "is the same file as the source" if "f" in source else "is the source itself"
    assert summary.refused == found.refused == f"{area}/{target}: {why}"
    assert not summary.proved
    assert trees.snapshot(bytes(area / "here")) == before
    assert (area / "hard").stat().st_ino == (area / "here/f").stat().st_ino == inode


def test_a_link_to_the_source_in_its_place_is_replaced_by_a_copy(area: Path) -> None:
    fill(area, "here/f")
    (area / "copy").symlink_to("here/f")
    assert stage(Job(bytes(area / "here/f"), bytes(area / "copy")), area).proved
    assert not (area / "copy").is_symlink()
    assert (area / "copy").read_text() == (area / "here/f").read_text()


# --- what makes a listing shorter -------------------------------------------------------------------------


@pytest.mark.parametrize("removed", [True, False])
def test_a_directory_that_is_replaced_takes_nothing_with_it(area: Path, *, removed: bool) -> None:
    fill(area / "source", "ckpt/a", "ckpt/b", "ckpt/deep/c", "same/f")
    fill(area / "target", "ckpt/old", "ckpt/deep/old", "same/old")

    def replace() -> None:
        source = area / "source"
        (source / "ckpt").rename(source / "old")
        fill(source, "new/x", *([] if removed else ["new/deep/c"]))
        (source / "new").rename(source / "ckpt")
        if removed:
            shutil.rmtree(source / "old")

    summary = stage(deleting(area / "source", area / "target"), area, before=replace)
    assert not summary.proved
    assert {cause for cause, _ in summary.failures} == ({"changed", "missing"} if removed else {"changed"})
    kept = {"ckpt/a", "ckpt/b", "ckpt/deep/c", "ckpt/old", "ckpt/deep/old"}
    assert kept <= names(area / "target")
    assert not (area / "target/same/old").exists()


@pytest.mark.parametrize("how", ["removed", "emptied", "a name less"])
def test_a_directory_with_less_than_was_scanned_takes_nothing_with_it(area: Path, how: str) -> None:
    fill(area / "source", "ckpt/a", "ckpt/b")
    fill(area / "target", "ckpt/old")

    def lessen() -> None:
        (area / "source/ckpt/a").unlink()
        if how != "a name less":
            (area / "source/ckpt/b").unlink()
        if how == "removed":
            (area / "source/ckpt").rmdir()

    summary = stage(deleting(area / "source", area / "target"), area, before=lessen)
    assert not summary.proved
    assert names(area / "target") == {"ckpt/a", "ckpt/b", "ckpt/old"}
    causes = {"removed": {"missing", "changed"}, "emptied": {"changed"}, "a name less": {"changed"}}
    assert {cause for cause, side in summary.failures if side == "source"} == causes[how]


def test_a_directory_that_is_replaced_while_it_is_listed_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "source", "d/a")
    fill(tmp_path / "target", "d/a", "d/old")
    used = worker(tmp_path, flags=["delete"], tokens=[])
    inode = (tmp_path / "source/d").stat().st_ino
    real = os.scandir

    def replace(fd: int) -> Any:
        listing = real(fd)
        if not (tmp_path / "source/gone").exists():
            (tmp_path / "source/d").rename(tmp_path / "source/gone")
            fill(tmp_path / "source", "d/a")
        return listing

    monkeypatch.setattr(os, "scandir", replace)
    result = copier._Result()
    used.delete(["d"], [[inode, 0, 1]], result)
    used.close()
    assert [failure[:3] for failure in result.failures] == [["changed", "source", "d"]]
    assert names(tmp_path / "target") == {"d/a", "d/old"}


def test_a_name_that_went_while_it_was_scanned_matters_only_where_something_is_deleted(area: Path) -> None:
    fill(area / "source", "one/a", "other/a", "one/gone", "other/gone")
    fill(area / "target", "other/old", "one/f.newer-bab70963.1", "one/.beeond-ctl.0a1b2c3d.1")

    def lessen() -> None:
        for top in ("source", "target"):
            for name in ("one", "other"):
                (area / top / name / "gone").unlink()

    summary = stage(deleting(area / "source", area / "target"), area, before=lessen)
    assert summary.problems() == ["1 entry ('other') not copied: changed while it was copied at the source"]


def test_a_directory_of_another_file_system_than_was_scanned_takes_nothing_with_it(tmp_path: Path) -> None:
    """Whose inode number happens to be the same."""
    fill(tmp_path / "source", "d/a")
    fill(tmp_path / "target", "d/a", "d/old")
    used = worker(tmp_path, flags=["delete"], tokens=[])
    inode = (tmp_path / "source/d").stat().st_ino
    for root_device, mounted, left in (
        (used.source_root_device, 1, {"d/a", "d/old"}),
        (-1, 0, {"d/a", "d/old"}),
        (-1, 1, {"d/a"}),
    ):
        used.source_root_device = root_device
        used.delete(["d"], [[inode, mounted, 1]], copier._Result())
        assert names(tmp_path / "target") == left
    used.close()


@pytest.mark.root
def test_a_file_system_that_is_unmounted_below_the_source_takes_nothing_with_it(area: Path) -> None:
    fill(area / "target", "below/old")
    (area / "source/below").mkdir(parents=True)
    mount("-t", "tmpfs", "none", area / "source/below")
    fill(area / "source", "below/a")
    target = area / "target"
    summary = stage(
        deleting(area / "source", target),
        area,
        before=lambda: subprocess.run(["umount", "-l", area / "source/below"], check=True),
    )
    assert [cause for cause, _ in summary.failures] == ["changed"]
    assert names(target) == {"below/a", "below/old"}


def test_what_is_new_at_the_source_keeps_its_directory_from_being_cleared(area: Path) -> None:
    fill(area / "source", "a")
    fill(area / "target", "old")
    summary = stage(
        deleting(area / "source", area / "target"), area, before=lambda: fill(area / "source", "late")
    )
    assert summary.problems() == ["1 entry ('late') not copied: changed while it was copied at the source"]
    assert names(area / "target") == {"a", "old"}


# --- names that are the same at the destination -----------------------------------------------------------


@pytest.fixture
def folding(area: Path) -> Iterator[Path]:
    """A file system to which names that differ in case are the same."""
    if why := through_fs.missing():
        pytest.skip(why)
    with through_fs.mounted(area, folds=True) as (_, top):
        yield top


def test_where_names_fold_delete_is_refused_and_nothing_is_touched(area: Path, folding: Path) -> None:
    fill(area / "source", "Result")
    fill(folding / "target", "result", "old")
    summary = stage(deleting(area / "source", folding / "target"), area)
    assert "delete cannot tell them apart" in summary.refused
    assert names(folding / "target") == {"result", "old"}


def test_where_names_fold_the_destination_keeps_its_mode(area: Path, folding: Path) -> None:
    fill(area / "source", "result")
    (folding / "target").mkdir()
    for mode in (0o555, 0o755):
        (folding / "target").chmod(mode)
        assert stage(deleting(area / "source", folding / "target"), area).refused
        assert stat.S_IMODE((folding / "target").stat().st_mode) == mode


def test_where_a_name_is_there_in_another_spelling_nothing_is_deleted(area: Path, folding: Path) -> None:
    """As in a directory below that folds, where the destination itself does not."""
    fill(area / "source", "d/Result", "d/Sub/x", "other")
    fill(area / "target", "d/y", "old")
    fill(folding, "result", "sub/z")
    shutil.rmtree(area / "target/d")
    (area / "target/d").mkdir()
    mount("--bind", folding, area / "target/d")
    summary = stage(deleting(area / "source", area / "target"), area)
    (line,) = summary.problems()
    assert line.startswith("1 entry ('d/")
    assert line.endswith(
        "') not deleted: what is wanted is there only in another spelling at the destination"
    )
    assert {"d/result", "d/sub/x"} <= names(area / "target")


def test_two_names_that_become_one_are_not_proved(area: Path, folding: Path) -> None:
    fill(area / "source", "d/A", "d/a", "E/f", "e/g", "same", "h/Ab", "h/aB")
    fill(folding / "target", "h/AB")
    summary = stage(Job(bytes(area / "source"), bytes(folding / "target")), area)
    assert not summary.proved
    ((cause, side),) = summary.failures
    assert (cause, side) == ("same-name", "destination")
    assert {name.lower() for name in summary.failures[cause, side].examples} == {"d/a", "e", "h/ab"}


def test_two_names_that_become_one_in_what_is_mounted_below_are_not_proved(area: Path, folding: Path) -> None:
    fill(area / "source", "d/x/A", "d/x/a", "d/e/f", "d/E/f", "other")
    (area / "target/d").mkdir(parents=True)
    mount("--bind", folding, area / "target/d")
    summary = stage(Job(bytes(area / "source"), bytes(area / "target")), area)
    assert not summary.proved
    assert {name.lower() for name in summary.failures["same-name", "destination"].examples} == {
        "d/x/a",
        "d/e",
    }


def test_nothing_is_deleted_before_every_directory_is_finished(area: Path, folding: Path) -> None:
    fill(area / "source", "d/A", "d/a", "other")
    fill(area / "target", "old", "other/old")
    shutil.rmtree(area / "target/other")
    (area / "target/d").mkdir()
    mount("--bind", folding, area / "target/d")
    summary = stage(deleting(area / "source", area / "target"), area)
    assert not summary.proved
    assert "old" in names(area / "target")


@pytest.mark.root
def test_what_is_noted_of_a_directory_is_noted_once(area: Path) -> None:
    fill(area / "source", "theirs/f")
    fill(area / "target", "theirs/old", "old")
    subprocess.run(["chown", "-R", f"{USER.uid}:{USER.gid}", area / "source", area / "target"], check=True)
    os.chown(area / "target/theirs", 0, 0)
    (area / "target/theirs").chmod(0o777)
    os.setxattr(area / "target/theirs", "user.theirs", b"1")  # who may write there could remove it
    (area / "journal").mkdir(mode=0o700)
    summary = stage(deleting(area / "source", area / "target"), area, user=USER)
    assert summary.proved, summary.problems()
    assert summary.notes["foreign"].count == 1
    assert os.listxattr(area / "target/theirs") == ["user.theirs"]


def test_a_directory_has_its_metadata_again_when_something_was_deleted_in_it(area: Path) -> None:
    for number, mode in enumerate((0o755, 0o500, 0o555)):
        fill(area / "source", f"d{number}/sub/f")
        fill(area / "target", f"d{number}/old", f"d{number}/sub/old")
        for path in (f"source/d{number}/sub", f"source/d{number}"):
            os.utime(area / path, ns=(10**18, 10**18 + number))
            (area / path).chmod(mode)
    summary = stage(deleting(area / "source", area / "target"), area)
    assert summary.proved, summary.problems()
    assert summary.deleted.count == 6
    source, target = (trees.snapshot(bytes(area / side)) for side in ("source", "target"))
    assert {**target, b".": None} == {**source, b".": None}  # which was there


def test_a_name_that_was_there_in_another_spelling_is_copied_to(area: Path, folding: Path) -> None:
    fill(area / "source", "Result", "a", "B/c")
    (area / "source/second").hardlink_to(area / "source/Result")
    fill(folding / "target", "RESULT", "other", "b/d")
    summary = stage(Job(bytes(area / "source"), bytes(folding / "target")), area)
    assert summary.proved, summary.problems()
    assert (folding / "target/RESULT").read_text() == "Result"


# --- what is spared ---------------------------------------------------------------------------------------

SPARED = (
    *("f.newer-bab70963.1", "f.newer-bab70963.12.3", ".beeond-ctl.0a1b2c3d.1.x"),
    *("gone/f.newer-bab70963.2", "gone/deep/.beeond-ctl.0a1b2c3d.p1", "kept/deep/f.newer-bab70963.2"),
)
SURPLUS = ("report.newer-version.txt", ".beeond-ctl.notes", "x.newer-bab70963", "gone/g", "gone/empty/h")


def test_what_was_kept_and_what_is_being_written_stay_and_all_else_is_shown_and_goes(area: Path) -> None:
    fill(area / "source", "f", "sub/f")
    fill(area / "target", *SPARED, *SURPLUS, ".beeond-flush/1/journal", "sub/.beeond-flush/x")
    job = deleting(area / "source", area / "target")
    kept = {*SPARED, ".beeond-flush/1/journal"}
    found = preview.look(job)
    summary = stage(job, area)
    assert summary.proved, summary.problems()
    assert names(area / "target") == {"f", "sub/f", *kept}
    assert set(found.delete_names) == {
        *SURPLUS, "gone/empty", "sub/.beeond-flush", "sub/.beeond-flush/x",
    }  # fmt: skip


def test_temporary_names_of_a_killed_flush_keep_no_directory(area: Path) -> None:
    fill(area / "source", "f")
    fill(area / "target", "gone/.beeond-ctl.0a1b2c3d.1.x", "gone/g")
    job = deleting(area / "source", area / "target")
    flushes = area / "source/.beeond-flush"
    place = flushes / "1"
    place.mkdir(parents=True)
    journal = Journal(place / "1.journal")
    journal.restart()
    header = {**header_of(job), "token": "0a1b2c3d", "live": True, "durable": True}
    journal.append(("header", wire.dumps(header)), ("run", ""))
    journal.close()
    shown = {"gone", "gone/g", "gone/.beeond-ctl.0a1b2c3d.1.x"}
    assert preview.tokens_of(place) == {"0a1b2c3d"}
    assert set(preview.look(job).delete_names) == {"gone/g"}
    assert set(preview.look(job, dead=preview.tokens_of(place)).delete_names) == shown
    job = job._replace(flushes=bytes(flushes), alone=True)
    assert set(preview.look(job).delete_names) == shown
    summary = stage(job, area)
    assert summary.proved, summary.problems()
    assert names(area / "target") == {"f"}


@pytest.mark.parametrize("text", ['{"version":', "[]", '{"token":"../../ab"}'])
def test_a_header_that_nobody_has_written_tells_no_token(tmp_path: Path, text: str) -> None:
    journal = Journal(tmp_path / "1.journal")
    journal.restart()
    journal.append(("header", text))
    journal.close()
    assert preview.tokens_of(tmp_path) == set()


def test_what_a_killed_transfer_left_in_what_goes_is_shown_when_it_is_typed_again(area: Path) -> None:
    fill(area / "source", "f")
    fill(area / "target", "gone/.beeond-ctl.0a1b2c3d.1.x", "gone/.beeond-ctl.99999999.1.x")
    job = deleting(area / "source", area / "target")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(area / "state"))
        patch.delenv("BEEOND_JOB_ID", raising=False)
        assert typed._earlier(job) == set()
        place = typed._place(job)
        place.mkdir(parents=True)
        journal = Journal(place / "1.journal")
        journal.restart()
        journal.append(("header", wire.dumps({**header_of(job), "token": "0a1b2c3d"})))
        journal.close()
        assert typed._earlier(job) == {"0a1b2c3d"}


@pytest.mark.root
def test_what_cannot_be_read_is_asked_about(area: Path) -> None:
    fill(area / "source", "f", "closed/f")
    fill(area / "target", "closed/old", "gone/deep/x")
    (area / "target/gone").chmod(0o700)
    for path in (area / "source", area / "target"):
        subprocess.run(["chown", "-R", f"{USER.uid}:{USER.gid}", path], check=True)
    for name in ("closed", "gone/deep"):
        (area / "target" / name).chmod(0)
    job = deleting(area / "source", area / "target")
    found = preview.look_as(job, USER, within_s=20)
    assert found["unread"] == 2
    assert sorted(found["names"]) == ["'gone'", "'gone/deep'"]
    assert stage(job, area, user=USER).proved
    assert names(area / "target") == {"f", "closed/f"}


# --- what else is below -----------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("how", ["another file system", "the same, bound"])
def test_a_file_system_that_is_mounted_in_what_goes_is_not_emptied(area: Path, how: str) -> None:
    fill(area / "source", "f")
    fill(area / "archive", "precious")
    (area / "target/x/archive").mkdir(parents=True)
    if how == "the same, bound":
        mount("--bind", area / "archive", area / "target/x/archive")
    else:
        mount("-t", "tmpfs", "none", area / "target/x/archive")
        fill(area / "target", "x/archive/precious")
    job = deleting(area / "source", area / "target")
    summary = stage(job, area)
    assert summary.problems() == [
        "1 entry ('x/archive') not deleted: another file system is mounted there at the destination"
    ]
    assert (area / "target/x/archive/precious").read_text()


@pytest.mark.root
def test_a_users_closed_directories_are_removed(area: Path) -> None:
    fill(area / "source", "f")
    fill(area / "target", "gone/deep/deeper/x", "gone/y")
    for path in (area / "source", area / "target"):
        subprocess.run(["chown", "-R", f"{USER.uid}:{USER.gid}", path], check=True)
    for name in ("gone/deep/deeper", "gone/deep", "gone"):
        (area / "target" / name).chmod(0o100)
    assert stage(deleting(area / "source", area / "target"), area, user=USER).proved
    assert names(area / "target") == {"f"}


def test_a_tree_deeper_than_any_path_is_removed(area: Path) -> None:
    fill(area / "source", "f")
    (area / "target").mkdir()
    fd = os.open(area / "target", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("deep", dir_fd=fd)
        below = os.open("deep", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    summary = stage(deleting(area / "source", area / "target"), area)
    assert summary.proved, summary.problems()
    assert names(area / "target") == {"f"}


# --- how much at once -------------------------------------------------------------------------------------


def test_much_is_removed_in_turns_of_which_none_takes_long(
    area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(area / "source", "f", "sub/f")
    fill(area / "target", *(f"gone/{number}/{each}" for number in range(5) for each in range(20)), "sub/old")
    monkeypatch.setattr(copier, "_TURN_S", 0.0)
    (area / "journal").mkdir()
    job = deleting(area / "source", area / "target")
    coordinator = Coordinator(job, Begun(job, None, area / "journal", 1), ["here"])
    left, works, used = [len(names(area / "target"))], 0, None
    try:
        while "done" not in (answer := coordinator.take("here")):
            if "wait" in answer:
                coordinator.wait(answer["wait"])
                continue
            work = answer["work"]
            used = used or copier.Copier(wire.loads(work["setup"]))
            result = wire.loads(copier._answer(used, [work["kind"], work["tag"], *work["fields"]]))
            coordinator.report("here", {**result, "id": work["id"], "attempt": work["attempt"]})
            if work["kind"] == "delete":
                works += 1
                left.append(sum(len(files) for _, _, files in os.walk(area / "target/gone")))
        assert coordinator.summary().proved, coordinator.summary().problems()
        assert coordinator.summary().deleted.count == 2
    finally:
        if used:
            used.close()
        coordinator.close()
    assert names(area / "target") == {"f", "sub/f"}
    assert works > 100
    assert max(one - other for one, other in itertools.pairwise(left[1:])) == 1


def test_a_copier_that_was_stopped_until_others_did_its_work_removes_nothing_more(
    area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(area / "source", "f")
    fill(area / "target", "f", *(f"old{number}" for number in range(9)))
    used = worker(area, token="01234567", tokens=[])
    now_s = iter([0.0, 1.0, 2.0, SILENCE_S])
    monkeypatch.setattr(time, "clock_gettime", lambda _: next(now_s))
    result = copier._Result()
    used.delete([""], [[(area / "source").stat().st_ino, 0, 1]], result)
    used.close()
    assert len(names(area / "target")) == 1 + 9 - 3
    assert result.extra["left"][:2] == [1, '[""]']
    assert result.extra["deleted"][0] == 3


def test_what_another_copier_has_removed_meanwhile_is_removed(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    turn = copier._Turn()
    assert turn.remove(Doomed(fd, "gone", "gone", is_dir=False, is_top=True))
    assert turn.removed == ["gone"]
    os.close(fd)


# --- other transfers of the job ---------------------------------------------------------------------------


def test_what_another_transfer_of_the_job_has_copied_is_not_deleted_under_another_name(area: Path) -> None:
    fill(area / "source", "b/g")
    fill(area / "proj", "res/a/f")
    (area / "work").symlink_to("proj")
    job = deleting(area / "source/b", area / "work/res", others=(bytes(area / "proj/res/a"),))
    summary = stage(job, area)
    assert "delete would delete what another transfer copies to" in summary.refused
    assert preview.look(job).refused == summary.refused
    assert names(area / "proj") == {"res/a/f"}
    assert stage(job._replace(others=(bytes(area / "proj/other"),)), area).proved
    assert names(area / "proj") == {"res/g"}


def test_what_a_transfer_is_refused_for_is_one_line_whatever_names_are_in_it(area: Path) -> None:
    fill(area / "source", "f")
    fill(area / "target", "f")
    other = bytes(area / "target") + b"/x\n\x1b[31m\xff"
    (line,) = stage(deleting(area / "source", area / "target", others=(other,)), area).problems()
    assert line.isprintable()
    assert r"target/x\n\x1b[31m\udcff; take the flag away" in line


def test_the_transfers_of_a_job_know_where_the_others_go() -> None:
    transfers = (Transfer("a", "/proj/res/a"), Transfer("b", "/work/res", ("delete",)))
    here: Any = SimpleNamespace(
        plan=SimpleNamespace(mount_point="/mnt/beeond"),
        request=SimpleNamespace(stage_in=transfers, stage_out=transfers),
        transfers=lambda inward: transfers,
    )
    assert Stage(here, inward=False)._job(transfers[1]).others == (b"/proj/res/a",)
    assert Stage(here, inward=True)._job(transfers[0]).others == (b"/mnt/beeond//work/res",)


# --- asking -----------------------------------------------------------------------------------------------


def test_nothing_to_show_is_not_nothing_to_ask_where_something_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unread = preview.Preview(unread=Fold(1, ("closed",)))
    monkeypatch.setattr(preview, "look", lambda *_, **__: unread)
    job = deleting(Path("/source"), Path("/target"))
    with pytest.raises(UsageError, match="0 entries and what cannot be looked into at /target; say --yes"):
        cli.confirm_deletion(job, yes=False, as_json=False)
    assert "what is in 1 entry ('closed') that cannot be looked into" in capsys.readouterr().err
    cli.confirm_deletion(job, yes=True, as_json=True)
    assert '"unread": 1' in capsys.readouterr().out


@pytest.mark.parametrize("there", ["extra", "f"])
def test_the_command_that_resumes_agrees_to_deletions_where_the_question_was_answered(
    area: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    fill(area / "source", "f")
    fill(area / "target", there)
    asked = []
    monkeypatch.setattr("os.isatty", lambda _: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", lambda text, **_: asked.append(text))
    job = deleting(area / "source", area / "target")
    agreed = cli.confirm_deletion(job, yes=False, as_json=False)
    assert agreed == bool(asked) == (there == "extra")
    command = typed._command("in", job, None, here=False, yes=agreed)
    assert ("--yes" in command.split()) == agreed


def test_the_question_and_the_summary_count_the_same(area: Path) -> None:
    fill(area / "source", "f")
    fill(area / "target", "xd/y", "extra")
    job = deleting(area / "source", area / "target")
    with pytest.raises(UsageError, match="would remove 2 entries, 3 with what is in them at "):
        cli.confirm_deletion(job, yes=False, as_json=True)
    (remark,) = stage(job, area).remarks()
    assert remark.startswith("2 entries (")
    assert remark.endswith(" deleted at the destination, with what was in them")
