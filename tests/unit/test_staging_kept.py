"""What nobody may lose by a transfer: files that others put in its way, and times to the nanosecond."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl.staging import _native, copier
from beeond_ctl.staging.causes import StagingError
from beeond_ctl.staging.job import Job
from beeond_ctl.staging.local import copy_local
from beeond_ctl.staging.wire import PIECE
from tests.areas import MEMORY, area_in
from tests.unit.copying import by_both, coordinator, finish, worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from beeond_ctl.staging.transfer import Summary

OLD_NS = 10**18
AFTER_2262_NS = 13_569_465_600 * 10**9
"""In 2400, more nanoseconds than 64 bits hold."""


@pytest.fixture(params=["memory", "disk"])
def area(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Where files have no name before they are proved; where they have, and are synced together."""
    with area_in(tmp_path if request.param == "disk" else MEMORY) as area:
        for name in ("source", "journal"):
            (area / name).mkdir()
        yield area


def stage(area: Path, *flags: str, **more: Any) -> Summary:
    job = Job(bytes(area / "source"), bytes(area / "target"), flags, **more)
    return copy_local(job, journal_dir=area / "journal", workers=2, stall_timeout_s=60)


def holey(path: Path, text: bytes) -> None:
    """A file of three pieces that takes next to no room."""
    path.write_bytes(text)
    os.truncate(path, 2 * PIECE + 4096)
    os.utime(path, ns=(OLD_NS, OLD_NS))


# --- newer files ------------------------------------------------------------------------------------------


@by_both
def test_a_newer_file_is_kept_where_this_transfer_has_made_the_directory(area: Path) -> None:
    """Two jobs of an array stage out to the same new directory: what one has put there, the other replaces."""
    source, target = area / "source", area / "target"
    (source / "dir").mkdir()
    for number in range(40):
        for path in (source / f"file{number}", source / "dir" / f"file{number}"):
            path.write_text("A")
            os.utime(path, ns=(OLD_NS, OLD_NS))
    holey(source / "big", b"A")
    (source / "link").symlink_to("A")
    os.utime(source / "link", ns=(OLD_NS, OLD_NS), follow_symlinks=False)
    (source / "one").write_text("A")
    os.link(source / "one", source / "other")
    os.utime(source / "one", ns=(OLD_NS, OLD_NS))
    transfer = coordinator(area, "n1")
    while not transfer._setup:
        transfer.wait(0.05)
    (target / "dir").mkdir()
    for path in [each for each in source.rglob("*") if not each.is_dir() or each.is_symlink()]:
        (target / path.relative_to(source)).write_text("B")
    summary = finish(transfer, "n1", processes=2)
    assert summary.proved, summary.problems()
    assert summary.notes["newer"].count == 84
    kept = list(target.rglob("*.newer-*"))
    assert len(kept) == 84
    assert {path.read_text() for path in kept} == {"B"}
    assert (target / "dir" / "file7").read_text() == "A"


