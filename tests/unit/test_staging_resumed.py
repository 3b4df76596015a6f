"""What one run leaves to the next: what its journal is worth, what it has opened up, and what it has begun."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
import zlib
from typing import TYPE_CHECKING

import pytest

from beeond_ctl.staging import preview
from beeond_ctl.staging.job import Identity, Job
from beeond_ctl.staging.journal import Journal
from beeond_ctl.staging.local import copy_local
from tests.faults import trees
from tests.unit.copying import assert_copied, coordinator, kill, next_work, token_of

if TYPE_CHECKING:
    from pathlib import Path

    from beeond_ctl.staging.transfer import Summary

USER = Identity(65534, 65534, (65534,))
OLD_NS = 10**18


@pytest.fixture
def area(area: Path) -> Path:
    (area / "source").mkdir()
    return area


def stage(area: Path, *flags: str, user: Identity | None = None, **more: bool | bytes) -> Summary:
    (area / "journal").mkdir(mode=0o700, exist_ok=True)
    job = Job(bytes(area / "source"), bytes(area / "target"), flags, **more)  # type: ignore[arg-type]
    return copy_local(job, user, journal_dir=area / "journal", workers=1)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, ns=(OLD_NS, OLD_NS))


def block(area: Path) -> None:
    """Keep transfers from being proved, and so their journal."""
    write(area / "source/blocked", "x")
    (area / "target/blocked/by").mkdir(parents=True)


def unblock(area: Path) -> None:
    shutil.rmtree(area / "target/blocked")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- what a journal is worth ------------------------------------------------------------------------------


def test_what_a_run_did_not_read_back_is_copied_by_one_that_does_although_an_earlier_one_did(
    area: Path,
) -> None:
    block(area)
    assert not stage(area).proved
    write(area / "source/data", "right")
    assert not stage(area, "metadata-only").proved
    write(area / "target/data", "wrong")
    unblock(area)
    assert stage(area).proved
    assert (area / "target/data").read_text() == "right"


def test_what_was_read_back_counts_for_a_run_that_does_not(area: Path) -> None:
    write(area / "source/data", "right")
    block(area)
    assert not stage(area).proved
    summary = stage(area, "metadata-only")
    assert (summary.copied, summary.skipped) == (0, 1)


def test_what_was_copied_while_nobody_minded_writers_counts_for_none_that_does_although_an_earlier_did(
    area: Path,
) -> None:
    block(area)
    assert not stage(area, live=True, durable=True).proved
    write(area / "source/data", "right")
    assert not stage(area, durable=True).proved
    summary = stage(area, live=True, durable=True)
    assert (summary.copied, summary.skipped) == (1, 0)


# --- a source that is not there ---------------------------------------------------------------------------


def test_a_source_that_is_not_there_is_missing_whatever_is_known_of_it(area: Path) -> None:
    write(area / "source/data", "x")
    flushes = area / ".beeond-flush"
    (flushes / "1").mkdir(parents=True)
    job = Job(
        bytes(area / "source"), bytes(area / "target"), ("update",), True, flushes=bytes(flushes), live=True
    )
    assert copy_local(job, journal_dir=flushes / "1", workers=1).proved
    shutil.rmtree(area / "source")
    summary = stage(area, "update", flushes=bytes(flushes), alone=True)
    assert summary.missing
    assert summary.problems() == [f"{area}/source: no such file or directory"]


# --- what runs that were killed have begun ----------------------------------------------------------------


def killed_in(area: Path, *below: str) -> Path:
    """A temporary name that a run has left which was killed while it wrote below the source."""
    for name in below:
        write(area / "source" / name / "f", "x")
    transfer = coordinator(area, "n1", durable=True)
    while (work := next_work(transfer, "n1")["work"])["kind"] != "copy":
        pass
    token = token_of(area)
    place = area / "target" / below[0]
    place.mkdir(parents=True)
    left = place / f".beeond-ctl.{token}.{work['tag']}.0"
    left.write_text("half")
    kill(transfer)
    return left


@pytest.mark.parametrize("flags", [(), ("metadata-only",)])
def test_what_a_killed_run_left_goes_although_the_source_has_no_such_directory_any_more(
    area: Path, flags: tuple[str, ...]
) -> None:
    left = killed_in(area, "checkpoint/1", "checkpoint/2")
    shutil.rmtree(area / "source/checkpoint")
    block(area)
    assert not stage(area, *flags, durable=True).proved
    assert not left.exists()


def test_it_goes_although_the_run_after_it_began_anew_and_was_killed_too(area: Path) -> None:
    left = killed_in(area, "gone")
    shutil.rmtree(area / "source/gone")
    transfer = coordinator(area, "n1", durable=True, live=True)  # for which the journal is worth nothing
    next_work(transfer, "n1")
    kill(transfer)
    assert stage(area, live=True, durable=True).proved
    assert not left.exists()
    assert not (area / "target/gone/f").exists()


@pytest.mark.root
def test_what_cannot_be_looked_into_any_more_keeps_nothing_from_being_proved(area: Path) -> None:
    left = killed_in(area, "gone")
    shutil.rmtree(area / "source/gone")
    left.parent.chmod(0o700)  # root's, as another user's
    write(area / "source/kept", "x")
    give(area, "source")
    os.chown(area / "target", USER.uid, USER.gid)
    assert stage(area, user=USER, durable=True).proved
    assert left.exists()


@pytest.mark.parametrize("text", ["not-json", '"abc"', '{"a":1}', "[1]", "[[[]]]"])
def test_a_record_that_is_none_is_passed_over(area: Path, text: str) -> None:
    killed_in(area, "gone")
    (path,) = (area / "journal").glob("*.journal")
    journal = Journal(path)
    list(journal.read())
    journal.append(("dirs", text))
    journal.close()
    assert stage(area, durable=True).proved


def record(kind: str, text: str) -> bytes:
    """As a journal has it."""
    body = f"{kind}\t{text}".encode("latin-1")
    return struct.pack("<II", len(body), zlib.crc32(body)) + body


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *(
            ("header", text)
            for text in ("[]", "null", '{"version":', '{"version":3}', '{"token":"../../ab"}', "\xff")
        ),
        ("header", '{"token":["0","1","2","3","4","5","6","7"]}'),
        ("mode", "zz"),
        ("mode", "-7"),
        ("mode", "77777"),
        ("dirs", "\xff"),
        ("dirs", '["a"]\n'),
        ("dirs", '["a"]\tx'),
    ],
)
def test_a_record_that_nobody_has_written_ends_the_journal_as_a_damaged_one_does(
    area: Path, kind: str, text: str
) -> None:
    for name in "abc":
        write(area / "source" / name, name)
    kill(coordinator(area, "n1", durable=True))
    (path,) = (area / "journal").glob("*.journal")
    whole = path.read_bytes()
    path.write_bytes(whole + record(kind, text) + whole)
    kill(coordinator(area, "n1", durable=True))
    assert path.read_bytes()[len(whole) :].count(b"header") == 0  # and it went on where the damage was
    assert path.read_bytes().startswith(whole)
    assert_copied(area, stage(area, durable=True))


@pytest.mark.parametrize("text", ["[]", '{"version":3,"token":"../../../../x"}'])
def test_a_journal_that_begins_with_what_is_no_header_is_worth_nothing(area: Path, text: str) -> None:
    write(area / "source/f", "x")
    assert stage(area, durable=True).proved
    (path,) = (area / "journal").glob("*.journal")
    path.write_bytes(record("header", text) + path.read_bytes())
    assert stage(area, durable=True).copied == 1
    assert len(token_of(area)) == 8


def test_directories_are_on_record_once_for_each_batch_of_them(area: Path) -> None:
    for name in ("a", "b"):
        (area / "source" / name).mkdir(parents=True)
        for number in range(6000):
            (area / "source" / name / f"f{number}").touch()
    transfer = coordinator(area, "n1")
    while "work" in transfer.take("n1") or not transfer.progress().scanned:
        transfer.wait(0.05)
    kill(transfer)
    (path,) = (area / "journal").glob("*.journal")
    journal = Journal(path)
    dirs = [text for kind, text in journal.read() if kind == "dirs"]
    journal.close()
    assert len(dirs) == len(set(dirs)) > 0


def test_a_directory_that_only_the_destination_has_keeps_its_mode(area: Path) -> None:
    left = killed_in(area, "gone")
    shutil.rmtree(area / "source/gone")
    left.parent.chmod(0o555)
    assert stage(area, durable=True).proved
    assert mode(left.parent) == 0o555


def test_what_was_never_there_is_not_made_to_be_cleaned(area: Path) -> None:
    left = killed_in(area, "gone", "other")
    shutil.rmtree(area / "source/gone")
    shutil.rmtree(left.parent)
    shutil.rmtree(area / "source/other")
    write(area / "source/kept", "x")
    assert stage(area, durable=True).proved
    assert os.listdir(area / "target") == ["kept"]


def test_what_a_killed_flush_left_goes_with_its_directory_gone(area: Path) -> None:
    flushes = area / ".beeond-flush"
    (flushes / "1").mkdir(parents=True)
    write(area / "source/d/f", "x")
    write(area / "source/e/f", "x")
    part = Job(
        bytes(area / "source"), bytes(area / "target"), (), True, flushes=bytes(flushes), live=True, only=b"d"
    )
    assert copy_local(part, journal_dir=flushes / "1", workers=1).proved
    (journal,) = flushes.rglob("*.journal")
    token = journal.read_bytes().partition(b'"token":"')[2][:8].decode()
    os.truncate(journal, journal.stat().st_size - 7)  # the record that it ended in order
    left = area / "target/d" / f".beeond-ctl.{token}.1.2.3"
    left.write_text("half")
    shutil.rmtree(area / "source/d")
    assert stage(area, flushes=bytes(flushes), alone=True).proved
    assert not left.exists()


# --- the destination's own mode ---------------------------------------------------------------------------


def give(area: Path, *which: str) -> None:
    places = [area / name for name in which or ("source", "target")]
    subprocess.run(["chown", "-R", f"{USER.uid}:{USER.gid}", *places], check=True)


@pytest.mark.root
@pytest.mark.parametrize("closed", [0o555, 0o400, 0o300, 0o200, 0o100, 0])
def test_a_destination_that_was_there_has_its_mode_again(area: Path, closed: int) -> None:
    (area / "source").rmdir()
    trees.build(bytes(area / "source"), 7)
    (area / "target").mkdir(mode=0o555)
    give(area)
    (area / "target").chmod(closed)
    assert stage(area, user=USER).proved
    assert mode(area / "target") == closed
    assert len(os.listdir(area / "target")) == len(os.listdir(area / "source")) > 0


@pytest.mark.root
def test_what_is_closed_and_another_users_is_left_alone(area: Path) -> None:
    write(area / "source/f", "x")
    (area / "target").mkdir()
    give(area, "source")
    for owner, closed in ((0, 0o711), (USER.uid + 1, 0)):
        os.chown(area / "target", owner, owner)
        (area / "target").chmod(closed)
        assert "permission denied" in stage(area, user=USER).refused
        assert mode(area / "target") == closed


@pytest.mark.root
def test_one_that_is_closed_is_no_hindrance_where_all_or_nothing_is_copied(area: Path) -> None:
    write(area / "source/f", "x")
    write(area / "target/old", "x")
    give(area)
    (area / "target").chmod(0o300)
    assert stage(area, user=USER, all_or_nothing=True).proved
    assert mode(area / "target") == 0o300


@pytest.mark.root
@pytest.mark.parametrize("closed", [0o300, 0])
def test_delete_in_a_closed_destination_is_asked_for(area: Path, closed: int) -> None:
    write(area / "source/f", "x")
    write(area / "target/old", "x")
    give(area)
    (area / "target").chmod(closed)
    job = Job(bytes(area / "source"), bytes(area / "target"), ("delete",))
    seen = preview.look_as(job, USER, within_s=20)
    assert (seen["unread"], seen.get("refused")) == (1, None)
    os.chown(area / "target", 0, 0)
    assert "permission denied" in preview.look_as(job, USER, within_s=20)["refused"]


def open_up_and_end(area: Path, closed: int = 0o500) -> None:
    """A run that ends when it has made a closed destination writable."""
    write(area / "source/f", "x")
    (area / "target").mkdir()
    give(area)
    (area / "target").chmod(closed)
    transfer = coordinator(area, "n1", user=USER)
    next_work(transfer, "n1")
    kill(transfer)


@pytest.mark.root
@pytest.mark.parametrize("closed", [0o500, 0o300, 0])
def test_it_has_it_again_although_the_run_that_opened_it_up_was_killed(area: Path, closed: int) -> None:
    open_up_and_end(area, closed)
    assert mode(area / "target") == 0o700
    assert stage(area, user=USER).proved
    assert mode(area / "target") == closed
    (area / "target").chmod(0o750)
    assert stage(area, user=USER).proved
    assert mode(area / "target") == 0o750


@pytest.mark.root
def test_a_mode_that_somebody_has_given_it_since_stays(area: Path) -> None:
    open_up_and_end(area)
    (area / "target").chmod(0o2770)
    assert stage(area, user=USER).proved
    assert mode(area / "target") == 0o2770


@pytest.mark.root
@pytest.mark.parametrize("made", [False, True])
def test_the_stage_out_gives_it_the_mode_that_a_killed_flush_took(area: Path, made: bool) -> None:
    flushes = area / ".beeond-flush"
    (flushes / "1").mkdir(parents=True)
    write(area / "source/d/f", "x")
    if made:
        (area / "source").chmod(0o555)
    else:
        (area / "target").mkdir()
    for path in (flushes, area / "source", *([] if made else [area / "target"])):
        subprocess.run(["chown", "-R", f"{USER.uid}:{USER.gid}", path], check=True)
    if not made:
        (area / "target").chmod(0o555)
    area.chmod(0o777)
    part = Job(
        bytes(area / "source"), bytes(area / "target"), (), True, flushes=bytes(flushes), live=True, only=b"d"
    )
    assert copy_local(part, USER, journal_dir=flushes / "1", workers=1).proved
    (journal,) = flushes.rglob("*.journal")
    os.chown(journal, USER.uid, USER.gid)
    if made:
        (area / "source").chmod(0o755)
    else:  # as if it had been killed: no record that it ended in order, and still opened up
        os.truncate(journal, journal.stat().st_size - 7)
        (area / "target").chmod(0o755)
    assert stage(area, user=USER, flushes=bytes(flushes), alone=True).proved
    assert mode(area / "target") == (0o755 if made else 0o555)


def test_a_destination_that_was_made_has_the_sources_mode_although_the_next_run_began_anew(
    area: Path,
) -> None:
    write(area / "source/f", "x")
    (area / "source").chmod(0o711)
    for flags in (("metadata-only",), ()):
        transfer = coordinator(area, "n1", flags=flags)
        next_work(transfer, "n1")
        kill(transfer)
    assert stage(area).proved
    assert mode(area / "target") == 0o711
