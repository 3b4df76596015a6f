"""What several nodes do of one transfer: whether they see the same, what comes late, and what is handed on."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from typing import TYPE_CHECKING

import pytest
import xxhash

from beeond_ctl.staging import copier as copier_module
from beeond_ctl.staging import scan, wire
from beeond_ctl.staging.causes import StagingError
from beeond_ctl.staging.coordinator import Coordinator
from beeond_ctl.staging.job import Identity
from beeond_ctl.staging.journal import Journal
from beeond_ctl.staging.proof import fingerprint
from beeond_ctl.staging.wire import PIECE
from beeond_ctl.staging.worker import Copier
from tests.faults import trees
from tests.unit.copying import (
    SCAN,
    assert_copied,
    coordinator,
    finish,
    holey,
    kill,
    next_work,
    take_until,
    worker,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any


USER = Identity(65534, 65534, (65534,))
BOOT_ID = "/proc/sys/kernel/random/boot_id"


# --- directories that only look the same -------------------------------------------------------------------


def mount(path: Path) -> None:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", path], check=True)


def elsewhere(area: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> Copier:
    """A copier of another node: in a mount namespace of its own, where `command` was run."""
    program = area / "elsewhere"
    program.write_text(
        f"#!/bin/sh\nexec unshare -m --propagation private "
        f'sh -e -c \'{command}\nexec {sys.executable} "$@"\' sh "$@"\n'
    )
    program.chmod(0o755)
    copier = Copier(None)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        copier.start()
    return copier


@pytest.mark.root
@pytest.mark.parametrize("own", ["destination", "source", "source on another kernel"])
def test_a_node_with_a_directory_of_its_own_copies_nothing(
    area: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    """The roots of all file systems in memory have the same number."""
    mount(area / "target")
    mount(area / "source")
    (area / "source" / "file").write_text("the first node's")
    fill = f"mount -t tmpfs none {area}/{'target' if own == 'destination' else 'source'}\n"
    if own == "source on another kernel":
        fill = f"echo another > {area}/boot_id\nmount --bind {area}/boot_id {BOOT_ID}\n"
    elif own == "source":
        fill += f"echo other > {area}/source/file\n"
    transfer = coordinator(area, "n1", "n2")
    work = next_work(transfer, "n2")["work"]
    other = elsewhere(area, monkeypatch, fill)
    result = other.run(work)
    other.close()
    assert own.split()[0] in result.get("unusable", ""), result
    transfer.report("n2", result)
    assert "wait" in transfer.take("n2")  # who went on to the next meeting would be alone there
    summary = finish(transfer, "n1")
    assert summary.proved, summary.problems()
    assert trees.files_in(bytes(area / "target")) == {b"file": b"the first node's"}
    assert any(line.startswith("n2 left") for line in summary.remarks())


def test_a_node_on_which_the_source_is_not_mounted_is_told_by_its_own_file_system(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "name").touch()
    (tmp_path / "target").chmod(0o555)
    with pytest.raises(StagingError, match="another directory as the source"):
        worker(tmp_path, marker="name")
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o555  # that of another stays as it is


def test_the_name_is_not_for_delete(area: Path) -> None:
    trees.build(bytes(area / "source"), 16)
    (area / "target").mkdir()
    (area / "target" / "old").touch()
    summary = finish(coordinator(area, "n1", "n2", flags=("delete",)), "n1", "n2")
    assert summary.proved, summary.problems()
    assert (summary.deleted.count, summary.deleted.examples) == (1, ("old",))
    assert trees.leftovers(bytes(area / "target")) == []


@pytest.mark.root
def test_where_the_destination_takes_no_name_only_the_first_node_copies(
    area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory of another user, in which the user has one."""
    (area / "source" / "dir").mkdir(parents=True)
    (area / "source" / "dir" / "file").write_text("x")
    mount(area / "target")
    (area / "target" / "dir").mkdir()
    (area / "target").chmod(0o755)
    os.chown(area / "target" / "dir", USER.uid, USER.gid)
    transfer = coordinator(area, "n1", "n2", user=USER)
    work = next_work(transfer, "n2")["work"]
    other = elsewhere(area, monkeypatch, f"mount -t tmpfs none {area}/target")
    transfer.report("n2", other.run(work))
    other.close()
    assert "wait" in transfer.take("n2")  # who went on to the next meeting would be alone there
    assert finish(transfer, "n1", user=USER).proved
    assert (area / "target" / "dir" / "file").read_text() == "x"


