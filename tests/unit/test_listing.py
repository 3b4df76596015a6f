"""The list of a pending job's source: what stage-in takes from it, and what it never believes."""

from __future__ import annotations

import os
import random
import re
import shutil
import stat
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import bb
from beeond_ctl.errors import UserError
from beeond_ctl.staging import listing, spawn, wire
from beeond_ctl.staging import look as module
from beeond_ctl.staging.begin import Begun
from beeond_ctl.staging.coordinator import Coordinator
from beeond_ctl.staging.job import Job
from beeond_ctl.staging.journal import records
from beeond_ctl.staging.listing import List, ListError, take
from beeond_ctl.staging.look import Look, look
from beeond_ctl.staging.quiet import clock_ns
from beeond_ctl.staging.wire import PIECE
from beeond_ctl.staging.worker import serve
from tests.faults import trees

if TYPE_CHECKING:
    from beeond_ctl.staging.transfer import Summary


@pytest.fixture
def area(area: Path) -> Path:
    """With a source to fill and a place for lists."""
    for name in ("source", "lists", "journal"):
        (area / name).mkdir(mode=0o700)
    return area


@pytest.fixture
def settled(area: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories count as left alone as soon as the clock has gone on."""
    monkeypatch.setattr(listing, "QUIET_NS", 0)


def prepare(area: Path) -> Look:
    """Look at the source and list it, when a change would show in its directories' times."""
    latest = max(os.lstat(path).st_ctime_ns for path, _, _ in os.walk(area / "source"))
    fd = os.open(area, os.O_RDONLY)
    try:
        deadline = time.monotonic() + 10
        while (clock_ns(str(area), fd) or 0) <= latest:
            assert time.monotonic() < deadline
    finally:
        os.close(fd)
    seen = look(str(area / "source"), time.monotonic() + 60, str(list_of(area)))
    assert not seen.unlisted
    return seen


def list_of(area: Path) -> Path:
    return area / "lists" / "7.0.list"


def stage_in(area: Path) -> tuple[Summary, dict[str, Any]]:
    """What came of a transfer that is given the list, and of the list."""
    job = Job(bytes(area / "source"), bytes(area / "target"), durable=False, listed=bytes(list_of(area)))
    transfer = Coordinator(job, Begun(job, None, area / "journal", 1), ["n1"])
    serve(
        lambda: transfer.take("n1"),
        lambda result: transfer.report("n1", result),
        None,
        threading.Event(),
        processes=2,
        pause=transfer.wait,
    )
    transfer.close()
    return transfer.summary(), transfer.listed


def snapshot(root: Path) -> trees.Snapshot:
    found = trees.snapshot(bytes(root))
    return {name: each for name, each in found.items() if not stat.S_ISFIFO(each[0])}


def assert_same(area: Path) -> None:
    same = snapshot(area / "source") == snapshot(area / "target")
    assert same  # nobody wants to see the difference
    assert not trees.leftovers(bytes(area / "target"))


def assert_nothing_left(area: Path) -> None:
    assert os.listdir(area / "lists") == []


def small_tree(source: Path) -> None:
    for name in ("a", "a/b", "c"):
        (source / name).mkdir()
        for number in range(3):
            (source / name / f"f{number}").write_text(f"{name} {number}")


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("engine", ["native", "portable"])
def test_an_unchanged_tree_is_taken_from_the_list_whole(
    area: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = "1" if engine == "native" else "0"
    monkeypatch.setattr(spawn, "_ENVIRONMENT", {**spawn._ENVIRONMENT, "BEEOND_CTL_NATIVE": wanted})
    shutil.rmtree(area / "source")
    trees.build(bytes(area / "source"), 5, entries=200)
    prepare(area)
    assert stat.S_IMODE(list_of(area).stat().st_mode) == 0o600
    ordinary = [
        info
        for directory, _, names in os.walk(area / "source")
        for info in (os.lstat(os.path.join(directory, name)) for name in names)
        if stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and info.st_size <= listing.SMALL
    ]
    summary, listed = stage_in(area)
    assert summary.proved, summary.problems()
    assert listed == {"directories": len(list(os.walk(area / "source"))), "files": len(ordinary)}
    assert_same(area)
    assert_nothing_left(area)


def change(rng: random.Random, root: Path) -> None:
    """One thing that may happen to a tree while a job waits."""
    dirs = [Path(path) for path, _, _ in os.walk(root)]
    entries = [Path(path) / name for path, _, names in os.walk(root) for name in names]
    files = [path for path in entries if path.is_file() and not path.is_symlink()]
    new = rng.choice(dirs) / f"new{rng.random()}"
    what = rng.choice(["write", "write", "append", "grow", "empty", "mode", "replace", "fifo", "symlink", "directory",
                       "rename", "remove", "add", "link", "link", "tree"])  # fmt: skip
    if what == "add":
        new.write_bytes(rng.randbytes(100))
    elif what == "tree":
        (new / "deep").mkdir(parents=True)
        (new / "deep" / "f").write_text("x")
    elif what == "rename":
        os.rename(rng.choice(files), new)
    elif what == "link":
        os.link(rng.choice(files), new)
    elif what == "remove":
        rng.choice(files).unlink()
    elif what in ("fifo", "symlink", "directory", "replace"):
        path = rng.choice(files)
        path.unlink()
        if what == "replace":
            path.write_bytes(rng.randbytes(50))
        else:
            {"fifo": os.mkfifo, "directory": os.mkdir, "symlink": lambda at: os.symlink("x", at)}[what](path)
    elif what == "mode":
        rng.choice(files).chmod(0o640)
    else:
        with open(rng.choice(files), "r+b") as file:
            size = {"write": 3, "append": 0, "grow": 3 << 20, "empty": 0}[what]
            file.seek(0, os.SEEK_END if what == "append" else os.SEEK_SET)
            file.write(rng.randbytes(10 if what == "append" else size))
            if what == "empty":
                file.truncate(0)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("seed", range(12))
def test_what_is_staged_in_is_what_is_there_then_whatever_happened_to_the_tree(area: Path, seed: int) -> None:
    rng = random.Random(seed)
    for directory in range(12):
        (area / "source" / f"d{directory}" / "e").mkdir(parents=True)
        for number in range(4):
            trees.write(bytes(area / "source" / f"d{directory}" / f"f{number}"), rng)
            trees.write(bytes(area / "source" / f"d{directory}" / "e" / f"f{number}"), rng)
    prepare(area)
    for _ in range(10):
        change(rng, area / "source")
    summary, listed = stage_in(area)
    assert summary.proved, summary.problems()
    assert listed["directories"] > 0
    assert_same(area)
    assert_nothing_left(area)


@pytest.mark.usefixtures("settled")
def test_a_file_that_has_become_big_since_is_copied_in_pieces(area: Path) -> None:
    small_tree(area / "source")
    prepare(area)
    with open(area / "source" / "a" / "f1", "r+b") as file:
        for index in range(4):
            file.seek(index * PIECE)
            file.write(b"piece %d" % index)
    summary, listed = stage_in(area)
    assert summary.proved, summary.problems()
    assert (listed["directories"], summary.copied, summary.verified) == (4, 9, 9)
    assert_same(area)
    (journal,) = (area / "journal").iterdir()
    with journal.open("rb") as file:
        assert [kind for kind, _ in records(file.fileno())].count("piece") == 4


@pytest.mark.usefixtures("settled")
def test_another_name_of_a_listed_file_is_a_link_to_its_copy(area: Path) -> None:
    small_tree(area / "source")
    prepare(area)
    os.link(area / "source" / "a" / "b" / "f0", area / "source" / "c" / "again")
    os.link(area / "source" / "a" / "b" / "f0", area / "source" / "c" / "and again")
    summary, listed = stage_in(area)
    assert summary.proved, summary.problems()
    assert (listed["directories"], summary.copied) == (3, 11)
    assert_same(area)


@pytest.mark.root
@pytest.mark.usefixtures("settled")
def test_what_is_mounted_in_the_source_has_another_clock_and_is_walked(area: Path) -> None:
    small_tree(area / "source")
    subprocess.run(["mount", "-t", "tmpfs", "none", area / "source" / "a" / "b"], check=True)
    try:
        (area / "source" / "a" / "b" / "f").touch()
        prepare(area)
        summary, listed = stage_in(area)
    finally:
        subprocess.run(["umount", area / "source" / "a" / "b"], check=True)
    assert summary.proved, summary.problems()
    assert listed == {"directories": 3, "files": 6}
    assert (area / "target" / "a" / "b" / "f").exists()


def test_a_directory_that_has_just_changed_is_not_listed(area: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "QUIET_NS", 3600 * 10**9)
    (area / "source" / "d").mkdir()
    assert not look(str(area / "source"), time.monotonic() + 60, str(list_of(area))).unlisted
    summary, listed = stage_in(area)
    assert summary.proved
    assert listed == {"directories": 0, "files": 0}


@pytest.mark.usefixtures("settled")
def test_a_list_that_is_cut_off_or_damaged_anywhere_tells_nothing_wrong(area: Path) -> None:
    small_tree(area / "source")
    prepare(area)
    whole = list_of(area).read_bytes()
    directories = ("", "a", "a/b", "c")
    status = {path: os.stat(area / "source" / path) for path in directories}

    def told(data: bytes) -> list[bool]:
        """Of which directories this list knows what is in them."""
        list_of(area).write_bytes(data)
        try:
            found = take(str(list_of(area)), str(area / "source"))
        except ListError:
            return []
        known = [found.current(path, status[path]) for path in directories]
        os.close(found._fd)
        for path, each in zip(directories, known, strict=True):
            if each is not None:
                names = {name for name in os.listdir(area / "source" / path) if name.startswith("f")}
                assert set(each.files) == names
        return [each is not None for each in known]

    assert told(whole) == [True] * 4
    counts = [sum(told(whole[:cut])) for cut in range(len(whole))]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    damaged = [told(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]) for at in range(len(whole))]
    assert not any(
        all(damaged[at.start()] or [False]) for at in re.finditer(rb"[f0-9,\[\]\"](?=[^ ]*$)", whole, re.M)
    )
    assert_nothing_left(area)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "forged",
    [
        {4: "../../../etc/shadow"},
        {4: ".."},
        {4: "f0//f1"},
        {4: "f0\0/x"},
        {4: "\ud800"},
        {4: "x" * 256},
        {4: ["f0", "f1", "f2"]},
        {5: [1, 2]},
        {5: [1, 2, -1]},
        {5: [1, 2, 1 << 40]},
        {5: [1, 2, True]},
        {5: [1, 2, 1.0]},
        {6: "123"},
        {7: "/"},
        {8: "."},
        {8: None},
    ],
)
def test_forged_entries_make_the_directory_be_read(area: Path, forged: dict[int, Any]) -> None:
    small_tree(area / "source")
    prepare(area)
    lines = list_of(area).read_bytes().splitlines()
    values = [wire.loads(line[34:]) for line in lines]
    number = next(at for at, value in enumerate(values) if value[0] == "a")
    value = [forged.get(at, each) for at, each in enumerate(values[number])]
    lines[number] = listing._line("a", value)[:-1]
    list_of(area).write_bytes(b"\n".join(lines) + b"\n")
    summary, listed = stage_in(area)
    assert summary.proved, summary.problems()
    assert listed["directories"] == 3
    assert_same(area)


