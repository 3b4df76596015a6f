"""Paths that are too long for many of them to be said at once: nothing is lost of them, and all are counted."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from beeond_ctl.staging import copier, scan, wire
from beeond_ctl.staging.causes import StagingError
from beeond_ctl.staging.job import Job
from beeond_ctl.staging.local import copy_local
from tests.unit.copying import SCAN, by_both

if TYPE_CHECKING:
    from pathlib import Path

    from beeond_ctl.staging.transfer import Summary

LONG = "\udcff" * 200
"""A name that is six times as long in a line."""
LONGEST = "\U0001f600" * 63
"""One whose characters are each twelve times as long."""
FILES, FAR_NS = 300, 4 * 10**18


@pytest.fixture
def area(area: Path) -> Path:
    for name in ("source", "journal"):
        (area / name).mkdir()
    return area


def stage(area: Path, *flags: str) -> Summary:
    job = Job(bytes(area / "source"), bytes(area / "target"), flags)
    return copy_local(job, journal_dir=area / "journal", workers=2, stall_timeout_s=60)


def bottom(root: Path, depth: int, name: str = LONG) -> int:
    """A descriptor of the directory so far below `root`, which is made if need be."""
    root.mkdir(exist_ok=True)
    fd = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        if name not in os.listdir(fd):
            os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    return fd


def fill(fd: int, text: bytes, *, linked: bool = False) -> None:
    for number in range(FILES):
        file = os.open(f"f{number}", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=fd)
        os.write(file, text)
        os.close(file)
        if linked:
            os.link(f"f{number}", f"g{number}", src_dir_fd=fd, dst_dir_fd=fd)


@by_both
def test_further_names_in_a_deep_directory_are_links(area: Path) -> None:
    fd = bottom(area / "source", 60)
    fill(fd, b"x", linked=True)
    os.close(fd)
    summary = stage(area)
    assert summary.proved, summary.problems()
    fd = bottom(area / "target", 60)
    assert len({os.stat(name, dir_fd=fd).st_ino for name in os.listdir(fd)}) == FILES
    assert len(os.listdir(fd)) == 2 * FILES
    os.close(fd)


@by_both
def test_many_directories_in_a_deep_one_are_copied_and_cleared(area: Path) -> None:
    for name in ("source", "target"):
        fd = bottom(area / name, 120)
        for number in range(FILES):
            os.mkdir(f"k{number}", dir_fd=fd)
            if name == "target":
                os.mkdir(f"k{number}/old", dir_fd=fd)
        os.close(fd)
    summary = stage(area, "delete")
    assert summary.proved, summary.problems()
    assert summary.deleted.count == FILES
    fd = bottom(area / "target", 120)
    assert sorted(os.listdir(fd)) == sorted(f"k{number}" for number in range(FILES))
    assert all(os.stat(f"k{number}", dir_fd=fd).st_nlink == 2 for number in range(FILES))  # empty
    os.close(fd)


@by_both
def test_each_file_that_is_newer_in_a_deep_directory_is_counted(area: Path) -> None:
    for name in ("source", "target"):
        fd = bottom(area / name, 120)
        fill(fd, name.encode())
        for number in range(FILES if name == "target" else 0):
            os.utime(f"f{number}", ns=(FAR_NS, FAR_NS), dir_fd=fd)
        os.close(fd)
    summary = stage(area)
    assert summary.proved, summary.problems()
    assert summary.notes["newer"].count == FILES
    assert all(len(name) < 500 for name in summary.notes["newer"].examples)
    assert summary.notes["newer"].examples[0].rpartition("/")[2].startswith("f")


@by_both
def test_each_file_that_fails_in_a_deep_directory_is_counted(area: Path) -> None:
    fd = bottom(area / "source", 120)
    fill(fd, b"x")
    os.close(fd)
    fd = bottom(area / "target", 120)
    for number in range(FILES):
        os.mkdir(f"f{number}", dir_fd=fd)
    os.close(fd)
    summary = stage(area)
    assert not summary.proved
    assert {kind: fold.count for kind, fold in summary.failures.items()} == {
        ("in-the-way", "destination"): FILES
    }
    (line,) = summary.problems()
    assert line.isprintable()
    assert line.count("'…") == wire.EXAMPLES


def test_a_path_that_is_too_long_for_a_line_is_named_and_the_rest_is_copied(area: Path) -> None:
    depth = wire.MAX_TEXT // 251 + 2
    os.close(bottom(area / "source", depth, "d" * 250))
    (area / "source" / "file").write_text("x")
    summary = stage(area)
    assert [*summary.failures] == [("name-too-long", "source")]
    assert summary.failed == 1
    assert (area / "target" / "file").read_text() == "x"


# --- lines ------------------------------------------------------------------------------------------------


def paths() -> list[str]:
    """Of directories: short, many in a line, one in a line, and as long as any is."""
    lengths = (1, 2, 400, 20_000, wire.MAX_TEXT // 2, wire.MAX_TEXT)
    return ["\U0001f600" * length for length in lengths for _ in range(3)]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    said: list[tuple[str, ...]] = []
    monkeypatch.setattr(scan, "_say", lambda *fields: said.append(fields))
    return said


@pytest.mark.parametrize("how", ["add", "add_files", "first"])
def test_what_is_handed_out_fits_into_a_line_and_so_does_any_answer(
    said: list[tuple[str, ...]], how: str
) -> None:
    batch = scan._Batch("batch")
    told = 0
    for path in paths():
        batch.group(path)
        count = 3000 if len(path) <= 400 else 20 if len(path) <= 20_000 else 3
        told += count
        names = [f"{number}{LONGEST}" for number in range(count)]
        if how == "add_files":
            batch.add_files(path, names, [1] * count)
        for name in names if how != "add_files" else ():
            batch.add(path, name, 1, first=["/" * len(path), ["f", 1, 1, 1, 1]] if how == "first" else None)
    batch.send()
    entries = 0
    for _, number, _, dirs, payload in said:
        found = wire.loads(dirs)
        named = [f"{found[index]}/{name}" for index, names, _ in wire.loads(payload) for name in names]
        entries += len(named)
        assert int(number) == len(named)
        assert len(wire.dumps([dirs, payload])) < wire.MAX_LINE
        assert len(wire.dumps(wire.dumps(named))) < wire.MAX_LINE  # as for files that have all grown
    assert entries == told


def test_directories_and_names_to_look_at_fit_into_a_line(
    said: list[tuple[str, ...]], area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**SCAN, "nodes": 9, "source": str(area), "destination": str(area)}
    walk = scan._Scan(config, None)
    monkeypatch.setattr(walk, "pool", True)
    walk.shares = 10**6
    for path in 5 * paths():
        walk.dirs.add(path)
        assert walk._share_out(path, os.fsencode(LONGEST) + b"\0")
    walk.dirs.send()
    walk._send_share()
    assert max(len(wire.dumps(fields)) for fields in said) < wire.MAX_LINE
    for kind in ("dirs", "look"):
        assert sum(len(wire.loads(fields[3])) for fields in said if fields[0] == kind) == 5 * len(paths())


def test_an_answer_counts_all_and_names_a_few() -> None:
    result = copier._Result()
    for number in range(1000):
        path = LONGEST * 500 + str(number)
        result.fail("source", StagingError("changed"), path)
        result.fail("destination", StagingError("changed"), path)
        result.note("newer", path)
    line = result.line("t")
    answer = wire.loads(line)
    assert len(line) < 1 << 18
    assert len(answer["failures"]) == 2000
    assert len(answer["notes"]["newer"]) == 1000
    for side in ("source", "destination"):
        names = [name for _, where, name, _ in answer["failures"] if where == side]
        assert [name[-1:] for name in names[: wire.EXAMPLES]] == list("01234")
        assert not any(names[wire.EXAMPLES :])
