"""Two hundred jobs with `#BB_LUA` lines pass through slurmctld: what does everybody else notice?

Beside as many jobs without them, turn by turn, each time on a new cluster: jobs that have ended stay in slurmctld's
memory, and in each answer to `squeue`. Its one node is kept busy: what is measured is what happens before a job has
nodes. `squeue` is asked at the same lengths of the queue, and as often, for either kind, with a pause in between; it
runs beside slurmctld, as the hooks do, and its own start is most of its time. How long slurmctld itself took for those
answers, waiting for its locks included, is what it says of it (`sdiag`). The first jobs warm the caches.

On a host with few cores that is mostly about who has one. Hence a kind in which all that slurmctld starts has one core,
and the rest the others: what is left is what its locks, and questions to it, make others wait for.
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.row import Row
from tests.testbed import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "bench"
JOBS = 200
TURNS = 2
GOAL = 1.1
"""`squeue` no slower, as its share of the peer's; the tenth is noise."""
ROOT = Path(__file__).resolve().parents[1]
# Slurm stages in for jobs of which it has foreseen a start: for 100 only, where it is not told to look further.
SCHEDULER = (
    "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=10000,bf_interval=1,"
    "bf_min_age_reserve=1,default_queue_depth=1000,bf_max_job_test=1000"
)
PLAIN = "#!/bin/sh\ntrue\n"
ASKING = (
    "#!/bin/sh\n#BB_LUA beeond capacity=1MiB pool=beeond\n"
    "#BB_LUA stage_out source=. destination=/global/alice/out-%j\ntrue\n"
)
LOOKING = ASKING.replace(
    "#BB_LUA stage_out", "#BB_LUA stage_in source=/etc/slurm destination=x\n#BB_LUA stage_out"
)
# What Slurm's own share is: it forks, and loads the script, for each hook of each job.
NOTHING = """
local function nothing() return slurm.SUCCESS, "" end
for _, hook in ipairs({ "job_process", "setup", "data_in", "test_data_in", "real_size", "paths", "pre_run", "post_run",
	"data_out", "test_data_out", "job_teardown", "get_status" }) do
	_G["slurm_bb_" .. hook] = nothing
end
function slurm_bb_pools()
	return slurm.SUCCESS, '{"pools":[{"id":"beeond","quantity":4096,"granularity":1048576}]}'
end
"""
_TICKS = os.sysconf("SC_CLK_TCK")
# Submits as a user's loop would, and asks for the queue meanwhile, and then for as long as hooks run, or for a number
# of rounds; on the controller, by one process, so that what is measured is slurmctld and not the testbed. Prints the
# rounds, and seconds.
DRIVER = r"""
import subprocess, sys, time
count, script, rounds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def run(*argv):
    begin = time.perf_counter()
    done = subprocess.run(argv, input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return time.perf_counter() - begin, done.stdout
begin = time.perf_counter()
asked, submitted = [], []
for number in range(count):
    submitted.append(run("setpriv", "--reuid=alice", "--regid=alice", "--init-groups", "sbatch", "-N1", "-t1")[0])
    if number % 5 == 0:
        asked.append(run("squeue", "-h")[0])
submitting = time.perf_counter() - begin
done = 0
while True:
    text = run("squeue", "-h", "-O", "BurstBufferState:.20")[1]
    asked.append(run("squeue", "-h")[0])
    done += 1
    if done == rounds or (not rounds and text.split().count("staged-in") >= count):
        break
    assert time.perf_counter() - begin < 180, text
    time.sleep(0.02)
print(done, submitting, time.perf_counter() - begin, sorted(submitted)[count // 2], *asked)
"""


@dataclass(slots=True)
class _Found:
    """What was measured while jobs of one kind passed, one number for each turn but for `squeue`; in seconds."""

    squeue: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)
    sbatch: list[float] = field(default_factory=list)
    submitting: list[float] = field(default_factory=list)
    all_done: list[float] = field(default_factory=list)
    slurmctld: list[float] = field(default_factory=list)
    hooks: list[float] = field(default_factory=list)


def rows() -> list[Row]:
    """`squeue`, `sbatch` and processor time, with each kind of jobs."""
    ours = ROOT / "slurm/burst_buffer.lua"
    with tempfile.TemporaryDirectory() as directory:
        nothing = Path(directory) / "burst_buffer.lua"
        nothing.write_text(NOTHING)
        kinds = (
            ("a #BB_LUA stage_out", ASKING, ours, False),
            ("a #BB_LUA stage_out, by hooks that do nothing,", ASKING, nothing, False),
            ("a #BB_LUA stage_out, whose hooks have a core,", ASKING, ours, True),
            ("a #BB_LUA stage_out, by hooks that do nothing and have a core,", ASKING, nothing, True),
            ("a #BB_LUA stage_in, looked at,", LOOKING, ours, False),
        )
        made: list[Row] = []
        for what, script, lua, apart in kinds:
            if apart and len(os.sched_getaffinity(0)) < 2:
                continue
            mine, peer = _Found(), _Found()
            for _ in range(TURNS):
                rounds = _pass(script, lua, 0, mine, apart=apart)
                _pass(PLAIN, lua, rounds, peer, apart=apart)
            made += _rows(what, mine, peer, GOAL if lua is ours else None)
    return made


