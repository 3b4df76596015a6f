"""The watch: when it looks, asks and tells, by a clock of the test's; and what it makes of what its look says."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from beeond_ctl import config, supervisor, watch
from beeond_ctl import state as states
from beeond_ctl.errors import NodeError
from beeond_ctl.estimate import Estimate
from beeond_ctl.lifecycle import watch as life
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.plan import Job as SlurmJob
from beeond_ctl.request import Request, Transfer, encode
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

HOUR = 3600.0


class Job:
    """A job with a time limit, and a stage-out of so many seconds at so many seconds since it began."""

    def __init__(self, limit_s: float, takes_s: Callable[[float], float]) -> None:
        self.now_s, self.limit_s, self.takes_s = 0.0, limit_s, takes_s
        self.silent_until_s = 0.0
        self.asked: list[float] = []
        self.looked: list[float] = []
        self.told: list[float] = []
        self.hears = True

    def run(self) -> Job:
        """Watch it to its end."""
        watch.watch(self._left, self._look, self._tell, sleep=self._sleep, now=lambda: self.now_s)
        return self

    def _sleep(self, seconds: float) -> None:
        assert 0 < seconds < math.inf
        self.now_s += seconds

    def _left(self) -> float:
        self.asked.append(self.now_s)
        if self.now_s < self.silent_until_s:
            raise NodeError("slurmctld does not answer")
        return self.limit_s - self.now_s

    def _look(self, left_s: float) -> watch.Seen | None:
        self.looked.append(self.now_s)
        takes_s = self.takes_s(self.now_s)
        exact = Estimate(1, 1 << 30, complete=True, seconds=takes_s, rate_of="the stage-in")
        return watch.Seen(takes_s, exact if takes_s > left_s else None)

    def _tell(self, text: str) -> bool:
        assert text.startswith("the stage-out of this job will take about ")
        self.told.append(self.now_s)
        return self.hears


def test_a_job_is_told_once_when_its_limit_is_as_near_as_the_end_of_the_stage_out() -> None:
    job = Job(24 * HOUR, lambda _: 2 * HOUR).run()
    assert job.told == pytest.approx([22 * HOUR], abs=10)
    assert len(job.asked) <= 3
    assert len(job.looked) < 40


def test_a_job_whose_data_grows_is_told_when_it_gets_too_much_and_again_when_it_is_twice_that() -> None:
    job = Job(HOUR, lambda at_s: at_s * 2).run()
    first, second = job.told
    assert HOUR / 3 <= first <= HOUR / 3 + HOUR / 4
    assert second >= 2 * first
    assert job.takes_s(second) >= 2 * job.takes_s(first)


def test_a_job_with_time_enough_is_not_told_and_slurm_not_troubled() -> None:
    job = Job(24 * HOUR, lambda _: 10.0).run()
    assert (job.told, len(job.asked)) == ([], 2)
    assert 24 * HOUR - 20 < job.now_s < 24 * HOUR


def test_what_counts_is_the_limit_as_it_is_when_the_job_is_to_be_told() -> None:
    job = Job(HOUR, lambda _: HOUR / 2)
    takes_s = job.takes_s

    def extended(at_s: float) -> float:
        job.limit_s = 2 * HOUR if at_s > HOUR / 3 else HOUR
        return takes_s(at_s)

    job.takes_s = extended
    assert job.run().told == pytest.approx([1.5 * HOUR], abs=10)


@pytest.mark.parametrize("limit_s", [math.inf, 5.0, 0.0], ids=["none", "too near", "the job is over"])
def test_without_a_limit_that_can_be_met_there_is_nothing_to_watch(limit_s: float) -> None:
    job = Job(limit_s, lambda _: 1e9).run()
    assert (job.looked, job.told) == ([], [])


def test_a_limit_that_is_taken_away_ends_the_watch() -> None:
    job = Job(HOUR, lambda _: HOUR)

    def endless(_: float) -> float:
        job.limit_s = math.inf
        return 2 * HOUR

    job.takes_s = endless
    assert job.run().told == []


def test_while_slurm_is_silent_nobody_is_told_and_it_is_asked_ever_more_rarely() -> None:
    job = Job(24 * HOUR, lambda _: 48 * HOUR)
    job.silent_until_s = 12 * HOUR
    job.run()
    assert min(job.told) >= 12 * HOUR
    assert len([at_s for at_s in job.asked if at_s < 12 * HOUR]) < 20


def test_a_job_that_could_not_be_told_is_told_later() -> None:
    job = Job(HOUR, lambda _: 2 * HOUR)
    job.hears = False
    assert len(job.run().told) > 1


def test_a_look_without_an_answer_is_the_last() -> None:
    looked: list[float] = []
    watch.watch(lambda: HOUR, looked.append, lambda _: True, sleep=lambda _: None, now=lambda: 0.0)
    assert looked == [HOUR]


# --- what a look says -------------------------------------------------------------------------------------

FOUND = {"entries": 1, "bytes": 2, "complete": True, "seconds": 3.5, "rate_of": "the flushes"}


def test_an_answer_is_understood() -> None:
    seen = watch.parse(json.dumps({"most_s": 4, "found": FOUND}).encode())
    assert seen == watch.Seen(4.0, Estimate(1, 2, complete=True, seconds=3.5, rate_of="the flushes"))
    assert watch.parse(b'{"most_s": 4.5, "found": null}') == watch.Seen(4.5, None)


@pytest.mark.parametrize(
    "change",
    [
        {"entries": "1"}, {"bytes": -1}, {"seconds": math.nan}, {"seconds": math.inf}, {"bytes": 10**30},
        {"complete": "yes"}, {"rate_of": "\n" * 99}, {"entries": [1]},
    ],
)  # fmt: skip
def test_an_answer_that_makes_no_sense_is_none(change: dict[str, object]) -> None:
    assert watch.parse(json.dumps({"most_s": 4, "found": FOUND | change}).encode()) is None


@pytest.mark.parametrize("answer", [b"", b"{}", b"[]", b'{"most_s": null, "found": null}', b"[" * 4000])
def test_something_else_than_an_answer_is_none(answer: bytes) -> None:
    assert watch.parse(answer) is None


@pytest.fixture
def user() -> Iterator[Callable[[Sequence[str]], subprocess.Popen[bytes]]]:
    """Starts processes in the place of the user's that looks."""
    started: list[subprocess.Popen[bytes]] = []

    def start(words: Sequence[str]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_look_that_floods_or_hangs_costs_neither_memory_nor_time(
    user: Callable[[Sequence[str]], subprocess.Popen[bytes]],
) -> None:
    ask = watch._ask
    large = b" " * (1 << 19)
    assert ask(user(["yes"]), large, time.monotonic() + 60) == b""
    assert ask(user(["sleep", "60"]), large, time.monotonic() + 0.05) == b""
    assert ask(user(["sh", "-c", "wc -c"]), b"12\n", time.monotonic() + 0.05) == b""  # waits for more
    assert ask(user(["sh", "-c", "read it; echo $it"]), b"12\n", time.monotonic() + 60) == b"12\n"


# --- its life ---------------------------------------------------------------------------------------------


def here(base: Path, *, stage_out: bool = True, tell: bool = True) -> Here:
    """The leader of a job that is ready."""
    paths = config.Paths(run=str(base / "run"), log=str(base / "log"))
    silent = [
        str(base / "bin")
    ]  # else it asks, by a program that has its token, and may learn that it can end
    site = config.SiteConfig(paths=paths, slurm=config.Slurm(tell_in_output=tell, path=silent))
    asked = Request(stage_out=(Transfer("out", "/global/out"),) if stage_out else ())
    job = SlurmJob(7, os.getuid(), os.getgid(), "root")
    state = states.State(job, ("n1",), "n1", encode(asked), site.model_dump(mode="json"), phase="ready")
    states.create(site.paths.run, state)
    return Here(site, state)


def logged(job: Here) -> list[str]:
    path = job.config.paths.log + "/jobs/7.jsonl"
    with open(path, encoding="utf-8") as file:
        return [json.loads(line)["event"] for line in file]


def test_a_watch_is_recorded_holds_nothing_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    job = here(tmp_path)
    life.begin(job)
    found = states.read(job.config.paths.run, 7)
    assert found is not None
    assert found.watch == job.state.watch
    assert found.watch is not None
    process = supervisor.Process("watch", *found.watch)
    try:
        wait_for(lambda: "watch" in cmdline(process.pid), 20)
        assert [each.pid for each in supervisor.find(found.token)] == [process.pid]
        assert os.readlink(f"/proc/{process.pid}/cwd") == "/"
        life.end(job)
        wait_for(lambda: not supervisor.alive(process), 20)
    finally:
        supervisor.kill(process)


def cmdline(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
        return file.read().replace("\0", " ").partition("-m beeond_ctl.")[2]


@pytest.mark.parametrize(("stage_out", "tell"), [(True, False), (False, True)])
def test_no_watch_where_there_is_nothing_to_watch_or_nobody_to_tell(
    tmp_path: Path, stage_out: bool, tell: bool
) -> None:
    job = here(tmp_path, stage_out=stage_out, tell=tell)
    life.begin(job)
    assert job.state.watch is None
    life.end(job)


def test_a_watch_that_cannot_be_started_is_done_without(tmp_path: Path) -> None:
    job = here(tmp_path)
    (job.run_dir / "watch.json").mkdir()
    life.begin(job)
    assert (job.state.watch, logged(job)) == (None, ["not-watched"])


def test_another_process_that_has_got_the_pid_is_left_alone(tmp_path: Path) -> None:
    job = here(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as other:
        job.state.watch = (other.pid, 1)
        life.end(job)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.1)
        other.kill()