@pytest.mark.usefixtures("settled")
def test_no_forged_path_leads_out_of_the_source(area: Path) -> None:
    small_tree(area / "source")
    (area / "outside").write_text("x")
    os.link(area / "outside", area / "source" / "c" / "f9")
    prepare(area)
    (area / "source" / "c" / "f8").touch()
    (area / "target").mkdir()
    outside, inode = os.stat(area), os.stat(area / "outside").st_ino
    times = [outside.st_ino, outside.st_mtime_ns, outside.st_ctime_ns]
    with list_of(area).open("ab") as file:
        for path in ("..", "a/../..", str(area), "/", "./.."):
            file.write(listing._line(path, [path, *times, "outside", [1], [inode], "", ""]))
    summary, listed = stage_in(area)
    assert summary.proved, summary.problems()
    assert listed["directories"] == 3
    assert (area / "target" / "c" / "f9").stat().st_nlink == 1


@pytest.mark.usefixtures("settled")
def test_a_list_that_calls_something_a_file_that_is_none_is_found_out(area: Path) -> None:
    small_tree(area / "source")
    for make in (os.mkfifo, lambda path: os.symlink("/etc/passwd", path)):
        make(area / "source" / f"f{make is os.mkfifo}")
    prepare(area)
    lines = list_of(area).read_bytes().splitlines()
    for number, line in enumerate(lines):
        value = wire.loads(line[34:])
        if value[0] == "":
            value[4:8] = ["/".join(("fTrue", "fFalse")), [5, 5], [1, 2], ""]
            lines[number] = listing._line("", value)[:-1]
    list_of(area).write_bytes(b"\n".join(lines) + b"\n")
    summary, listed = stage_in(area)
    assert listed["directories"] == 4
    assert not summary.proved
    assert (summary.failed, summary.copied) == (2, 9)
    assert sorted(os.listdir(area / "target")) == ["a", "c"]


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("what", ["version", "source", "empty", "missing", "fifo", "link", "open to others"])
def test_without_a_list_that_counts_the_source_is_walked(area: Path, what: str) -> None:
    small_tree(area / "source")
    prepare(area)
    lines = list_of(area).read_bytes().partition(b"\n")[2]
    source = str(area / "source")
    if what in ("version", "source"):
        head = [2, source] if what == "version" else [1, source + "/a"]
        list_of(area).write_bytes(listing._line("", head) + lines)
    elif what == "empty":
        list_of(area).write_bytes(b"")
    elif what == "open to others":
        (area / "lists").chmod(0o777)
    else:
        list_of(area).rename(area / "elsewhere")
        if what == "fifo":
            os.mkfifo(list_of(area))
        elif what == "link":
            list_of(area).symlink_to(area / "elsewhere")
    summary, listed = stage_in(area)
    assert summary.proved, summary.problems()
    assert listed.pop("unused")
    assert listed == {"directories": 0, "files": 0}
    assert_same(area)
    if what in ("version", "source", "empty", "fifo"):
        assert_nothing_left(area)