@pytest.mark.root
@pytest.mark.parametrize(("there", "mode"), [(False, 0o755), (False, 0o500), (True, 0o755)])
def test_the_name_that_nodes_know_the_destination_by_is_gone_at_the_end(
    area: Path, mode: int, there: bool
) -> None:
    """And leaves no trace in the directory's times, nor in a mode that lets nobody write."""
    area.chmod(0o777)
    (area / "source" / "dir").mkdir(parents=True)
    (area / "source" / "dir" / "file").write_text("x")
    (area / "source").chmod(mode)
    if there:
        (area / "target" / "dir").mkdir(parents=True)
    for path in [path for path in (area / "source", area / "target") if path.exists()]:
        os.utime(path, ns=(10**18, 10**18))
        subprocess.run(["chown", "-hR", f"{USER.uid}:{USER.gid}", path], check=True)
    summary = finish(coordinator(area, "n1", "n2", user=USER), "n1", "n2", user=USER)
    assert_copied(area, summary)


def test_the_name_that_a_killed_run_left_is_removed_by_the_next(area: Path, copier: Copier) -> None:
    trees.build(bytes(area / "source"), 13)
    transfer = coordinator(area, "n1", "n2")
    next_work(transfer, "n1")
    kill(transfer)
    assert len(trees.leftovers(bytes(area / "target"))) == 1
    assert_copied(area, finish(coordinator(area, "n1", "n2"), "n1", "n2"))


def test_cleaning_leaves_the_name_to_copiers_that_come_later(area: Path, copier: Copier) -> None:
    trees.build(bytes(area / "source"), 15)
    transfer = coordinator(area, "n1", "n2")
    next_work(transfer, "n1")
    kill(transfer)
    transfer = coordinator(area, "n1", "n2")
    cleaning = take_until(transfer, "n1", copier, "clean")
    transfer.report("n1", copier.run(cleaning))
    late = Copier(None)
    result = late.run(take_until(transfer, "n1", copier, "finish"))
    late.close()
    transfer.report("n1", result)
    assert "unusable" not in result
    assert_copied(area, finish(transfer, "n1", "n2"))


def test_what_another_copier_has_cleaned_meanwhile_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = worker(tmp_path, tokens=[])
    monkeypatch.setattr(os, "listdir", lambda _: [".beeond-ctl.0.gone"])
    result = copier_module._Result()
    made.clean(["", ""], result)
    assert (result.skipped, result.failures) == (2, [])


def test_a_node_alone_needs_no_name(area: Path) -> None:
    trees.build(bytes(area / "source"), 14)
    transfer = coordinator(area, "n1")
    next_work(transfer, "n1")
    assert trees.leftovers(bytes(area / "target")) == []
    kill(transfer)


# --- what comes late ---------------------------------------------------------------------------------------


def test_what_a_lost_node_has_open_is_not_what_gets_the_name(area: Path, copier: Copier) -> None:
    holey(area / "source" / "big")
    transfer = coordinator(area, "n1", "n2")
    transfer.report("n1", copier.run(take_until(transfer, "n1", copier, "piece", 0)))
    work = next_work(transfer, "n2")["work"]
    assert work["kind"] == "piece"
    late = os.open(area / "target" / wire.loads(work["fields"][0])["temp"], os.O_RDWR)
    transfer.node_lost("n2")
    summary = finish(transfer, "n1")
    os.pwrite(late, b"late", PIECE)
    assert_copied(area, summary)
    assert summary.copied == 1
    late_info = os.fstat(late)
    os.close(late)
    assert late_info.st_nlink == 0
    progress = transfer.progress()
    assert progress.bytes_done == progress.bytes_total == 3 * PIECE + 4096  # a piece was copied in vain
    assert trees.leftovers(bytes(area / "target")) == []