@pytest.mark.parametrize("way", [0, _native.NAMELESS])
@pytest.mark.parametrize("refused", [0, _native.NO_REPLACE])
def test_the_native_part_replaces_a_newer_file_only_where_nobody_else_is(
    tmp_path: Path, way: int, refused: int
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for path in (source, target):
        path.mkdir()
        (path / "file").write_text(path.name)
    os.utime(source / "file", ns=(OLD_NS, OLD_NS))
    fds = [os.open(each, os.O_RDONLY) for each in (source, target)]
    everything = _native.WRITE | _native.PLACE | _native.VERIFY | _native.MADE | way | refused
    for private, content in ((0, "target"), (_native.PRIVATE, "source")):
        _, _, left, _, _ = _native.copy(
            fds[0], fds[1], ["file"], b"", ".temp.", 0, -1, everything | private, b"", 0
        )
        taken = bool(private) and not way  # what has no name yet gets none that is taken
        assert left == ([] if taken else [0])
        assert os.listdir(target) == ["file"]
        assert (target / "file").read_text() == (content if taken else "target")
    for each in fds:
        os.close(each)


def test_a_small_file_into_a_new_directory_takes_no_look_for_a_newer_one(tmp_path: Path) -> None:
    """One call gives it its name, and fails where there is one."""
    if shutil.which("strace") is None:
        pytest.skip("no strace")
    program = (
        "import os, sys; from beeond_ctl.staging import _native as n;"
        "fds = [os.open(each, os.O_RDONLY) for each in sys.argv[1:3]];"
        "print(n.copy(fds[0], fds[1], sorted(os.listdir(fds[0])), b'', '.temp.', 0, -1,"
        "n.WRITE | n.PLACE | n.VERIFY | n.MADE | n.NO_REPLACE, b'', 0)[2])"
    )
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for number in range(100):
        (source / f"file{number}").write_text("x")
    done = subprocess.run(
        ["strace", "-f", "-e", "trace=rename,renameat,renameat2,newfstatat", "-o", tmp_path / "calls",
         os.path.realpath("/proc/self/exe"), "-c", program, source, target],
        check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(__import__("sys").path)},
    )  # fmt: skip
    assert done.stdout == "[]\n"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("RENAME_NOREPLACE" in call for call in calls) == 100
    assert not [call for call in calls if "newfstatat" in call and '"file' in call]


@by_both
def test_a_newer_file_with_a_date_beyond_2262_is_kept(area: Path) -> None:
    (area / "target").mkdir()
    for side in ("source", "target"):
        (area / side / "file").write_text(side)
    os.utime(area / "target" / "file", ns=(OLD_NS, AFTER_2262_NS))
    os.utime(area / "source" / "file", ns=(OLD_NS, OLD_NS))
    if (area / "target" / "file").stat().st_mtime_ns != AFTER_2262_NS:
        pytest.skip("this file system keeps no such dates")
    summary = stage(area)
    assert summary.proved, summary.problems()
    assert summary.notes["newer"].count == 1
    (kept,) = (area / "target").glob("file.newer-*")
    assert kept.read_text() == "target"


@by_both
@pytest.mark.parametrize("time_ns", [AFTER_2262_NS, -1, -(10**18) - 1])
def test_a_file_of_any_date_is_copied_proved_and_known_again(area: Path, time_ns: int) -> None:
    (area / "source" / "file").write_text("1")
    os.utime(area / "source" / "file", ns=(OLD_NS, time_ns))
    if (area / "source" / "file").stat().st_mtime_ns != time_ns:
        pytest.skip("this file system keeps no such dates")
    for copied in (1, 0):
        summary = stage(area)
        assert summary.proved, summary.problems()
        assert (summary.copied, summary.skipped) == (copied, 1 - copied)
    assert (area / "target" / "file").stat().st_mtime_ns == time_ns
    assert stage(area, "update").skipped == 1


def test_dates_that_are_the_same_in_64_bits_are_not_the_same() -> None:
    with area_in(MEMORY) as area, ExitStack() as opened:
        fds = {}
        for side, time_ns in (("source", OLD_NS), ("target", OLD_NS + (1 << 64))):
            (area / side).mkdir()
            (area / side / "file").write_text("1")
            os.utime(area / side / "file", ns=(time_ns, time_ns))
            fds[side] = os.open(area / side, os.O_RDONLY)
            opened.callback(os.close, fds[side])
        seen = _native.examine(fds["source"], fds["target"], b"file\0", b"", None, True)
        assert seen == (0, ["file"], [1], [])


@by_both
def test_a_newer_file_with_the_longest_name_is_kept_under_a_shorter_one(area: Path) -> None:
    names = ["x" * 254 + "1", "x" * 254 + "2", "é" * 127, "plain"]
    (area / "target").mkdir()
    for name in names:
        (area / "source" / name).write_text("job's")
        os.utime(area / "source" / name, ns=(OLD_NS, OLD_NS))
        (area / "target" / name).write_text(name)
    summary = stage(area)
    assert summary.proved, summary.problems()
    kept = [path for path in (area / "target").iterdir() if ".newer-" in path.name]
    assert sorted(path.read_text() for path in kept) == sorted(names)
    assert all((area / "target" / name).read_text() == "job's" for name in names)
    for path in kept:
        os.fsencode(path.name).decode()  # no character is cut