@pytest.mark.usefixtures("settled")
def test_a_transfer_that_compares_uses_up_the_list_and_walks(area: Path) -> None:
    small_tree(area / "source")
    assert stage_in(area)[0].proved
    prepare(area)
    (area / "target" / "a" / "f0").unlink()
    summary, listed = stage_in(area)  # the second run of this transfer
    assert (summary.copied, summary.skipped, listed["directories"]) == (1, 8, 0)
    assert_nothing_left(area)


@pytest.mark.usefixtures("settled")
def test_what_does_not_fit_is_walked(area: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tree(area / "source")
    (area / "source" / "c" / ("long" * 50)).write_text("x")
    monkeypatch.setattr(listing, "MAX_RECORD", 300)
    prepare(area)
    summary, listed = stage_in(area)
    assert summary.proved
    assert listed["directories"] == 3
    assert_same(area)


def test_no_list_is_made_where_it_could_not_be_proved_or_would_not_be_used(area: Path) -> None:
    later = time.monotonic() + 60
    source, path = str(area / "source"), str(list_of(area))
    (area / "lists").chmod(0o770)
    assert look(source, later, path).unlisted == "others may write where it is"
    (area / "lists").rmdir()
    assert "No such file" in look(source, later, str(area / "not there" / "lists" / "7.0.list")).unlisted
    (area / "lists").symlink_to(area / "journal")
    assert look(source, later, path).unlisted
    (area / "lists").unlink()
    elsewhere = Path("/proc/self/fd" if os.geteuid() else "/sys")
    assert look(str(elsewhere), time.monotonic(), path).unlisted.endswith(
        "file system of the source, or cannot be written"
    )
    assert look("/nowhere", later, path).trouble
    assert look("/etc/passwd", later, path).files == 1
    assert os.listdir(area / "lists") == []
    assert stat.S_IMODE((area / "lists").stat().st_mode) == 0o700


def test_lists_that_nobody_used_are_removed_by_the_next_look(area: Path) -> None:
    old, young, foreign = "6.0.list", "6.1.list", "notes.list"
    cut, clock = (f".{name}.{'0' * 16}" for name in ("6.2.list", "clock"))
    for name in (old, young, foreign, cut, clock):
        (area / "lists" / name).touch()
    for name in (old, foreign, cut, clock):
        os.utime(area / "lists" / name, (time.time() - 8 * 86400,) * 2)
    look(str(area / "source"), time.monotonic() + 60, str(list_of(area)))
    assert sorted(os.listdir(area / "lists")) == sorted([young, foreign, list_of(area).name])


@pytest.mark.usefixtures("settled")
def test_a_job_that_is_held_leaves_no_list(area: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tree(area / "source")
    (area / "source" / "c" / "large").write_bytes(b"x" * (2 << 20))
    fields = {"UserId": "lists(0)"}
    limits = {"path": "/bin", "look": "20", "lists": str(area / "%u")}
    lines = [
        "#BB_LUA beeond capacity=1MiB pool=beeond",
        f"#BB_LUA stage_in source={area}/source destination=x",
    ]
    monkeypatch.setattr("beeond_ctl.slurm.job_facts", lambda *_: (fields, lines))
    monkeypatch.setattr("beeond_ctl.slurm.owner", lambda *_: os.geteuid())
    with pytest.raises(UserError, match="capacity="):
        bb.data_in(limits, 7)
    assert_nothing_left(area)
    del lines[0]
    bb.data_in(limits, 7)
    assert os.listdir(area / "lists") == ["7.0.list"]
    assert stage_in(area)[1]["directories"] == 4


@pytest.mark.usefixtures("settled")
def test_where_calls_wait_many_threads_see_and_list_the_same(
    area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(area / "source")
    trees.build(bytes(area / "source"), 6, entries=300)
    alone = prepare(area)
    listed = sorted(list_of(area).read_bytes().splitlines())
    monkeypatch.setattr(module, "_SLOW_S", 0.0)
    monkeypatch.setattr(module, "_CERTAIN_S", 0.0)
    walkers, came = list[int](), threading.Condition()
    begin = listing.Writer.begin

    def note(fd: int) -> listing.Directory:
        """Behind the root, who comes waits for somebody else: on a busy machine one might be through before."""
        with came:
            walkers.append(threading.get_ident())
            came.notify_all()
            if len(walkers) > 1:
                came.wait_for(lambda: len({*walkers}) > 1, 20)
        return begin(fd)

    monkeypatch.setattr(listing.Writer, "begin", staticmethod(note))
    assert prepare(area) == alone
    assert len({*walkers}) > 1
    again = sorted(list_of(area).read_bytes().splitlines())
    assert [line[:16] for line in again] == [line[:16] for line in listed]


def test_nothing_is_written_of_what_cannot_be_read_in_time(area: Path) -> None:
    (area / "source" / "f").touch()
    seen = look(str(area / "source"), time.monotonic() - 1, str(list_of(area)))
    assert not seen.whole
    found = List(os.open(list_of(area), os.O_RDONLY), str(area / "source"))
    assert found.current("", os.stat(area / "source")) is None