def test_a_file_that_a_lost_node_has_placed_is_there(area: Path, copier: Copier) -> None:
    holey(area / "source" / "big")
    transfer = coordinator(area, "n1", "n2")
    work = take_until(transfer, "n1", copier, "place")
    transfer.node_lost("n1")
    copier.run(work)
    summary = finish(transfer, "n2")
    assert_copied(area, summary)
    assert (summary.copied, summary.failed) == (1, 0)


@pytest.mark.parametrize("resumed", [False, True])
def test_another_file_of_that_size_and_time_is_not_taken_for_the_copy(
    area: Path, copier: Copier, resumed: bool
) -> None:
    holey(area / "source" / "big")
    transfer = coordinator(area, "n1")
    if resumed:
        take_until(transfer, "n1", copier, "piece", 3)
        kill(transfer)
        transfer = coordinator(area, "n1")
    work = take_until(transfer, "n1", copier, "place")
    (area / "target" / "big").write_text("old")
    os.truncate(area / "target" / "big", 3 * PIECE + 4096)
    when = (area / "source" / "big").stat().st_mtime_ns
    os.utime(area / "target" / "big", ns=(when, when))
    (area / "target" / wire.loads(work["fields"][0])["temp"]).unlink()  # as another transfer's +delete may
    transfer.report("n1", copier.run(work))
    summary = finish(transfer, "n1")
    assert not summary.proved
    assert (summary.copied, summary.failed) == (0, 1)


# --- what a node says of which one copier cannot work ----------------------------------------------------


def unusable(work: dict[str, Any]) -> dict[str, Any]:
    return {"id": work["id"], "attempt": work["attempt"], "unusable": "test"}


def two_pieces(area: Path, copier: Copier) -> tuple[Coordinator, list[dict[str, Any]]]:
    """A transfer to two nodes of a file in four pieces, of which the second node has two."""
    holey(area / "source" / "big")
    transfer = coordinator(area, "n1", "n2")
    transfer.report("n1", copier.run(take_until(transfer, "n1", copier, "piece", 0)))
    works = [next_work(transfer, "n2")["work"] for _ in range(2)]
    assert [work["kind"] for work in works] == ["piece", "piece"]
    return transfer, works


def test_other_copiers_of_a_node_that_is_set_apart_do_what_they_have(area: Path, copier: Copier) -> None:
    transfer, (one, other) = two_pieces(area, copier)
    transfer.report("n2", unusable(one))
    assert "wait" in transfer.take("n2")
    again = next_work(transfer, "n1")["work"]
    assert again["fields"] == one["fields"]  # nothing was opened
    transfer.report("n1", copier.run(again))
    while "work" in (answer := transfer.take("n1")):
        assert answer["work"]["fields"] not in (one["fields"], other["fields"])
        transfer.report("n1", copier.run(answer["work"]))
    assert "wait" in answer
    transfer.report("n2", copier.run(other))
    kinds = []
    while "done" not in (answer := next_work(transfer, "n1")):
        kinds.append(answer["work"]["kind"])
        transfer.report("n1", copier.run(answer["work"]))
    assert "clean" not in kinds
    transfer.close()
    assert_copied(area, transfer.summary())
    progress = transfer.progress()
    assert progress.bytes_done == progress.bytes_total == 3 * PIECE + 4096


def test_what_a_node_that_was_set_apart_had_is_done_by_others_once_it_is_lost(
    area: Path, copier: Copier
) -> None:
    transfer, (one, other) = two_pieces(area, copier)
    transfer.report("n2", unusable(one))
    late = os.open(area / "target" / wire.loads(other["fields"][0])["temp"], os.O_RDWR)
    transfer.node_lost("n2")
    summary = finish(transfer, "n1")
    os.pwrite(late, b"late", PIECE)
    os.close(late)
    assert_copied(area, summary)
    assert sum("n2" in line for line in summary.remarks()) == 1


