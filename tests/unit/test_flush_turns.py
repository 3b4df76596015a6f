"""Flushes of the same on several nodes take turns, also where locks do not reach from node to node."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from beeond_ctl import flushes
from beeond_ctl.cli import flush, stage
from beeond_ctl.errors import NodeError
from beeond_ctl.staging import local
from beeond_ctl.staging.job import Job
from beeond_ctl.staging.transfer import Progress, Summary
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NODE = """
import os, sys, time
from pathlib import Path
from beeond_ctl.cli import flush, stage
from beeond_ctl.staging import local

area, node, hold_s = Path(sys.argv[1]), os.environ["SLURMD_NODENAME"], float(sys.argv[2])
locked, copy_local = stage.locked, local.copy_local

def note(what):
    with open(area / "log", "a") as file:
        file.write(f"{what} {node}\\n")

def copy(*args, **options):
    note("begins")
    while (area / f"hold-{node}").exists():
        time.sleep(0.02)
    time.sleep(hold_s)
    summary = copy_local(*args, **options)
    note("ends")
    return summary

stage.locked = lambda place: locked(area / "locks" / node)  # no other node sees it
local.copy_local = copy
sys.exit(flush.flush.main(["--wait", "--here", "ck", str(area / "copy")], standalone_mode=False))
"""


@contextmanager
def on_node(area: Path, name: str, hold_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """`flush --wait` of inst/ck on a node whose locks end there; its copying takes `hold_s` longer."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("BEEOND", "SLURM"))}
    child = subprocess.Popen(
        [sys.executable, "-c", NODE, str(area), str(hold_s)],
        env={**clean, "BEEOND": str(area / "inst"), "SLURMD_NODENAME": name},
        stdout=subprocess.DEVNULL,
        stderr=(area / f"said-{name}").open("wb"),
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def area(tmp_path: Path) -> Path:
    for name in ("inst/ck", "locks"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "inst/ck/file").write_text("some")
    (tmp_path / "log").touch()
    return tmp_path


def log(area: Path) -> list[str]:
    return (area / "log").read_text().splitlines()


def waits(area: Path, name: str) -> bool:
    return "waits for the flush of" in (area / f"said-{name}").read_text()


def test_of_several_nodes_that_wait_for_one_flush_one_begins_at_a_time(area: Path) -> None:
    others = ["b", "c", "d", "e"]
    (area / "hold-a").touch()
    with on_node(area, "a", 0.0) as first:
        wait_for(lambda: log(area) == ["begins a"], 20)
        with (
            on_node(area, "b", 0.4) as b, on_node(area, "c", 0.4) as c,
            on_node(area, "d", 0.4) as d, on_node(area, "e", 0.4) as e,
        ):  # fmt: skip
            wait_for(lambda: all(waits(area, name) for name in others), 20)
            assert log(area) == ["begins a"]
            (area / "hold-a").unlink()
            assert [child.wait(240) for child in (first, b, c, d, e)] == [0] * 5
    found = log(area)
    order = [line.split()[1] for line in found[::2]]
    assert found == [line for name in order for line in (f"begins {name}", f"ends {name}")]
    assert sorted(order) == ["a", *others]
    (place,) = (area / "inst" / flushes.NAME).iterdir()
    names = sorted(os.listdir(place))
    assert names[0].endswith(".journal")  # stage-out looks for it among the first names
    assert names[1:] == ["status.json", "turn.10"]
    assert [status["state"] for status in flushes.read_all(str(area / "inst"))] == ["proved"]


@pytest.mark.parametrize(("number", "left"), [(signal.SIGTERM, "turn.2"), (signal.SIGKILL, "turn.1")])
def test_after_a_flush_that_was_ended_the_next_begins_at_once_where_that_is_known(
    area: Path, number: signal.Signals, left: str
) -> None:
    """In order: on all nodes. Killed: on its own, where the lock tells; the others wait for what it last said."""
    with on_node(area, "a", 60.0) as killed:
        wait_for(lambda: log(area) == ["begins a"], 20)
        killed.send_signal(number)
        killed.wait(80)
    (place,) = (area / "inst" / flushes.NAME).iterdir()
    assert [name for name in os.listdir(place) if name.startswith("turn.")] == [left]
    if number == signal.SIGKILL:
        with on_node(area, "b", 0.0) as other:
            wait_for(lambda: waits(area, "b"), 20)
            time.sleep(1)
            assert other.poll() is None
    with on_node(area, "a" if number == signal.SIGKILL else "b", 0.0) as following:
        assert following.wait(80) == 0
    assert len(log(area)) == 3


def killed_on(directory: Path, node: str, run: str) -> None:
    number = flushes.take_turn(directory, node, run)
    assert number is not None
    assert number % 2


def age(directory: Path, seconds: float) -> None:
    """Let this time pass for what is in `directory`."""
    status = flushes.read(directory)
    if status is not None:
        beat = status["beat"] - seconds
        (directory / "status.json").write_text(json.dumps({**status, "state": "running", "beat": beat}))
    for path in (*directory.iterdir(), directory):
        when = path.stat().st_mtime - seconds
        os.utime(path, (when, when))


@pytest.mark.parametrize(
    "left", ["nothing", "no status", "empty", "running", "another's status", "unreadable"]
)
def test_a_turn_of_a_killed_flush_is_taken_over_by_exactly_one(tmp_path: Path, left: str) -> None:
    if left == "another's status":
        flushes.write(tmp_path, {"state": "running", "run": "before"})
    if left != "nothing":
        killed_on(tmp_path, "a", "killed")
        if left == "empty":
            (tmp_path / "turn.1").write_text("")
        elif left == "running":
            flushes.write(tmp_path, {"state": "running", "run": "killed"})
        elif left == "unreadable":
            (tmp_path / "status.json").write_text("[")
        assert flushes.take_turn(tmp_path, "b", "b") is None
        age(tmp_path, flushes.LOST_S / 2)  # for writing it down, a disk may need the rest
        assert flushes.take_turn(tmp_path, "b", "b") is None
        age(tmp_path, flushes.LOST_S / 2 + 1)
    for each in range(30):
        got: list[int | None] = []
        start = threading.Barrier(8)

        def take(name: str, start: threading.Barrier = start, got: list[int | None] = got) -> None:
            start.wait()
            got.append(flushes.take_turn(tmp_path, name, name))

        threads = [threading.Thread(target=take, args=(f"{each}-{node}",)) for node in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 8
        (number,) = {number for number in got if number is not None}
        assert got.count(None) == 7
        age(tmp_path, 2 * flushes.LOST_S)  # it was killed as well
        assert os.listdir(tmp_path).count(f"turn.{number}") == 1


@pytest.mark.parametrize("end", ["killed", "in order", "runs"])
def test_who_looked_before_another_took_over_does_not_begin_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    killed_on(tmp_path, "a", "killed")
    age(tmp_path, 2 * flushes.LOST_S)
    look = flushes._is_over
    taken = []

    def slow(directory: Path, number: int, node: str) -> bool:
        found = look(directory, number, node)
        monkeypatch.setattr(flushes, "_is_over", look)
        taken.append(flushes.take_turn(directory, "quick", "first"))
        assert taken[-1] is not None
        if end == "in order":
            flushes.leave_turn(directory, taken[-1])
        if end != "runs":
            age(tmp_path, 2 * flushes.LOST_S)
            taken.append(flushes.take_turn(directory, "quick", "second"))
        return found

    monkeypatch.setattr(flushes, "_is_over", slow)
    assert flushes.take_turn(tmp_path, "slow", "slow") is None
    assert None not in taken
    assert os.listdir(tmp_path) == [f"turn.{taken[-1]}"]


def test_a_turn_counts_while_its_status_says_that_it_runs_and_no_longer(tmp_path: Path) -> None:
    killed_on(tmp_path, "a", "long")
    hour_ago = time.time() - 3600
    flushes.write(tmp_path, {"state": "running", "run": "long"})
    for path in (tmp_path / "turn.1", tmp_path):
        os.utime(path, (hour_ago, hour_ago))
    assert flushes.take_turn(tmp_path, "b", "b") is None
    flushes.write(tmp_path, {"state": "proved", "run": "long"})
    assert flushes.take_turn(tmp_path, "b", "b") == 3


def test_a_flush_that_was_taken_for_killed_stops_and_leaves_the_others_status_alone(tmp_path: Path) -> None:
    job, lock = Job(b"/source", b"/target"), os.open(os.devnull, os.O_RDONLY)
    number = flushes.take_turn(tmp_path, "a", "stalled")
    assert number is not None
    turn = flush._Turn(tmp_path, number, lock)
    note = flush._Note(job, turn, "stalled")
    note.began()
    assert flushes.take_turn(tmp_path, "a", "next") == 3  # the lock of its node was lost
    flushes.write(tmp_path, {"state": "running", "run": "next"})
    note.failed("stalled")
    with pytest.raises(OSError, match="taken over"):
        note.began()
    turn.leave()
    status = flushes.read(tmp_path)
    assert status is not None
    assert (status["state"], status["run"]) == ("running", "next")
    assert flushes.take_turn(tmp_path, "b", "b") is None


def test_a_lock_that_a_dying_file_system_will_not_close_hides_nothing(
    area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, close = stage.locked, os.close
    held = []

    def lock(place: Path) -> int | None:
        held.append(locked(place))
        return held[-1]

    def dies(fd: int) -> None:
        close(fd)
        if fd in held:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    def copy(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "the journal is gone")

    monkeypatch.setenv("BEEOND", str(area / "inst"))
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(stage, "locked", lock)
    monkeypatch.setattr(os, "close", dies)
    monkeypatch.setattr(local, "copy_local", copy)
    with pytest.raises(NodeError, match=r"flush has stopped: .*the journal is gone; to go on: "):
        flush.flush.main(["--wait", "--here", "ck", str(area / "copy")], standalone_mode=False)
    assert held


def test_the_counters_of_a_flush_that_has_ended_are_those_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushes, "BEAT_S", 600)
    number = flushes.take_turn(tmp_path, "a", "run")
    assert number is not None
    turn = flush._Turn(tmp_path, number, os.open(os.devnull, os.O_RDONLY))
    note = flush._Note(Job(b"/source", b"/target"), turn, "run")
    note.began()
    note._written_s = -math.inf
    tell = note.also(lambda _: None)
    for done in (0, 5):  # the second comes too soon to be written by itself
        tell(Progress(True, done, 5, done * 10, 50, 0, 1.0, 0.0, {"a": done * 10}))
    before = flushes.read(tmp_path)
    note.ended(Summary(b"/source", b"/target", proved=True, copied=5, bytes=50, seconds=1.5))
    turn.leave()
    after = flushes.read(tmp_path)
    assert before is not None
    assert after is not None
    assert (before["state"], before["entries_done"]) == ("running", 0)
    assert (after["state"], after["entries_done"], after["bytes_done"], after["nodes"]) == (
        "proved", 5, 50, {"a": 50},
    )  # fmt: skip
    assert (after["copied"], after["bytes"], after["seconds"]) == (5, 50, 1.5)


@pytest.mark.parametrize(
    ("staged_out", "words", "rest"),
    [
        (("ck", "copy"), ["ck"], "stage-out does the rest"),
        ((".", "all"), ["ck", "all/ck"], "stage-out does the rest"),
        ((".", "all"), ["ck/file", "all/ck/"], "stage-out does the rest"),
        (("ck", "copy"), ["ck", "other"], "nothing else copies it there; to go on: beeond-ctl flush --wait --here "),
        (("out", "all"), ["ck", "all/ck"], "nothing else copies it there; to go on: beeond-ctl flush --wait --here "),
        (("ck/file", "all"), ["ck", "all"], "nothing else copies it there; to go on: beeond-ctl flush --wait --here "),
    ],
)  # fmt: skip
def test_a_flush_that_failed_in_the_background_says_who_copies_the_rest(
    area: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    staged_out: tuple[str, str], words: list[str], rest: str,
) -> None:  # fmt: skip
    source, target = staged_out
    (area / "all/ck").mkdir(parents=True)
    monkeypatch.chdir(area)
    monkeypatch.setenv("BEEOND", str(area / "inst"))
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(flush, "_transfers", lambda _: [(source, str(area / target), ())])
    monkeypatch.setattr(local, "copy_local", lambda *_, **__: Summary(b"/s", b"/t", cancelled="full"))
    assert flush.flush.main(["--run", "1", "--here", *words], standalone_mode=False) == 1
    said = capsys.readouterr().err
    assert f": stopped: full; {rest}" in said