def test_where_no_link_can_be_made_a_kept_file_replaces_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = worker(tmp_path)
    for name in ("x" * 254 + "1", "x" * 254 + "2"):
        (tmp_path / "target" / name).write_text(name)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for name in sorted(os.listdir(tmp_path / "target")):
        made._keep_newer(made.target.root, name, OLD_NS, name, copier._Result())
    texts = [path.read_text()[-1] for path in (tmp_path / "target").iterdir()]
    assert sorted(texts) == ["1", "2"]


# --- further names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["first", "/etc/passwd"])
@pytest.mark.parametrize("is_link", [False, True])
def test_a_further_name_is_made_only_of_what_is_the_copy_of_the_first(
    tmp_path: Path, text: str, is_link: bool
) -> None:
    """Somebody has put a link under the first name of a file, or of a link."""
    made = worker(tmp_path)
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "a").symlink_to("first") if is_link else (source / "a").write_text("x")
    os.link(source / "a", source / "b", follow_symlinks=False)
    (target / "a").symlink_to(text)
    info = (source / "a").lstat()
    entry = ["a", info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]
    result = copier._Result()
    made.link("1", [""], [[0, [["b", ["", entry]]], []]], result)
    made.close()
    if is_link and text == "first":
        assert (result.copied, result.failures) == (1, [])
        assert os.path.samestat((target / "a").lstat(), (target / "b").lstat())
    else:
        assert [failure[0] for failure in result.failures] == ["first-link"]
        assert not result.proofs
        assert os.listdir(target) == ["a"]


# --- times, and leases ------------------------------------------------------------------------------------


@by_both
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_the_access_time_is_that_of_the_source_though_the_copy_was_read(
    area: Path, single: bool, durable: bool
) -> None:
    source, target = area / "source", area / "target"
    if single:
        source, target = source / "small", area / "small"
    (area / "source" / "small").write_text("x")
    (area / "source" / "closed").write_text("x")
    (area / "source" / "closed").chmod(0o004)
    (area / "source" / "large").write_bytes(os.urandom(3 << 20))
    (area / "source" / "link").symlink_to("small")
    holey(area / "source" / "big", b"x")
    paths = list((area / "source").iterdir())
    for path in paths:
        os.utime(path, ns=(OLD_NS - 7, OLD_NS), follow_symlinks=False)
    job = Job(bytes(source), bytes(target), durable=durable)
    summary = copy_local(job, journal_dir=area / "journal", workers=2, stall_timeout_s=60)
    assert summary.proved, summary.problems()
    copies = [target] if single else [target / path.name for path in paths]
    assert {path.lstat().st_atime_ns for path in copies} == {OLD_NS - 7}


@by_both
@pytest.mark.parametrize("size", [10, 2 * PIECE + 1])
def test_a_file_with_a_lease_is_copied_once_that_is_given_back(area: Path, size: int) -> None:
    path = area / "source" / "file"
    with path.open("wb") as file:
        file.truncate(size)
    holder = os.open(path, os.O_RDWR)
    asked = threading.Event()

    def give_back(*_: object) -> None:
        if not asked.is_set():
            asked.set()
            threading.Timer(0.7, lambda: fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK)).start()

    before = signal.signal(signal.SIGIO, give_back)
    try:
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        summary = stage(area)
    finally:
        os.close(holder)
        signal.signal(signal.SIGIO, before)
    assert asked.is_set()
    assert summary.proved, summary.problems()
    assert (area / "target" / "file").stat().st_size == size


@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_what_refuses_to_be_opened_at_once_and_is_no_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "entry"
    {"fifo": os.mkfifo, "directory": os.mkdir, "link": lambda path: path.symlink_to("x")}[kind](path)
    directory, real = os.open(tmp_path, os.O_RDONLY), os.open

    def busy(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_NONBLOCK:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real(name, flags, *rest, **more)

    monkeypatch.setattr(os, "open", busy)
    with pytest.raises(StagingError, match="no longer a file"):
        copier._open_source(directory, "entry")
    os.close(directory)