def test_the_last_node_is_set_apart_once_all_its_copiers_have_answered(area: Path, copier: Copier) -> None:
    holey(area / "source" / "big")
    transfer = coordinator(area, "n1")
    transfer.report("n1", copier.run(take_until(transfer, "n1", copier, "piece", 0)))
    one, other = [next_work(transfer, "n1")["work"] for _ in range(2)]
    transfer.report("n1", unusable(one))
    assert not transfer.finished()
    transfer.report("n1", copier.run(other))
    assert transfer.finished()
    transfer.close()
    summary = transfer.summary()
    assert not summary.proved
    assert (summary.failed, summary.problems()) == (0, ["stopped: no node is left to copy (n1: test)"])


# --- what is handed on -------------------------------------------------------------------------------------


def test_a_file_of_31_tib_goes_on_with_its_last_piece_and_gets_its_name(area: Path, copier: Copier) -> None:
    """All that is said of its pieces, half a million, has to pass the wire."""
    (area / "source").mkdir()
    with open(area / "source" / "huge", "wb") as file:
        file.truncate(31 << 40)
    transfer = coordinator(area, "n1")
    temp = wire.loads(take_until(transfer, "n1", copier, "piece")["fields"][0])["temp"]
    kill(transfer)
    info, zeros = (area / "source" / "huge").stat(), xxhash.xxh3_128_hexdigest(bytes(PIECE))
    mark = fingerprint("huge", info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
    (path,) = (area / "journal").glob("*.journal")
    journal = Journal(path)
    assert list(journal.read())
    count = (31 << 40) // PIECE
    journal.append(*(("piece", f'[{mark},"{temp}",{index},"{zeros}"]') for index in range(count - 1)))
    journal.close()
    transfer = coordinator(area, "n1")
    last = take_until(transfer, "n1", copier, "piece")
    assert last["fields"][1] == str(count - 1)
    assert all(len(field) < wire.MAX_LINE // 1000 for field in last["fields"])
    transfer.report("n1", copier.run(last))
    placing = take_until(transfer, "n1", copier, "place")
    assert all(len(field) < wire.MAX_LINE // 1000 for field in placing["fields"])
    transfer.report("n1", copier.run(placing))
    summary = finish(transfer, "n1")
    assert summary.proved, summary.problems()
    assert summary.bytes == PIECE
    copy = (area / "target" / "huge").stat()
    assert (copy.st_size, copy.st_mtime_ns) == (info.st_size, info.st_mtime_ns)


def test_what_is_known_of_the_largest_file_is_said_in_lines_that_pass(
    area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, ...]] = []
    monkeypatch.setattr(scan, "_say", lambda *fields: said.append(fields))
    monkeypatch.setattr(scan._Scan, "_has_pieces", lambda *_: 7)
    config = {**SCAN, "run": 2, "source": str(area), "destination": str(area)}
    count = wire.MOST_PIECES
    mark = fingerprint("huge", count * PIECE, 1, 1, 1)
    have = dict.fromkeys(range(1, count), "ab" * 16)
    walk = scan._Scan(config, scan.Proofs(array("Q"), {mark: {".beeond-ctl.0.p1": have}}))
    walk.big("", "", ["huge", count * PIECE, 1, 1, 1], 1)
    assert max(sum(map(len, fields)) for fields in said) < wire.MAX_LINE // 4
    transfer = coordinator(area, "n1")
    for fields in said:
        transfer._heard([*fields])
    assert [work.index for work in transfer._queue] == [0]
    kill(transfer)


def test_a_large_directory_of_which_everything_is_there_is_seen_to_go_on(
    area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (area / "source").mkdir()
    for number in range(5000):
        (area / "source" / f"{number}").touch()
    assert finish(coordinator(area, "n1"), "n1").proved
    heard: list[str] = []
    take_in: Callable[[Coordinator, list[str]], None] = Coordinator._heard

    def listen(transfer: Coordinator, fields: list[str]) -> None:
        heard.append(fields[0])
        take_in(transfer, fields)

    monkeypatch.setattr(Coordinator, "_heard", listen)
    summary = finish(coordinator(area, "n1"), "n1")
    assert (summary.proved, summary.skipped) == (True, 5000)
    assert heard.count("kept") >= 3
