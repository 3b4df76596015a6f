from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from beeond_ctl import events
from beeond_ctl import state as states
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import NodeError
from beeond_ctl.plan import Job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JOB = Job(42, 1000, 1000, "alice")


def made(root: Path) -> states.State:
    state = states.State(JOB, ("n1", "n2"), "n1", '{"v":1}', SiteConfig().model_dump(mode="json"))
    states.create(str(root), state)
    return state


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = made(tmp_path)
    state.phase, state.block, state.ran, state.processes = "ready", 21008, True, {"brick-0": (7, 1234)}
    states.write(str(tmp_path), state)
    assert states.read(str(tmp_path), 42) == state
    assert states.read_all(str(tmp_path)) == [state]
    assert states.read(str(tmp_path), 43) is None
    state.kin = states.Kin(Job(41, 1000, 1000, "alice", 2), ("n3",), ((1, 42, ("n1", "n2")),))
    states.write(str(tmp_path), state)
    assert states.read(str(tmp_path), 42) == state


def test_a_state_is_roots_alone(tmp_path: Path) -> None:
    made(tmp_path)
    directory = states.run_dir(str(tmp_path), 42)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "state.json").stat().st_mode & 0o777 == 0o600


def test_a_run_that_was_never_torn_down_is_not_built_upon(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(NodeError, match="beeond-ctl recover 42"):
        made(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 1}', '{"version": 99}', '{"version": 1, "job": 3}']
)
def test_a_damaged_state_is_an_error_and_never_an_empty_one(tmp_path: Path, text: str) -> None:
    made(tmp_path)
    (states.run_dir(str(tmp_path), 42) / "state.json").write_text(text)
    with pytest.raises(NodeError, match=r"state\.json"):
        states.read(str(tmp_path), 42)


def test_replacing_a_file_leaves_the_old_one_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    states.write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        states.write_atomically(path, "new \udcff")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def _hold(root: str, ready: object, release: object) -> None:
    with states.locked(root, 42, "x"):
        ready.set()  # type: ignore[attr-defined]
        release.wait(30)  # type: ignore[attr-defined]


@contextmanager
def held(root: Path) -> Iterator[int]:
    """The pid of a process that has the lock of job 42."""
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(root), ready, release))
    other.start()
    try:
        assert ready.wait(30)
        assert other.pid
        yield other.pid
    finally:
        other.kill()
        other.join()


def test_one_process_at_a_time_works_on_a_job_of_a_node(tmp_path: Path) -> None:
    with held(tmp_path):
        with pytest.raises(NodeError, match="another beeond-ctl"), states.locked(str(tmp_path), 42, "wait"):
            pass
        with states.locked(str(tmp_path), 43, "x"):
            pass
    with states.locked(str(tmp_path), 42, "x"):  # the lock died with its process
        pass


def lock(root: Path, *, wait_s: float = 0, hung_s: float = math.inf, told: list[str] | None = None) -> None:
    tell = bool if told is None else told.append
    with states.locked(str(root), 42, "x", wait_s=wait_s, hung_s=hung_s, tell=tell):
        pass


def test_who_works_on_a_job_is_named(tmp_path: Path) -> None:
    with (
        held(tmp_path) as pid,
        pytest.raises(NodeError, match=rf"works on it on this node \(.+, pid {pid}\);"),
    ):
        lock(tmp_path)


