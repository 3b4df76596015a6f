"""Two hundred jobs with `#BB_LUA` lines pass through slurmctld: what does everybody else notice?

Beside as many jobs without them, in the same run and for as long, on a cluster of one node that is kept busy: what is
measured is what happens before a job has nodes. The first jobs of each kind warm the caches.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from bench.row import Row
from tests.testbed import Cluster

NAME = "bench"
JOBS = 200
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
_TICKS = os.sysconf("SC_CLK_TCK")
# Submits as a user's loop would, and asks for the queue meanwhile and for as long as hooks run after it; on the
# controller, by one process, so that what is measured is slurmctld and not the testbed. Prints seconds.
DRIVER = r"""
import subprocess, sys, time
count, script, at_least = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
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
while True:
    seconds, text = run("squeue", "-h", "-O", "BurstBufferState:.20")
    asked.append(run("squeue", "-h")[0])
    now = time.perf_counter() - begin
    if now > at_least and (at_least or text.split().count("staged-in") >= count):
        break
    assert now < 120, text
print(submitting, time.perf_counter() - begin, *sorted(submitted)[count // 2 : count // 2 + 1], *asked)
"""


@dataclass(slots=True)
class _Found:
    """What was measured while jobs of one kind passed; in seconds."""

    squeue: list[float]
    sbatch: float
    submitting: float
    slurmctld: float
    hooks: float


def rows() -> list[Row]:
    """`squeue`, `sbatch` and processor time, with each kind of jobs."""
    lua = ROOT / "slurm/burst_buffer.lua"
    found: dict[str, _Found] = {}
    with Cluster.up(NAME, nodes=1, with_product=True, burst_buffer=lua, slurm_extra=SCHEDULER) as cluster:
        cluster.submit("bob", "#!/bin/sh\nsleep 3600\n", "-N1", "--exclusive", "--time=60")
        for count in (5, JOBS):
            at_least = 0.0
            for kind, script in (("looking", LOOKING), ("asking", ASKING), ("plain", PLAIN)):
                before = _cpu_s(cluster)
                wait = at_least if kind == "plain" else 0.0
                argv = ["python3", "-c", DRIVER, str(count), script, str(wait)]
                told = cluster.run("ctl", argv, cwd="/global/alice", timeout_s=200).stdout
                submitting, at_least, one, *asked = map(float, told.split())
                used = [after - then for after, then in zip(_cpu_s(cluster), before, strict=True)]
                found[kind] = _Found(asked, one, submitting, *used)
                _cancel(cluster)
    return [*_rows("a #BB_LUA stage_out", found["asking"], found["plain"], GOAL),
            *_rows("a #BB_LUA stage_in, looked at", found["looking"], found["plain"], None)]  # fmt: skip


def _rows(what: str, mine: _Found, peer: _Found, goal: float | None) -> list[Row]:
    name, ms = f"{JOBS} jobs without it", statistics.median(peer.squeue) * 1000
    worst = [statistics.quantiles(found.squeue, n=20)[-1] * 1000 for found in (mine, peer)]
    return [
        Row(f"`squeue` while {JOBS} jobs with {what} pass", statistics.median(mine.squeue) * 1000, "ms", name, ms,
            ms * goal if goal else None),
        Row("- the slowest twentieth", worst[0], "ms", name, worst[1]),
        Row("- `sbatch` of one", mine.sbatch * 1000, "ms", name, peer.sbatch * 1000),
        Row("- `sbatch` of all, one after another", mine.submitting, "s", name, peer.submitting),
        Row("- processor time of slurmctld", mine.slurmctld, "s", name, peer.slurmctld),
        Row("- processor time of hooks, per job", mine.hooks / JOBS * 1000, "ms"),
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