@contextmanager
def _apart(cluster: Cluster) -> Iterator[None]:
    """Slurm's hooks have the last core, slurmctld and whoever asks it the others."""
    before = os.sched_getaffinity(0)
    *rest, last = sorted(before)
    for process in cluster.processes("ctl"):
        is_hooks = "slurmscriptd" in " ".join(process.cmdline())
        for thread in os.listdir(f"/proc/{process.pid}/task"):
            os.sched_setaffinity(int(thread), {last} if is_hooks else rest)
    os.sched_setaffinity(0, rest)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _pass(script: str, lua: Path, rounds: int, found: _Found, *, apart: bool) -> int:
    """Measure one turn; returns the rounds of asking after all had been submitted."""
    with (
        Cluster.up(NAME, nodes=1, with_product=True, burst_buffer=lua, slurm_extra=SCHEDULER) as cluster,
        _apart(cluster) if apart else nullcontext(),
    ):
        cluster.submit("bob", "#!/bin/sh\nsleep 3600\n", "-N1", "--exclusive", "--time=60")
        _drive(cluster, 5, script, 1 if rounds else 0)
        _cancel(cluster)
        before = _cpu_s(cluster)
        cluster.run("ctl", ["sdiag", "--reset"])
        asked, submitting, all_done, one, *squeue = _drive(cluster, JOBS, script, rounds)
        slurmctld, hooks = (after - then for after, then in zip(_cpu_s(cluster), before, strict=True))
        told = cluster.run("ctl", ["sdiag"]).stdout
    average = re.search(r"REQUEST_JOB_INFO +\( *2003\) count:\d+ +ave_time:(\d+)", told)
    if average is None:
        raise ValueError(f"sdiag says nothing of REQUEST_JOB_INFO: {told}")
    found.squeue += squeue
    found.answer.append(int(average[1]) / 1e6)
    found.sbatch.append(one)
    found.submitting.append(submitting)
    found.all_done.append(all_done)
    found.slurmctld.append(slurmctld)
    found.hooks.append(hooks)
    return int(asked)


def _drive(cluster: Cluster, count: int, script: str, rounds: int) -> list[float]:
    argv = ["python3", "-c", DRIVER, str(count), script, str(rounds)]
    told = cluster.run("ctl", argv, cwd="/global/alice", timeout_s=200).stdout
    return [float(number) for number in told.split()]


def _rows(what: str, mine: _Found, peer: _Found, goal: float | None) -> list[Row]:
    name, ms = f"{JOBS} jobs without it", statistics.median(peer.squeue) * 1000
    worst = [statistics.quantiles(found.squeue, n=20)[-1] * 1000 for found in (mine, peer)]

    def row(label: str, own: list[float], other: list[float], unit: str) -> Row:
        scale = 1000 if unit == "ms" else 1
        return Row(label, statistics.mean(own) * scale, unit, name, statistics.mean(other) * scale)

    return [
        Row(f"`squeue` while {JOBS} jobs with {what} pass", statistics.median(mine.squeue) * 1000, "ms", name, ms,
            ms * goal if goal else None),
        Row("- the slowest twentieth", worst[0], "ms", name, worst[1]),
        Row("- slurmctld's own part of it, mean", statistics.mean(mine.answer) * 1000, "ms",
            name, statistics.mean(peer.answer) * 1000, statistics.mean(peer.answer) * 1000 * goal if goal else None),
        row("- `sbatch` of one", mine.sbatch, peer.sbatch, "ms"),
        row("- `sbatch` of all, one after another", mine.submitting, peer.submitting, "s"),
        Row("- until all of them are staged in", statistics.mean(mine.all_done), "s"),
        row("- processor time of slurmctld", mine.slurmctld, peer.slurmctld, "s"),
        Row("- processor time of hooks, per job", statistics.mean(mine.hooks) / JOBS * 1000, "ms"),
    ]  # fmt: skip


def _cpu_s(cluster: Cluster) -> tuple[float, float]:
    """Processor time of slurmctld, and of all that it started, until now."""
    own = hooks = 0.0
    for process in cluster.processes("ctl", "^(/usr/sbin/slurmctld|slurmctld: slurmscriptd)"):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        user, system, children_user, children_system = (int(field) / _TICKS for field in fields[11:15])
        if "slurmscriptd" in " ".join(process.cmdline()):
            hooks += user + system + children_user + children_system
        else:
            own += user + system
    return own, hooks


def _cancel(cluster: Cluster) -> None:
    cluster.run("ctl", ["scancel", "-u", "alice"])
    deadline = time.monotonic() + 60
    while cluster.run("ctl", ["squeue", "-h", "-u", "alice"]).stdout:
        if time.monotonic() > deadline:
            raise TimeoutError("cancelled jobs are still there")
        time.sleep(0.1)
    time.sleep(3)  # hooks of cancelled jobs, of which Slurm shows nothing