def test_a_holder_that_can_do_nothing_any_more_is_told_and_one_that_works_is_waited_for(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    with held(tmp_path) as pid:
        began = time.monotonic()
        with pytest.raises(NodeError, match="works on it"):
            lock(tmp_path, wait_s=2, hung_s=0.5, told=told)
        assert time.monotonic() - began >= 2
        assert [f"pid {pid}" in text for text in told] == [True]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(NodeError, match=rf"pid {pid}\) has stood still .*beeond-ctl recover 42$"):
            lock(tmp_path, wait_s=30, hung_s=0.5)


@contextmanager
def small(path: Path) -> Iterator[Path]:
    """A /run of a few hundred KiB."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(path: Path) -> None:
    with open(path, "ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_state_is_replaced_though_somebody_has_filled_the_file_system(tmp_path: Path) -> None:
    with small(tmp_path / "run") as root:
        state = made(root)
        fill(root / "of others")
        for phase in ("staging-out", "unmounting", "wiping"):
            state.phase = phase
            states.write(str(root), state)
            assert states.read(str(root), 42) == state
        fill(root / "of others")
        state.phase = "retained"
        with pytest.raises(NodeError, match=r"state\.json: cannot be written .*beeond-ctl recover 42"):
            states.write(str(root), state)
        found = states.read(str(root), 42)
        assert found
        assert found.phase == "wiping"
        state.job = Job(43, 1000, 1000, "alice")
        with pytest.raises(NodeError, match=r"43/state\.json: cannot be written"):
            states.create(str(root), state)
        assert os.listdir(root / "jobs") == ["42"]  # nothing that says that there had been a job


def test_no_lock_file_is_left_of_a_job_that_left_nothing(tmp_path: Path) -> None:
    with states.locked(str(tmp_path), 42, "x"):
        pass
    assert os.listdir(tmp_path / "locks") == []


def fail(log: events.EventLog) -> None:
    with log.timed("step") as extra:
        extra["files"] = 3
        raise OSError("boom")


def test_events_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    log = events.EventLog(str(tmp_path), 42, "n1")
    log.log("phase", phase="ready")
    with pytest.raises(OSError, match="boom"):
        fail(log)
    path = events.log_path(str(tmp_path), 42)
    with path.open("a") as file:
        file.write('{"t": 1, "ev')
    found = events.read(str(tmp_path), 42)
    assert [event["event"] for event in found] == ["phase", "step"]
    assert (found[1]["files"], found[1]["failed"]) == (3, "boom")
    assert json.loads(path.read_text().splitlines()[0])["node"] == "n1"


def test_a_line_without_end_is_cut_and_says_what_it_did(tmp_path: Path) -> None:
    log = events.EventLog(str(tmp_path), 42, "n1")
    nodes = {f"n{number}": number for number in range(10_000)}
    names = ["é" * 5000] * 5000
    log.log(
        "step", step="stage-out", by_node=nodes, failed="x" * 10**7, summary={"problems": names, "bytes": 7}
    )
    log.keep("proved", run="r" * 10**7, attempt="a1")
    lines = events.log_path(str(tmp_path), 42).read_bytes().splitlines()
    assert max(map(len, lines)) < 10**6
    step, proved = events.read(str(tmp_path), 42)
    assert (step["step"], step["by_node"], step["summary"]["bytes"]) == ("stage-out", nodes, 7)
    assert len(step["failed"]) < 2000
    assert 0 < len(step["summary"]["problems"]) < len(names)
    assert (proved["event"], proved["attempt"]) == ("proved", "a1")


def test_what_a_large_job_says_is_not_cut(tmp_path: Path) -> None:
    log = events.EventLog(str(tmp_path), 42, "n1")
    said = {"source": "é" * 4095, "problems": ["x" * 4000] * 20, "by_node": {f"n{n}": n for n in range(5000)}}
    log.log("step", **said)
    (found,) = events.read(str(tmp_path), 42)
    assert {name: found[name] for name in said} == said


def test_what_is_kept_is_on_the_disk_and_in_no_line_that_was_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = events.EventLog(str(tmp_path), 42, "n1")
    log.log("phase", phase="ready")
    path = events.log_path(str(tmp_path), 42)
    with path.open("a") as file:
        file.write('{"t": 1, "ev')
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda number: synced.append((os.readlink(f"/proc/self/fd/{number}"), path.read_text()))
    )
    log.keep("proved", run="42.0", attempt="a1")
    assert [event["event"] for event in events.read(str(tmp_path), 42)] == ["phase", "proved"]
    assert synced == [(str(path), path.read_text())]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", tmp_path], check=True)
    try:
        log = events.EventLog(str(tmp_path), 42, "n1")
        with pytest.raises(OSError, match="No space"):
            log.keep("proved", run="x" * 9000)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("in the way")
    events.EventLog(str(tmp_path), 42, "n1").log("phase", phase="ready")
    assert events.read(str(tmp_path), 42) == []
